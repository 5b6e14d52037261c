"""What CUDA kernels do that the dispatcher does not show.

Two things: kernels that a CPU-only build lacks, so that it would decompose an operator which a GPU runs whole; and
memory that a kernel takes from the caching allocator for itself. The sizes follow the sources of PyTorch
(`EmbeddingBackwardKernel.cu`, `attention_backward.cu`, `kernel_backward.h` of the memory-efficient kernel, `flash_api.cpp`,
`CublasHandlePool.cpp`, `ForeachReduceOp.cu`, `SoftMax.cu`); none is fitted. Not covered: workspaces that cuDNN chooses at run time, and temporary
buffers of full reductions and sorts (well under a MiB each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofit.units import MIB

aten = torch.ops.aten
Groups = list[list[int]]  # groups of bytes: each group is taken together and given back before the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What decides how much memory a kernel takes.

    Attributes:
        capability: compute capability.
        smooth: whether thresholds in the batch are ignored and rounding is upwards, so that traces at two batches have the same
            structure and sizes on a line. A little more memory than exact, never less.
    """

    capability: tuple[int, int]
    smooth: bool = False


Workspace = Callable[[Sequence[Any], Card], Groups]

_EMBEDDING_SORT_ABOVE = 3072  # indices; up to here one kernel without temporaries
_ROWS_PER_PARTIAL = 10
_SMOOTH_ROWS_PER_PARTIAL = 8  # divides the usual lengths, so that sizes lie on a line
_TILE = 64
_MAX_SPLITS = 200  # of the keys over all heads, where each split needs an accumulator
_GRAD_Q_TILE_HEADER = 16  # bytes of lock and counter before each tile of the accumulator
_TENSOR_CHUNK = 65536
WORKSPACE_BY_PRODUCT = (2, 15)  #: torch from which cuBLAS' workspace lives no longer than a product
_stubs: list[torch.library.Library] = []

GEMMS = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._addmm_activation.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
    )
)
LIGHT_GEMMS = frozenset((aten.addmm.default, aten._addmm_activation.default))  #: cuBLASLt's, which add the bias
LIGHT_WORKSPACE_BYTES = MIB  #: of cuBLASLt, beside the above
SUMS = frozenset((aten.sum.dim_IntList, aten.mean.dim))  #: see `reductions`
CONVOLUTIONS = frozenset((aten.convolution.default, aten.convolution_backward.default))


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes that PyTorch gives each cuBLAS handle (one per thread that multiplies), or each product.

    32 MiB on compute capability 9, 10 and 12, else 2 x 4 MiB + 8 x 16 KiB.
    """
    return 32 * MIB if capability[0] in (9, 10, 12) else 2 * 4 * MIB + MIB // 8


def register_missing_kernels() -> list[str]:
    """Keep operators whole that a CPU-only build would decompose above the fake mode. Idempotent.

    They have an implicit composite fallback and real kernels on CPU and CUDA; with no CUDA kernel registered the
    dispatcher falls back, which changes temporaries and what backward saves. A dummy kernel, never called under the fake
    mode, restores the choice a GPU makes.
    """
    if _stubs or torch.backends.cuda.is_built():
        return []
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and has(name, "CPU")
    ]
    names += [
        name for name in ("aten::_fused_rms_norm",) if torch._C._dispatch_find_schema_or_throw(name, "")
    ]
    library = torch.library.Library("aten", "IMPL", "CUDA")
    done = [name for name in names if not has(name, "CUDA")]
    for name in done:
        library.impl(name.removeprefix("aten::"), _never_called)
    _stubs.append(library)
    return done


def _never_called(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("a stand-in for a CUDA kernel was called on a real tensor")


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def embedding_backward(args: Sequence[Any], card: Card) -> Groups:
    """Above 3072 indices they are sorted and rows are summed in partial segments of ten, in fp32."""
    grad, indices, rows = args[0], args[1], args[2]
    count, stride = indices.numel(), grad.shape[-1]
    if count <= _EMBEDDING_SORT_ABOVE and not card.smooth:
        return []
    index_bytes = count * indices.element_size()
    if card.smooth:
        segments, partials = count, count + -(-count // _SMOOTH_ROWS_PER_PARTIAL)
    else:
        segments = min(count, rows)
        partials = count // _ROWS_PER_PARTIAL + segments
    kept = [index_bytes, index_bytes]  # sorted and original positions
    sort = [index_bytes, 2 * index_bytes]  # the range, and the radix sort's alternate keys and values
    accumulator = partials * stride * max(4, grad.element_size())
    segment_bytes = segments * indices.element_size()
    sums = [index_bytes, segment_bytes, segment_bytes, partials * indices.element_size(), accumulator]
    return [kept + sort, kept + sums]


def flash_backward(args: Sequence[Any], card: Card) -> Groups:
    """fp32 accumulator of the query's gradient, softmax sums, and unreduced key and value gradients under grouped queries."""
    q, k = args[1], args[2]
    batch, heads, length, dim = q.shape
    padded = _up(length, 128)
    rounded_dim = _up(dim, 32) if dim <= 128 else _up(dim, 64)
    group = [batch * heads * padded * 4, batch * heads * padded * rounded_dim * 4]
    if k.shape[1] != heads:
        group += [batch * k.shape[2] * heads * dim * q.element_size()] * 2
    return [group]


