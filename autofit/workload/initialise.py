"""Fast random weights on the CPU.

A CPU draws about 10^8 normal numbers a second: 7 s for bert-large, at every trial. Speed and memory do not depend on
the values, so large tensors are filled with copies of one random block. Everything else a model's initialisation
does (norms to one, biases to zero, scaled residuals) runs as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Prime, so that no row of a weight matrix repeats another: equal rows would make features equal.
BLOCK = 1_048_573


class FastRandom(TorchDispatchMode):
    """While active, `normal_` and `uniform_` fill large CPU tensors by tiling one random block per distribution."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or tile in its place."""
        kwargs = kwargs or {}
        if func in _RANDOM and _is_large_cpu(args[0]):
            block = self._block(func, args, kwargs)
            flat = args[0].view(-1)
            whole = flat.numel() // BLOCK
            flat[: whole * BLOCK].view(whole, BLOCK).copy_(block)
            flat[whole * BLOCK :].copy_(block[: flat.numel() - whole * BLOCK])
            return args[0]
        return func(*args, **kwargs)

    def _block(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        key = (
            func,
            args[1:],
            tuple(sorted((k, v) for k, v in kwargs.items() if k != "generator")),
            args[0].dtype,
        )
        if key not in self._blocks:
            self._blocks[key] = func(torch.empty(BLOCK, dtype=args[0].dtype), *args[1:], **kwargs)
        return self._blocks[key]


_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def _is_large_cpu(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not isinstance(tensor, FakeTensor)
        and tensor.numel() > BLOCK
        and tensor.is_contiguous()
    )
