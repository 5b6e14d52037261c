"""Where the autograd engine treats fake tensors unlike real ones, and how to tell.

For any tensor subclass, and under any dispatch mode, C++ avoids in-place operations on gradients: sums of gradients that
flow together (`InputBuffer::accumulate`) and scatters into fresh zeros (`gather_backward`, `index_backward`, ...) make a new
tensor each. On a card they work in place, when nobody else holds the tensor. Here the in-place form is restored, by
the same rule: the counts of references must be those of a tensor that only the engine holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_SUM = aten.add.Tensor
_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default))
_SCATTERS = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """References to the first operand of a sum, as a dispatch mode sees them.

    Attributes:
        tensor: of the C++ tensor.
        wrapper: of its Python object.
        storage: of its storage.
    """

    tensor: int
    wrapper: int
    storage: int

    @classmethod
    def of(cls, args: Sequence[Any]) -> Holders:
        """Count, from inside `in_place` (the depth of the call is part of the count)."""
        return cls(
            tensor=args[0]._use_count(),
            wrapper=sys.getrefcount(args[0]),
            storage=torch._C._storage_Use_Count(args[0].untyped_storage()._cdata),
        )


class EngineRules:
    """Decides for each operator in backward whether a card would run it in place.

    Args:
        alone: counts of a gradient that only the engine holds, see `calibrate`; None = never in place.
    """

    def __init__(self, alone: Holders | None = None) -> None:
        self.seen: list[Holders] = []
        self._alone = alone
        self._fresh: int | None = None

    def in_place(self, func: Any, args: Sequence[Any]) -> Any:
        """The in-place form of `func` where the engine would use it, else None."""
        if torch.is_grad_enabled():
            return None
        if func is _SUM:
            return self._sum(args)
        if func in _SCATTERS and self._fresh == id(args[0]):
            return _SCATTERS[func]
        return None

    def note(self, func: Any, out: Any) -> None:
        """Remember whether the last result was fresh zeros (only compared, so the address is enough)."""
        self._fresh = id(out) if func in _ZEROS else None

    def _sum(self, args: Sequence[Any]) -> Any:
        a, b = args[:2]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
            return None
        holders = Holders.of(args)
        self.seen.append(holders)
        alone = holders == self._alone and torch.ops.aten.is_non_overlapping_and_dense.default(a)
        return aten.add_.Tensor if alone else None


class _Counter(TorchDispatchMode):
    """Counts at the depth at which `StorageTracer` counts."""

    def __init__(self, rules: EngineRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._rules.in_place(func, args)
        return func(*args, **(kwargs or {}))


def calibrate(device_type: str) -> Holders | None:
    """Counts of a gradient that only the engine holds: that of x in sin(x) + cos(x). Call under the fake mode."""
    if not hasattr(Tensor, "_use_count"):
        return None  # sums stay out of place: a little too much memory
    rules = EngineRules()
    with _Counter(rules):
        x = torch.ones(2, 2, device=device_type, requires_grad=True)
        y = x * 2
        (torch.sin(y) + torch.cos(y)).sum().backward()
    return rules.seen[0] if len(rules.seen) == 1 else None
