"""Operators that fake tensors refuse because their values decide, and what a training batch is known to answer.

- Labels and masks: a selection by value selects every element.
- Mixtures of experts: rows that are sorted by expert, times the matrix of each expert, in one call. How many rows each expert gets is known only to a run;
  the result's size does not depend on it. (On cards before compute capability 8.0 transformers multiplies expert by expert, in an operator of its own.)
- CTC: targets that lie one behind the other are taken to be of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
ALL_LABELS_NOTE = "a selection by value is taken to select every element"
_ALIGNMENT_BYTES = 16  #: of a row of a grouped product (`_create_grouped_mm_output_tensor` in PyTorch)
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]


def answerable(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, str | None]:
    """The call in the place of one that fake tensors refuse, and what was assumed; the call itself where nothing is refused."""
    if func is aten.nonzero.default and args[0].dim() == 1:
        return (aten.new_empty.default, (args[0], [args[0].numel(), 1]), {"dtype": torch.int64}), ALL_LABELS_NOTE
    if func is aten.masked_select.default:
        return (aten.new_empty.default, (args[0], [args[0].numel()]), {}), ALL_LABELS_NOTE
    if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype == torch.bool:
        mask = args[1][0]
        return (aten.new_empty.default, (args[0], [mask.numel(), *args[0].shape[mask.dim() :]]), {}), ALL_LABELS_NOTE
    if func is aten.index_put_.default and args[2].dim() == 0 and args[2].device != args[0].device:
        mask = args[1][0]
        if len(args[1]) == 1 and mask is not None and mask.dtype == torch.bool:
            while mask.dim() < args[0].dim():
                mask = mask.unsqueeze(-1)
            return (aten.masked_fill_.Scalar, (args[0], mask, 0), {}), None  # as PyTorch does with a number
    return (func, args, kwargs), None


def grouped_product(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What `aten::_grouped_mm` returns. PyTorch's own description of it refuses all dtypes but bf16, which its kernels take.

    Shapes: (rows, k) x (experts, k, n) -> (rows, n), with `offs` the last row of each expert; (m, rows) x (rows, n) -> (experts, m, n), as
    the gradient of the matrices needs it; (experts, m, k) x (k, columns) -> (m, columns); three dimensions each as in `bmm`.
    """
    dtype = out_dtype or mat_a.dtype
    size = _product_size(mat_a, mat_b, offs)
    if mat_a.device.type != "cuda":
        return mat_a.new_empty(size, dtype=dtype)
    alignment = _ALIGNMENT_BYTES // dtype.itemsize
    row = -(-size[-1] // alignment) * alignment
    strides = [row, 1] if len(size) == 2 else [size[1] * row, row, 1]
    return mat_a.new_empty_strided(size, strides, dtype=dtype)


def _product_size(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> list[int]:
    if mat_a.dim() == 2:
        if mat_b.dim() == 2:
            return [0 if offs is None else offs.shape[0], mat_a.shape[0], mat_b.shape[1]]
        return [mat_a.shape[0], mat_b.shape[-1]]
    if mat_b.dim() == 2:
        return [mat_a.shape[1], mat_b.shape[1]]
    return [mat_a.shape[0], mat_a.shape[1], mat_b.shape[-1]]


def no_library_ctc(*_args: Any, **_kwargs: Any) -> bool:
    """transformers switches cuDNN's CTC off; MIOpen is AMD's."""
    return False


def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_more: Any, **_named: Any) -> tuple[Tensor, Tensor]:
    """Losses (batch,) and log alpha (batch, frames, 2 x longest target + 1), as `LossCTC.cu` has them.

    Args:
        log_probs: (frames, batch, classes).
        targets: (batch, longest) or, one behind the other, (sum of lengths,).
    """
    frames, batch = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, batch))
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * longest + 1)


def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *_more: Any, **_named: Any) -> Tensor:
    """The gradient of (frames, batch, classes); its log beta is in `kernels`."""
    return log_probs.new_empty(log_probs.shape)


#: operator -> what computes its result in its place
RESULTS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: ctc_loss,
    aten._ctc_loss_backward.Tensor: ctc_loss_backward,
    **{getattr(aten, name).Tensor: no_library_ctc for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss") if hasattr(aten, name)},
    **({aten._grouped_mm.default: grouped_product} if hasattr(aten, "_grouped_mm") else {}),
}