def cudnn_backward(args: Sequence[Any], card: Card) -> Groups:
    """cuDNN's frontend asks for an fp32 accumulator and softmax sums in one piece; what its engines want beside it, they do not publish."""
    batch, heads, length, dim = args[1].shape
    return [[batch * heads * length * (1 + dim) * 4]]


def efficient_forward(args: Sequence[Any], card: Card) -> Groups:
    """16-bit heads wider than 128 are accumulated in memory, in fp32."""
    q, v = args[0], args[2]
    if q.element_size() > 2 or v.shape[-1] <= 128:
        return []
    return [[q.shape[0] * q.shape[1] * q.shape[2] * v.shape[-1] * 4]]


def efficient_backward(args: Sequence[Any], card: Card) -> Groups:
    """Accumulators of the gradients, and the row sums of grad x output (computed outside the kernel for fp32)."""
    q, k, v = args[1], args[2], args[3]
    batch, heads, length, dim = q.shape
    keys, value_dim = k.shape[2], v.shape[-1]
    half = q.element_size() == 2
    in_registers = half and dim <= 128 and (card.capability >= (8, 0) or dim <= _TILE)
    delta = batch * heads * length * 4
    groups: Groups = []
    if not half:
        groups.append([batch * heads * length * value_dim * 4, delta, delta])
    elif not in_registers and (7, 0) <= card.capability < (7, 5):
        product = batch * heads * length * value_dim * 4
        groups.append([product, product, product, delta, delta])
    elements = 0
    if card.capability >= (7, 0) or half:
        tiles = -(-length // _TILE) * -(-dim // _TILE)
        elements += batch * heads * tiles * (_GRAD_Q_TILE_HEADER // 4 + _TILE * _TILE)
    if half and not in_registers:
        splits = max(1, min(-(-keys // _TILE), _MAX_SPLITS // (batch * heads)))
        parts = batch * heads + _MAX_SPLITS if card.smooth else batch * heads * splits
        elements += parts * _TILE * (_up(dim, _TILE) + _up(value_dim, _TILE))
    groups.append([delta, elements * 4])
    return groups


def safe_softmax(args: Sequence[Any], card: Card) -> Groups:
    """A composite: the plain softmax, whose rows without any score are set to zero in place; a boolean of its shape, one per row, and a zero die."""
    x = args[0]
    rows = x.numel() // max(1, x.shape[args[1]])
    return [[x.numel(), rows, x.element_size()]]


def softmax_backward(args: Sequence[Any], card: Card) -> Groups:
    """The product of gradient and output, before it is summed along rows."""
    grad, output = args[0], args[1]
    return [[grad.numel() * max(grad.element_size(), output.element_size())]]


def ctc_backward(args: Sequence[Any], card: Card) -> Groups:
    """log beta, of the size of log alpha (`LossCTC.cu`, `LossCTC.cpp`)."""
    log_alpha = args[6]
    return [[log_alpha.numel() * log_alpha.element_size()]]


def foreach_norm(args: Sequence[Any], card: Card) -> Groups:
    """One fp32 per tensor and chunk of the largest tensor."""
    tensors = args[0]
    chunks = max((-(-t.numel() // _TENSOR_CHUNK) for t in tensors), default=0)
    return [[len(tensors) * chunks * 4]] if chunks else []


WORKSPACES: dict[Any, Workspace] = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._softmax_backward_data.default: softmax_backward,
    aten._foreach_norm.Scalar: foreach_norm,
}

#: operators whose results are not made in the order in which they are returned
BIRTH_ORDERS: dict[Any, tuple[int, ...]] = {
    aten.native_dropout.default: (1, 0),
    aten._scaled_dot_product_cudnn_attention.default: (6, 7, 0, 1),
}

#: operators that PyTorch composes of others below the dispatcher's sight, on every device
COMPOSITES: dict[Any, Workspace] = {aten._safe_softmax.default: safe_softmax, aten._ctc_loss_backward.Tensor: ctc_backward}
