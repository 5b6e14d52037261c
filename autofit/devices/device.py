"""The device a search runs on, as facts: answered by a child, recorded in a landscape, or looked up in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autofit.problem.config import Precision
from autofit.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """A process that holds device memory: `pid`, `name`, bytes (None where the driver does not say)."""

    pid: int
    name: str
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a search needs to know of a device.

    Attributes:
        kind: `cuda` or `cpu`; other accelerators keep torch's own type name.
        index: device index, 0 for the CPU.
        name: product name.
        total_memory_bytes: the device's memory (CPU: of the machine or its cgroup).
        free_memory_bytes: what was free when the search started.
        context_bytes: what is lost before the first tensor; 0 for the CPU.
        compute_capability: `8.0`; None without CUDA.
        precisions: those the hardware computes natively.
        holders: other processes on the device.
    """

    kind: str
    index: int = 0
    name: str
    total_memory_bytes: int
    free_memory_bytes: int | None = None
    context_bytes: int = 0
    compute_capability: str | None = None
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    holders: tuple[MemoryHolder, ...] = ()

    @property
    def torch_name(self) -> str:
        """`cpu` or `cuda:0`."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def margin_bytes(self) -> int:
        """Bytes left unused when no limit is given: a margin in bytes, because other things grow in bytes.

        CUDA: 2 % of the card, at least 256 MiB (fragmentation of the real run, a desktop's fluctuation). CPU: an eighth
        of the machine, at least 1 GiB (the rest of the system lives there).
        """
        if self.kind == "cpu":
            return max(GIB, self.total_memory_bytes // 8)
        return max(256 * MIB, self.total_memory_bytes // 50)

    def default_limit_bytes(self) -> int:
        """What is free, less the margin; at least 1 byte."""
        free = self.total_memory_bytes if self.free_memory_bytes is None else self.free_memory_bytes
        return max(1, min(free, self.total_memory_bytes) - self.margin_bytes())

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {**asdict(self), "precisions": [str(p) for p in self.precisions]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Device:
        """Inverse of `to_json`; unknown keys are ignored, `kind` defaults to what the name suggests."""
        names = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in names}
        kept.setdefault("name", "unknown")
        kept.setdefault("kind", "cpu" if "cpu" in str(kept["name"]).lower() else "cuda")
        kept["precisions"] = tuple(Precision(p) for p in kept.get("precisions", ("fp32",)))
        kept["holders"] = tuple(MemoryHolder(**h) for h in kept.get("holders", ()))
        return cls(**kept)
