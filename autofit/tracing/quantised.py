"""Stand-ins for bitsandbytes' linear layers: the same storages at the same moments, on tensors that do not exist.

bitsandbytes' own layers are tensor subclasses with kernels of their own, which no fake tensor can stand for. What they take was read from its sources
(`autograd/_functions.py`, `functional.py`, the CUDA backend of 0.50) and compared with PyTorch's allocator event by event.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from autofit.problem.adaptation import Quantization
from autofit.workload.quantised import BLOCK_VALUES, BLOCKS, skipped_modules, without_adapters

CODES, NESTED_CODES = 16, 256  #: entries of the tables that 4-bit values and their scales are looked up in


class FourBit(nn.Module):
    """`bitsandbytes.nn.Linear4bit` (nf4, double quantisation) of float16 values.

    Args:
        outputs, inputs: of the matrix.
        bias: of the plain layer, None for none.
        compute: dtype of the product.
    """

    def __init__(self, outputs: int, inputs: int, bias: nn.Parameter | None, compute: torch.dtype) -> None:
        super().__init__()
        values, self.in_features, self.out_features, self.compute = outputs * inputs, inputs, outputs, compute
        self.blocks = -(-values // BLOCK_VALUES)
        self.weight = nn.Parameter(_meta(-(-values // 2), 1, dtype=torch.uint8), requires_grad=False)
        for name, size, dtype in (
            ("scales", self.blocks, torch.uint8),
            ("code", CODES, torch.float32),
            ("scales_of_scales", -(-self.blocks // BLOCKS), torch.float32),
            ("nested_code", NESTED_CODES, torch.float32),
            ("offset", 1, torch.float32),
        ):
            self.register_buffer(name, _meta(size, dtype=dtype))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(self.compute)
        product: Tensor = _FourBitProduct.apply(x.to(self.compute), bias, self)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)

    def unpacked(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix, as a kernel unpacks it."""
        return like.new_empty((self.out_features, self.in_features), dtype=dtype)

    def unpacked_scales(self, like: Tensor) -> Tensor:
        """Scales in fp32."""
        return like.new_empty((self.blocks,), dtype=torch.float32)


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: FourBit) -> Tensor:
        ctx.layer = layer
        scales = layer.unpacked_scales(x)
        shifted = layer.unpacked_scales(x)
        matrix = layer.unpacked(x, x.dtype)
        output = nn.functional.linear(x, matrix, bias)
        del scales, shifted, matrix
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        scales = ctx.layer.unpacked_scales(grad)
        stored = ctx.layer.unpacked(grad, torch.float16)
        del scales
        matrix = stored.to(grad.dtype)
        del stored
        return torch.matmul(grad, matrix), None, None


class EightBit(nn.Module):
    """`bitsandbytes.nn.Linear8bitLt` with a threshold for outliers, of which random activations have none worth counting."""

    def __init__(self, outputs: int, inputs: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(_meta(outputs, inputs, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scales", _meta(outputs, dtype=torch.float32))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of `x`."""
        return _EightBitProduct.apply(x, self.bias, self)  # type: ignore[no-untyped-call, no-any-return]


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: EightBit) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.layer, ctx.dtype, ctx.shape = layer, x.dtype, x.shape
        ctx.rows = rows  # kept by bitsandbytes, though only the gradient of a weight would need it
        half = rows.to(torch.float16)
        scales = rows.new_empty((rows.shape[0],), dtype=torch.float32)
        quantised = torch.empty_like(rows, dtype=torch.int8)
        magnitudes = half.abs()
        outliers = torch.empty_like(magnitudes, dtype=torch.bool)
        del magnitudes, outliers, half
        sums = rows.new_empty((rows.shape[0], layer.out_features), dtype=torch.int32)
        output = torch.empty_like(sums, dtype=torch.float16)
        result = output.to(x.dtype)
        del output, sums, quantised, scales
        return result.reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        matrix = ctx.layer.weight.to(ctx.dtype, copy=True)
        return torch.matmul(grad.to(ctx.dtype), matrix).view(ctx.shape), None, None


def store(model: nn.Module, quantization: Quantization, *, compute: torch.dtype, kept: Sequence[str]) -> None:
    """Put stand-ins in the place of the linear layers of `model` (on `meta`, adapters on it) that transformers would quantise.

    Args:
        model: changed in place.
        quantization: how the matrices are stored.
        compute: dtype of products with 4-bit matrices.
        kept: modules that are trained in full, and so stay as they are.
    """
    base = without_adapters(model)
    skipped = skipped_modules(base, kept)  # type: ignore[arg-type]
    for name, module in list(base.named_modules()):
        if type(module) not in (nn.Linear, Conv1D) or ".lora_" in name or not should_convert_module(name.removesuffix(".base_layer"), skipped):
            continue
        shape = module.weight.shape
        outputs, inputs = (shape[1], shape[0]) if isinstance(module, Conv1D) else (shape[0], shape[1])
        bias = None if module.bias is None else nn.Parameter(module.bias, requires_grad=False)
        stored = FourBit(outputs, inputs, bias, compute) if quantization is Quantization.FOUR_BIT else EightBit(outputs, inputs, bias)
        parent, _, last = name.rpartition(".")
        setattr(base.get_submodule(parent), last, stored)
    _adapt_forward(base, quantization)


def _adapt_forward(base: nn.Module, quantization: Quantization) -> None:
    """Adapters on stored layers run as peft runs them there."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.lora import bnb
    from peft.tuners.lora.layer import Linear

    own = bnb.Linear4bit if quantization is Quantization.FOUR_BIT else bnb.Linear8bitLt
    for module in base.modules():
        if type(module) is Linear and isinstance(module.base_layer, FourBit | EightBit):
            module.forward = types.MethodType(own.forward, module)  # type: ignore[method-assign]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
