"""Which attention kernel a card would choose, and what PyTorch does around it.

`torch.nn.functional.scaled_dot_product_attention` asks the device at hand; here the device is only described. The order of
preference and the conditions are those of `sdp_utils.cpp` for dense inputs of four dimensions (checked against the choice of torch 2.6 to
2.15's own CUDA builds), the handling of masks and odd head sizes that of `attention.cpp`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
_MASK_ALIGNMENT = 16  # elements, of every stride of the mask that the memory-efficient kernel reads
_FLASH_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attention call, after autocast.

    Attributes:
        query, key, value: (batch, heads, length, head size).
        mask: attention mask or bias, None for none.
        dropout: probability.
        causal: whether the kernel masks the future itself.
        gqa: whether keys have fewer heads than queries and the caller allows that.
        needs_grad: whether any input requires a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    needs_grad: bool

    @property
    def half(self) -> bool:
        """Whether the arithmetic is in 16 bits."""
        return self.query.dtype in (torch.float16, torch.bfloat16)

    @property
    def dense_4d(self) -> bool:
        """Whether the fused kernels' common conditions on shape and layout hold, the mask's (T5's position bias breaks them) too."""
        tensors = (self.query, self.key, self.value)
        return (
            all(t.dim() == 4 and t.stride(-1) == 1 and 0 not in t.shape for t in tensors)
            and (self.gqa or self.query.shape[1] == self.key.shape[1] == self.value.shape[1])
            and (self.mask is None or self.mask.stride(-1) == 1)
        )


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def cudnn_leads() -> bool:
    """Whether cuDNN's attention comes before the others where it can run: from torch 2.10, with a cuDNN newer than 9.15.0.

    A build without CUDA stands for the card's machine, where torch's own wheel brings its cuDNN: such a one from 2.11.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or torch_version() < (2, 10):
        return False
    installed = None
    with contextlib.suppress(RuntimeError):  # a cuDNN that torch was not built for: training fails, and says so itself
        installed = torch.backends.cudnn.version() if torch.backends.cuda.is_built() else None
    return torch_version() >= (2, 11) if installed is None else installed > 91500


def choose(call: Call, capability: tuple[int, int]) -> str:
    """`cudnn`, `flash`, `efficient` or `math`: what a CUDA card of this compute capability would run."""
    if not call.dense_4d:
        return "math"
    if _cudnn_can(call, capability):
        return "cudnn"
    if _flash_can(call, capability):
        return "flash"
    if _efficient_can(call, capability):
        return "efficient"
    return "math"


def _cudnn_can(call: Call, capability: tuple[int, int]) -> bool:
    """On compute capability 9 and 10, for the calls that it knows."""
    if capability[0] not in (9, 10) or not cudnn_leads():
        return False
    lone_query = call.query.shape[2] == 1 and (call.dropout > 0.0 or (capability[0] == 10 and torch_version() == (2, 14)))
    return (
        call.half
        and not (call.mask is not None and call.mask.requires_grad)
        and _cudnn_heads(call, capability)
        and (torch_version() < (2, 12) or (call.dropout * 16.0).is_integer())
        and call.key.shape[2] != 1
        and not lone_query
        and not torch.are_deterministic_algorithms_enabled()
    )


def _cudnn_heads(call: Call, capability: tuple[int, int]) -> bool:
    """Head sizes that cuDNN's attention takes; the wheels of torch 2.14 bring the first whose backward knows 256."""
    d, dv = call.query.shape[-1], call.value.shape[-1]
    if d % 8 or dv % 8:
        return False
    if torch_version() < (2, 14):
        return max(d, dv) <= (256 if capability[0] == 9 else 128) or (d, dv) == (192, 128)
    if not call.needs_grad:
        return max(d, dv) <= 256
    return max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))


