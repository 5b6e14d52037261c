"""The first request to a child: what device, model and software there are. All of it JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from autofit.devices import nvml
from autofit.devices.device import Device
from autofit.errors import UserError
from autofit.problem.config import Precision
from autofit.problem.space import OPTIM_PACKAGES
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.workload import models
from autofit.workload.data.facts import describe_data
from autofit.workload.evaluation import evaluation_label
from autofit.workload.scripts.facts import describe_script
from autofit.workload.surroundings import training_facts
from autofit.workload.trial import makes_own_optimizer
from autofit.workload.user_arguments import (
    argument_defaults,
    class_of,
    own_class,
    refuse_model_keywords,
    scalars,
    trained_as,
)

PACKAGES = ("torch", "transformers", "accelerate", "optuna", "bitsandbytes", "datasets", "numpy", "peft", "trl")
IMPORTED = ("bitsandbytes",)
OWN_OPTIMIZER = "the Trainer makes its own optimizer: optim has no effect and is not searched"


def answer_describe(payload: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Return device, software, capabilities and, when a workload is given, model facts.

    Raises:
        UserError: no such device, or a model that cannot be resolved or built.
    """
    channel.enter("device")
    device = describe_device(payload["device"])
    answer: dict[str, Any] = {
        "device": device.to_json(),
        "software": software(device),
        "missing_packages": missing_packages(),
        "optims": [str(name.value) for name in OptimizerNames],
        "argument_defaults": scalars(argument_defaults()),
    }
    if payload.get("workload") is not None:
        channel.enter("model")
        answer["model"], answer["preload"] = describe_model(Workload.from_json(payload["workload"]), cpu=device.kind == "cpu")
        own = answer["model"].pop("argument_defaults", None)
        answer["argument_defaults"] = answer["argument_defaults"] if own is None else own
    return answer


def describe_device(name: str) -> Device:
    """Facts of `cpu` or of the one visible CUDA card.

    Raises:
        UserError: there is no such device.
    """
    return _cpu() if name == "cpu" else _cuda(name)


def software(device: Device) -> dict[str, str]:
    """Versions of what decides speed and memory."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if device.kind == "cuda":
        versions["cuda"] = str(torch.version.cuda or torch.version.hip)
        driver = nvml.conditions().get("driver")
        if driver:
            versions["driver"] = str(driver)
    return versions


def missing_packages() -> dict[str, str]:
    """Optional packages that cannot be used, and why. Only bitsandbytes, of the default space, is imported to find out."""
    missing = {}
    for name in dict.fromkeys(package for _, package in OPTIM_PACKAGES):
        if importlib.util.find_spec(name) is None:
            missing[name] = "not installed"
        elif name in IMPORTED:
            try:
                importlib.import_module(name)
                if torch.cuda.is_available() and (flaw := _native_flaw(name)) is not None:
                    missing[name] = f"without its native library ({flaw})"
            except Exception as error:  # any failure of a foreign package's import is a fact to report, with its text
                reason = str(error).splitlines()[0] if str(error) else ""
                missing[name] = f"not importable ({type(error).__name__}: {reason})"
    return missing


def _native_flaw(name: str) -> str | None:
    """Why bitsandbytes' own library did not load, without paths; None when it did. It says nothing before the first call into it, in a training."""
    lib = getattr(sys.modules.get(f"{name}.cextension"), "lib", None)
    flaw = getattr(lib, "__dict__", {}).get("error_msg")  # one that did load answers to every name
    return None if flaw is None else re.sub(r"\S*/", "", str(flaw).partition("\n")[0])


