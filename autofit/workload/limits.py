"""The memory limit of a trial, enforced so that what exceeds it really fails, and the counters that say how much was used.

CUDA: `set_per_process_memory_fraction` makes the caching allocator refuse what exceeds (limit - context): a large card behaves as a small one.
CPU: a soft RLIMIT_AS relative to what the process had before the model (an absolute one is useless: an idle torch process maps 2 GB);
peak reserved is then the peak of the same counter, so that limit and counter agree.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofit.devices import nvml
from autofit.errors import UserError
from autofit.trials.measurement import Memory
from autofit.units import format_bytes


class MemoryMeter(Protocol):
    """Counters of one trial."""

    def limit(self, limit_bytes: int | None) -> None:
        """Enforce a limit from here on; None = none."""
        ...

    def mark_warm(self) -> None:
        """Say that the first optimizer step is over."""
        ...

    def read(self) -> Memory:
        """The counters now."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else is worth keeping."""
        ...


def meter_for(device: str, *, context_bytes: int) -> MemoryMeter:
    """The meter of a device. Call it before the first tensor."""
    return CpuMeter() if device == "cpu" else CudaMeter(context_bytes=context_bytes)


@dataclass
class CpuMeter:
    """Counters of this process from /proc, relative to its start."""

    base_anonymous: int = 0
    base_address_space: int = 0

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")  # resets the peak of the resident set
        status = _status()
        self.base_anonymous = status.get("RssAnon", status.get("VmRSS", 0))
        self.base_address_space = status.get("VmSize", 0)

    def limit(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (self.base_address_space + limit_bytes, hard))

    def mark_warm(self) -> None:
        """The CPU allocator has no retries to count."""

    def read(self) -> Memory:
        status = _status()
        resident_peak = status.get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        # Pages of libraries that are touched for the first time are resident too, but not the trial's memory.
        own_peak = resident_peak - status.get("RssFile", 0) - status.get("RssShmem", 0) - self.base_anonymous
        return Memory(
            peak_allocated_bytes=max(0, own_peak),
            peak_reserved_bytes=max(0, status.get("VmPeak", resident_peak) - self.base_address_space),
            context_bytes=0,
            device_used_bytes=resident_peak,
            host_peak_bytes=resident_peak,
        )

    def facts(self) -> dict[str, Any]:
        return {"involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, **_cpu_pressure()}


@dataclass
class CudaMeter:
    """Counters of the caching allocator and of the driver, for the one visible card."""

    context_bytes: int
    used_before: int | None = None
    retries_warm: int | None = None

    def __post_init__(self) -> None:
        self.used_before = nvml.used_bytes()
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()

    def limit(self, limit_bytes: int | None) -> None:
        if limit_bytes is None:
            return
        room = limit_bytes - self.context_bytes
        total = torch.cuda.get_device_properties(0).total_memory
        if room <= 0:
            raise UserError(
                f"the memory limit {format_bytes(limit_bytes)} is smaller than the CUDA context ({format_bytes(self.context_bytes)})"
            )
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))

    def mark_warm(self) -> None:
        self.retries_warm = self._retries()

    def read(self) -> Memory:
        torch.cuda.synchronize()
        used = nvml.used_bytes()
        if used is None:
            free, total = torch.cuda.mem_get_info()
            used = total - free
        return Memory(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            context_bytes=self._context(used),
            device_used_bytes=used,
            host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            alloc_retries=self._retries(),
        )

    def facts(self) -> dict[str, Any]:
        after_warmup = None if self.retries_warm is None else self._retries() - self.retries_warm
        return {"alloc_retries_after_warmup": after_warmup, **nvml.conditions()}

    def _context(self, used: int) -> int:
        """What this process took from the card beside the allocator's segments; the known value when neighbours blur it."""
        if self.used_before is None:
            return self.context_bytes
        seen = used - self.used_before - torch.cuda.memory_reserved()
        return seen if 0 <= seen <= 4 << 30 else self.context_bytes

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _status() -> dict[str, int]:
    """/proc/self/status sizes in bytes; empty where there is none."""
    sizes = {}
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as handle:
        for line in handle:
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def _cpu_pressure() -> dict[str, float]:
    """Share of the last ten seconds in which some task waited for a processor, in percent."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/pressure/cpu", encoding="utf-8") as handle,
    ):
        return {"cpu_pressure_percent": float(handle.readline().split("avg10=")[1].split()[0])}
    return {}
