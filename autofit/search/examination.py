"""What this machine can search, and why not the rest: the facts behind `autofit doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from autofit.devices import nvml
from autofit.devices.device import Device
from autofit.problem.config import Precision
from autofit.problem.presets import names as preset_names
from autofit.problem.space import DEFAULT_OPTIMS, optim_problem, precision_problem
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.search.scene import capabilities_of, choose_device
from autofit.units import format_bytes


def examine(device_name: str | None) -> Iterator[str]:
    """Yield the report line by line.

    Raises:
        UserError: no such device.
        WorkerError: the libraries cannot be imported.
    """
    chosen = choose_device(device_name)
    with ProcessRunner(Workload(model="none"), chosen) as runner:
        facts = runner.describe(workload=None)
        fallback = runner.fallback_reason
    device, capabilities = Device.from_json(facts["device"]), capabilities_of(facts)
    yield f"device      {device.name} ({device.torch_name})"
    yield f"memory      {format_bytes(device.total_memory_bytes)}, {format_bytes(device.free_memory_bytes or 0)} free; a search uses {format_bytes(device.default_limit_bytes())} unless --memory says otherwise"
    if device.kind == "cuda":
        yield f"context     {format_bytes(device.context_bytes)} before the first tensor"
        for holder in device.holders:
            held = format_bytes(holder.used_bytes) if holder.used_bytes else "some memory"
            yield f"busy        {holder.name} (pid {holder.pid}) holds {held}"
    yield "software    " + ", ".join(f"{name} {version}" for name, version in facts["software"].items())
    yield f"processes   {'spawned afresh: ' + fallback if fallback else 'forked from a server that has the libraries loaded'}"
    for precision in Precision:
        problem = precision_problem(precision, capabilities)
        note = " (on request)" if precision is Precision.PURE_BF16 else ""
        yield f"precision   {precision:<22} {'yes' + note if problem is None else 'no: ' + problem}"
    for optim in DEFAULT_OPTIMS:
        problem = optim_problem(optim, capabilities)
        yield f"optimizer   {optim:<22} {'yes' if problem is None else 'no: ' + problem}"
    others = [name for name in capabilities.optims if name not in DEFAULT_OPTIMS and optim_problem(name, capabilities) is None]
    yield f"            with --optim also any of TrainingArguments' names: {', '.join(others)}"
    if device.kind == "cpu" and nvml.used_bytes() is not None:
        yield "note        there is an NVIDIA card, but --device cpu was asked for"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield "note        CUDA_VISIBLE_DEVICES is empty: no card is visible"
    yield f"presets     {', '.join(preset_names())}"
