"""What sums over rows take from the allocator: gradients of biases above all, and Adafactor's means.

Where the blocks of one pass would be too few to fill the card, several share an output and meet in global memory. The plan is that of `setReduceConfig`
in PyTorch's `Reduce.cuh`, for a contiguous input whose leading dimensions are summed; other sums take less than a MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autofit.memory.events import Stairs

_THREADS, _WARP = 512, 32  # of a block
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread, before blocks share an output
_ACCUMULATOR = 4  # bytes: sums are held in fp32

#: compute capability -> (multiprocessors, threads of each) of its most common card
PROCESSORS = {
    (7, 0): (80, 2048),
    (7, 5): (40, 1024),
    (8, 0): (108, 2048),
    (8, 6): (82, 1536),
    (8, 9): (128, 1536),
    (9, 0): (132, 2048),
    (10, 0): (148, 2048),
    (12, 0): (170, 1536),
}
_USUAL = (108, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Bytes of one sum's meeting place.

    Attributes:
        line: bytes as many as the rows need, on a line through them.
        stairs: from there to the bytes that are taken.
        semaphores: bytes of the locks.
    """

    line: int
    stairs: Stairs
    semaphores: int


def shared_sum(rows: int, columns: int, capability: tuple[int, int]) -> Shared | None:
    """The meeting place of a sum of a (rows, columns) matrix over its rows; None when no blocks share an output, however many rows there are.

    Args:
        rows, columns: of the input.
        capability: of the card.
    """
    vector = next(width for width in (4, 2, 1) if columns % width == 0)
    most_threads, wide = _THREADS // vector, columns // vector
    width = min(_power(wide, most_threads), _WARP)
    height = most_threads // width  # few rows make it less, but then no blocks share
    width = min(_power(wide, most_threads), most_threads // height)
    grid = -(-wide // width)
    processors, threads = PROCESSORS.get(capability, _USUAL)
    most = -(-processors * (threads // (width * height)) // grid)
    if most < 2:
        return None
    block = _ACCUMULATOR * columns * width * vector
    return Shared(
        line=-(-block * rows // (height * _LEAST_VALUES)),
        stairs=Stairs(
            grain=block,
            most=block * most,
            later=block * _MOST_VALUES // _LEAST_VALUES,
            least=block * (_MOST_VALUES - 1) // _LEAST_VALUES,
        ),
        semaphores=4 * grid,
    )


def summed_rows(args: Sequence[Any]) -> tuple[int, int] | None:
    """(rows, columns) of `sum.dim_IntList` or `mean.dim` over leading dimensions of a contiguous tensor; None for any other.

    A sum over the first of three dimensions or more is one over samples, too few for blocks to share it.
    """
    tensor, dims = args[0], args[1]
    if not isinstance(tensor, Tensor) or not dims or not tensor.is_contiguous() or not tensor.numel():
        return None
    summed = sorted(d % tensor.dim() for d in dims)
    flat = [d for d in range(tensor.dim()) if tensor.shape[d] != 1]  # what has one row is not there for the kernel
    summed = [d for d in summed if d in flat]
    if not summed or summed != flat[: len(summed)] or len(summed) == len(flat):
        return None
    if len(summed) == 1 and len(flat) > 2:
        return None
    rows = 1
    for d in summed:
        rows *= tensor.shape[d]
    return rows, tensor.numel() // rows


def _power(value: int, most: int) -> int:
    """The largest power of two up to `value`, at most `most`."""
    return most if value >= most else 1 << (value.bit_length() - 1)