def _flash_can(call: Call, capability: tuple[int, int]) -> bool:
    d = call.query.shape[-1]
    narrow_smem = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    wide_head = call.needs_grad and narrow_smem and d > 192 and not (call.dropout == 0.0 and d > 224)
    return (
        call.half
        and call.mask is None
        and capability >= (8, 0)
        and d == call.key.shape[-1] == call.value.shape[-1]
        and d <= 256
        and not wide_head
        and not (call.causal and call.query.shape[2] != call.key.shape[2])
    )


def _efficient_can(call: Call, capability: tuple[int, int]) -> bool:
    """The memory-efficient kernel learned grouped queries in torch 2.14."""
    if call.gqa and torch_version() < (2, 14):
        return False
    if capability < (5, 0) or (call.query.dtype == torch.bfloat16 and capability < (8, 0)):
        return False
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and call.half)
    alignment = 4 if capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if call.half else 4)
    d = call.query.shape[-1]
    return d == call.key.shape[-1] and d % alignment == 0 and call.value.shape[-1] % alignment == 0


def routed(
    original: Callable[..., Tensor], capability: tuple[int, int], routes: Counter[str]
) -> Callable[..., Tensor]:
    """A replacement of `scaled_dot_product_attention` for a card of this compute capability; `routes` counts the kernels."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "cuda":
            routes["cpu"] += 1
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        call = Call(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            gqa=enable_gqa and query.shape[1] != key.shape[1],
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        )
        kernel = choose(call, capability)
        routes[kernel] += 1
        with torch.autocast("cuda", enabled=False):  # as below PyTorch's own: the arithmetic of `math` is in fp32 then
            return _RUN[kernel](call, scale)

    return scaled_dot_product_attention


def _autocast(*tensors: Tensor | None) -> Any:
    """Autocast keeps attention on its list of low-precision operators."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != dtype else t for t in tensors
    )


def _flash(call: Call, scale: float | None) -> Tensor:
    dim = call.query.shape[-1]
    inputs = [call.query, call.key, call.value]
    if dim % _FLASH_ALIGNMENT:
        scale = dim**-0.5 if scale is None else scale
        inputs = [functional.pad(t, (0, _FLASH_ALIGNMENT - dim % _FLASH_ALIGNMENT)) for t in inputs]
    output: Tensor = aten._scaled_dot_product_flash_attention(
        *inputs, call.dropout, call.causal, scale=scale
    )[0]
    return output[..., :dim] if dim % _FLASH_ALIGNMENT else output


def _cudnn(call: Call, scale: float | None) -> Tensor:
    mask = _additive(call.mask, call.query.dtype)
    output: Tensor = aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout, call.causal, False, scale=scale
    )[0]
    return output


def _efficient(call: Call, scale: float | None) -> Tensor:
    mask = _additive(call.mask, call.query.dtype)
    if mask is not None:
        if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
            length = mask.shape[-1]
            mask = functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout, call.causal, scale=scale
    )[0]
    return output


def _math(call: Call, scale: float | None) -> Tensor:
    """`_scaled_dot_product_attention_math` by hand: for fake tensors, PyTorch's own would take more memory, as it does nothing in place for subclasses."""
    query, key, value = (t.float() if call.half else t for t in (call.query, call.key, call.value))
    factor = (call.query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    query = query * (factor if scale is None or scale >= 0 else -factor)
    mask = _additive(call.mask, query.dtype)
    if call.causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(allowed, query.dtype)
    if call.gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    weights = torch._safe_softmax(scores, -1)
    del scores
    if call.dropout:
        weights = torch.dropout(weights, call.dropout, True)
    returned = weights.to(call.query.dtype)  # to a caller that drops it, but it lives through the product
    output = torch.matmul(weights, value).to(call.query.dtype)
    del returned
    return output


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as an additive one, the way PyTorch makes it (the result is saved for backward, in every layer)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    allowed, forbidden = (torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, float("-inf")))
    return torch.where(mask, allowed, forbidden)


_RUN: dict[str, Callable[[Call, float | None], Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
