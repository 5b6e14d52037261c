"""Recording a landscape: every legal configuration, once, resumable point by point."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autofit.config import TrialConfig
from autofit.device import Device
from autofit.errors import FileFormatError, SearchFailed
from autofit.landscape import Landscape, Point
from autofit.predict import dominates
from autofit.process import ProcessRunner
from autofit.runner import TrialRequest
from autofit.scene import choose_device, memory_limit, space_of
from autofit.spec import SearchSpec
from autofit.trial import Outcome
from autofit.units import format_bytes

FAILURES_BEFORE_STOP = 5


def record_landscape(
    spec: SearchSpec,
    path: str | Path,
    *,
    timeout_seconds: float | None = None,
    window_seconds: float = 1.0,
    say: Callable[[str], None] = lambda text: None,
) -> Landscape:
    """Run every configuration that `spec` allows and write the landscape after each.

    A configuration that needs at least as much memory as one that did not fit is recorded as out of memory without a run. One that fails for
    another reason is left out (said), and tried again by the next call.

    Args:
        spec: workload, effective batch, device, limit and restrictions; its search budgets are not looked at.
        path: landscape file; an existing one is gone on with.
        timeout_seconds: stop after this time, with what there is.
        window_seconds: measured time per configuration.
        say: told of each point.

    Raises:
        UserError: an input cannot be used.
        FileFormatError: the existing file is another landscape.
        SearchFailed: several configurations in a row failed for other reasons than memory.
    """
    begin = time.monotonic()
    name = choose_device(spec.device)
    with ProcessRunner(spec.workload, name) as runner:
        facts = runner.describe()
        device = Device.from_json(facts["device"])
        runner.context_bytes = device.context_bytes
        limit = memory_limit(spec, device, None)
        space = space_of(spec, facts)
        described = {
            "model": spec.workload.model,
            "digest": facts["model"]["digest"],
            "task": facts["model"]["task"],
            "seq_len": facts["model"]["seq_len"],
            "effective_batch": spec.effective_batch,
            "memory_limit_bytes": spec.memory_limit_bytes,
        }
        points = _existing(path, described, device)
        failures = 0
        for number, config in enumerate(_by_memory(space.configs), start=1):
            if config.key() in points:
                continue
            if timeout_seconds is not None and time.monotonic() - begin > timeout_seconds:
                say(f"stopped after the time given: {len(points)} of {len(space)} configurations are recorded")
                break
            point, message = _point(config, points, runner, spec, limit, window_seconds)
            say(f"[{number}/{len(space)}] {config.label()}: {message}")
            if point is None:
                failures += 1
                if failures >= FAILURES_BEFORE_STOP:
                    raise SearchFailed(f"{failures} configurations failed in a row: {message}")
                continue
            failures = 0
            points[config.key()] = point
            _landscape(points, device, described, facts["software"]).save(path)
        if not points:
            raise SearchFailed("no configuration could be recorded", hint="raise --timeout, or see the messages above")
        return _landscape(points, device, described, facts["software"])


def _point(
    config: TrialConfig,
    points: dict[str, Point],
    runner: ProcessRunner,
    spec: SearchSpec,
    limit: int,
    window_seconds: float,
) -> tuple[Point | None, str]:
    """(the point, what to say); no point when the trial failed for another reason than memory."""
    if any(p.measurement is None and dominates(config, p.config) for p in points.values()):
        return Point(config=config), "out of memory (needs no less than one that did not fit)"
    result = runner.run(
        TrialRequest(
            config=config,
            memory_limit_bytes=limit,
            timeout_seconds=spec.trial_timeout_seconds,
            window_seconds=window_seconds,
            seed=spec.seed,
        )
    )
    if result.measurement is not None:
        speed = result.measurement.samples_per_second(
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
        needed = result.measurement.memory.needed_bytes
        text = f"{speed:.2f} samples/s" + (f", {format_bytes(needed)}" if needed is not None else "")
        return Point(config=config, measurement=replace(result.measurement, facts=None)), text
    assert result.failure is not None
    if result.outcome is Outcome.INFEASIBLE:
        return Point(config=config), result.failure.reason.value.replace("_", " ")
    return None, result.failure.message


def _by_memory(configs: tuple[TrialConfig, ...]) -> list[TrialConfig]:
    """Small batches first, so that what follows an out-of-memory is known without a run."""
    return sorted(configs, key=lambda c: (c.precision, c.optim, not c.gradient_checkpointing, c.per_device_train_batch_size))


def _existing(path: str | Path, described: dict[str, object], device: Device) -> dict[str, Point]:
    if not Path(path).exists():
        return {}
    found = Landscape.load(path)
    different = [name for name, value in described.items() if found.spec.get(name) != value]
    if different or found.device.name != device.name:
        what = different[0].replace("_", " ") if different else "device"
        raise FileFormatError(f"{str(path)!r} is the landscape of another {what}", hint="give another --output")
    return {p.config.key(): p for p in found.points}


def _landscape(
    points: dict[str, Point], device: Device, described: dict[str, object], software: dict[str, str]
) -> Landscape:
    return Landscape(points=tuple(points.values()), device=replace(device, holders=()), spec=described, software=software)
