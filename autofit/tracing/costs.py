"""The work of one operator: what a roofline needs, and nothing measured.

Bytes are those of the operator's inputs and outputs, as if nothing stayed in cache; floating-point operations are those of torch's own
table (matrix products, convolutions, attention), 0 for all else. Views cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autofit.memory.trace_builder import TraceBuilder

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}
_ALLOCATING = ("empty", "new_empty", "lift_fresh", "detach", "_local_scalar_dense", "alias", "_unsafe_view")
_TENSORS_PER_LAUNCH = 48  # of multi-tensor kernels, limited by the size of kernel arguments
_BLOCKS_PER_LAUNCH = 320
_CHUNK = 65536


def _grouped_flops(mat_a: Tensor, mat_b: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """2 x rows x k x n: every row meets one expert, whichever it is."""
    return 2 * mat_a.shape[-2] * mat_a.shape[-1] * mat_b.shape[-1]


def _expert_flops(rows: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Of transformers' own operator: (rows, k) x (experts, k, n)."""
    return 2 * rows.shape[0] * weight.shape[1] * weight.shape[2]


def _expert_backward_flops(rows: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Two products of the forward's size."""
    return 2 * _expert_flops(rows, weight)


#: name of an operator that torch's own table does not have -> its floating-point operations
FLOPS: Mapping[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_flops,
    "grouped_mm_fallback": _expert_flops,
    "grouped_mm_fallback_backward": _expert_backward_flops,
}


@functools.cache
def _is_free(func: Any) -> bool:
    """Views and uninitialised memory."""
    name = func._overloadpacket.__name__
    return bool(getattr(func, "is_view", False)) or any(name.startswith(prefix) for prefix in _ALLOCATING)


@functools.cache
def _formula(func: Any) -> Any:
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(func._overloadpacket) or FLOPS.get(func._overloadpacket.__name__)


def record(
    builder: TraceBuilder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Add the work of one call to `builder`."""
    if _is_free(func):
        return
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if not inputs and not outputs:
        return  # a profiler's range, not work
    formula = _formula(func)
    flops = int(formula(*_equal_heads(func, args), **kwargs, out_val=out)) if formula is not None else 0
    lead = inputs[0] if inputs else (outputs[0] if outputs else None)
    written = outputs or inputs[:1]  # an operator without result writes its first input
    builder.op(
        str(func),
        dtype="other" if lead is None else _DTYPES.get(lead.dtype, "other"),
        flops=flops,
        nbytes=sum(_nbytes(t) for t in inputs) + sum(_nbytes(t) for t in written),
        kernels=_launches(func, args),
    )


def _equal_heads(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments for torch's table with keys and values of grouped-query attention as wide as the queries: the work is the same.

    Torch's table refuses fewer heads up to 2.11 and takes them from 2.13.
    """
    name = func._overloadpacket.__name__
    if not name.startswith("_scaled_dot_product"):
        return args
    first = 1 if name.endswith("_backward") else 0  # the gradient comes before query, key and value
    heads = args[first].shape[1]
    wide = [torch.Size((t.shape[0], heads, *t.shape[2:])) for t in args[first + 1 : first + 3]]
    return [*args[: first + 1], *wide, *args[first + 3 :]]


def _nbytes(tensor: Tensor) -> int:
    """Bytes that are read: a broadcast dimension is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def _launches(func: Any, args: Sequence[Any]) -> int:
    name = func._overloadpacket.__name__
    if (
        not name.startswith(("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach"))
        or not args
    ):
        return 1
    tensors = [t for t in args[0] if isinstance(t, Tensor)] if isinstance(args[0], list | tuple) else []
    chunks = sum(-(-t.numel() // _CHUNK) for t in tensors)
    return max(1, -(-len(tensors) // _TENSORS_PER_LAUNCH), -(-chunks // _BLOCKS_PER_LAUNCH))