def describe_model(workload: Workload, *, cpu: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Model facts and the names of the modules worth importing in the fork server."""
    if workload.script is not None:
        return describe_script(workload, cpu=cpu), [name for name in sys.modules if name.startswith("transformers.models.")]
    resolved = models.resolve(workload)
    objects = resolved.objects
    if objects is not None and not objects.is_live:
        refuse_model_keywords(objects.extra)
    facts = models.facts(resolved)
    data = describe_data(resolved)
    facts |= {**data, "warnings": [*facts["warnings"], *data.get("warnings", ())]}
    facts |= {} if objects is None else own_class(class_of(objects.extra), cpu=cpu) | trained_as(facts, objects.extra)
    facts |= {} if objects is None else training_facts({**objects.extra, "data_collator": objects.data_collator})
    if objects is not None and (objects.train_dataset is not None or "training" in facts):
        facts["live"] = True  # a name alone does not make this training again
    if objects is not None and makes_own_optimizer(resolved):
        facts |= {"own_optimizer": True, "warnings": [*facts["warnings"], OWN_OPTIMIZER]}
    if objects is not None and objects.extra.get("eval_dataset") is not None:
        facts["evaluation_data"] = evaluation_label(objects.extra["eval_dataset"], objects.extra.get("arguments") or {})
    if (objects is None or objects.train_dataset is None) and (resolved.task is None or resolved.config is None):
        raise UserError(
            f"there is no data for {resolved.name!r}: autofit knows no task of it", hint="pass train_dataset=... (and data_collator=...)"
        )
    model_type = "" if resolved.config is None else resolved.config.model_type.replace("-", "_")
    prefix = f"transformers.models.{model_type}.modeling_"
    return facts, [name for name in sys.modules if name.startswith(prefix)]


def _cpu() -> Device:
    info = _meminfo()
    total = min(info.get("MemTotal", 0), _cgroup_limit() or sys.maxsize)
    precisions = [Precision.FP32]
    flags = _cpu_flags()
    if flags & {"avx512_bf16", "amx_bf16", "bf16", "asimdbf16"}:
        precisions += [Precision.BF16, Precision.PURE_BF16]
    return Device(
        kind="cpu",
        name=_cpu_name(),
        total_memory_bytes=total,
        free_memory_bytes=min(info.get("MemAvailable", total), total),
        precisions=tuple(precisions),
    )


def _cuda(name: str) -> Device:
    used_before = nvml.used_bytes()
    if not torch.cuda.is_available():
        built = (
            "this build of torch has no CUDA support"
            if not torch.backends.cuda.is_built()
            else "torch finds no CUDA device"
        )
        raise UserError(
            f"device {name} cannot be used: {built}",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    properties = torch.cuda.get_device_properties(0)
    context, free = _cuda_context(used_before)
    precisions = [Precision.FP32, Precision.FP16]
    if torch.version.hip is None and properties.major >= 8:
        precisions.append(Precision.TF32)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        precisions += [Precision.BF16, Precision.PURE_BF16]
    return Device(
        kind="cuda",
        index=int(name.partition(":")[2] or 0),
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        free_memory_bytes=free,
        context_bytes=context,
        compute_capability=f"{properties.major}.{properties.minor}",
        precisions=tuple(precisions),
        holders=nvml.holders(),
    )


def _cuda_context(used_before: int | None) -> tuple[int, int]:
    """(bytes that the context and the math libraries take, bytes that were free before them)."""
    for dtype in (torch.float32, torch.float16):
        a = torch.ones(256, 256, device="cuda", dtype=dtype)
        (a @ a).sum().item()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    if used_before is None:
        return 0, free + reserved
    return max(0, (total - free) - used_before - reserved), total - used_before


def _meminfo() -> dict[str, int]:
    sizes = {}
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo", encoding="ascii") as handle:
            for line in handle:
                name, _, rest = line.partition(":")
                sizes[name] = int(rest.split()[0]) * 1024
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        sizes["MemTotal"] = page * os.sysconf("SC_PHYS_PAGES")
    return sizes


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as handle:
                text = handle.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith(("flags", "Features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return f"{line.partition(':')[2].strip()} ({os.cpu_count()} CPUs)"
    except OSError:
        pass
    return f"{platform.machine()} CPU ({os.cpu_count()} CPUs)"
