"""Memory counters of this process and its card, as far as there are any."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from autofit.devices import nvml
from autofit.units import MIB

STATISTICS = (
    "num_alloc_retries",
    "num_ooms",
    "num_device_alloc",
    "num_device_free",
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "inactive_split_bytes.all.current",
)


def driver_used_bytes() -> int | None:
    """Used memory of the card: NVML, else nvidia-smi (to the MiB), else None."""
    used = nvml.used_bytes()
    if used is not None or shutil.which("nvidia-smi") is None:
        return used
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    text = answer.stdout.strip().splitlines()[:1]
    return int(text[0]) * MIB if text and text[0].strip().isdigit() else None


def reserved_share() -> float | None:
    """Peak reserved bytes relative to the card's memory, as a worker reports it with an exception; None before CUDA is up."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return float(torch.cuda.max_memory_reserved() / total) if total else None


def counters(used_before: int | None = None) -> dict[str, Any]:
    """The caching allocator's and the driver's counters now; empty where CUDA is not up.

    Args:
        used_before: the card's used bytes before this process; gives `context_bytes`, what it took beside the allocator.
    """
    import torch

    if not torch.cuda.is_initialized():
        return {}
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    used, reserved = driver_used_bytes(), torch.cuda.memory_reserved()
    found: dict[str, Any] = {name: statistics.get(name) for name in STATISTICS}
    found |= {"free_bytes": free, "total_bytes": total, "driver_used_bytes": used, "reserved_bytes": reserved}
    if used is not None and used_before is not None:
        found["context_bytes"] = used - used_before - reserved
    return found
