"""The order in which a sampler's batches come in a trial: epochs without end, each stretch of which stands for the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch.utils.data import Sampler

from autofit.trials.lengths import Floats, Ints, Lengths, spread_order

LEAST_BATCHES, MOST_BATCHES = 4_096, 16_384  #: that are put in order at a time: of several epochs where one has few, so that their mean is not one epoch's luck
MOST_ROWS = 1 << 17  #: that are drawn to have that many, beside the least


@dataclass
class Sizes:
    """The size of each batch that was given out in turn, and the means over all that were drawn."""

    given: list[float] = field(default_factory=list)
    mean: float | None = None
    mean_square: float | None = None

    def drawn(self, sizes: Floats, order: Ints) -> None:
        """Note batches that are given out in `order`."""
        self.given += sizes[order].tolist()
        self.mean, self.mean_square = float(sizes.mean()), float((sizes**2).mean())

    def share_of(self, numbers: Sequence[int]) -> float:
        """The mean batch of an epoch in those of the batches `numbers`."""
        seen = sum(self.given[number] for number in numbers)
        return 1.0 if self.mean is None or not seen else self.mean * len(numbers) / seen


@dataclass
class Plan:
    """What the sampler gave out, in elements with the padding to the longest row and without: with the targets, which take time too, and without
    them, as tokens are counted."""

    padded: Sizes = field(default_factory=Sizes)
    flat: Sizes = field(default_factory=Sizes)
    padded_inputs: Sizes = field(default_factory=Sizes)
    flat_inputs: Sizes = field(default_factory=Sizes)

    def drawn(self, lengths: Lengths, batches: Ints) -> Ints | None:
        """Note (m, b) row indices and return the order in which they are to be given out; None where their sizes are not known."""
        padded = lengths.batch_sizes(batches)
        if padded is None:
            return None
        order, inputs = spread_order(padded), replace(lengths, targets=np.zeros_like(lengths.targets))
        for sizes, known, is_padded in (
            (self.padded, lengths, True), (self.flat, lengths, False), (self.padded_inputs, inputs, True), (self.flat_inputs, inputs, False)
        ):  # fmt: skip
            found = known.batch_sizes(batches, padded=is_padded)
            assert found is not None
            sizes.drawn(found, order)
        return order


class EndlessBatches(Sampler[int]):
    """Epoch after epoch of a sampler, cut into full batches.

    Args:
        inner: the Trainer's own sampler.
        batch: rows per batch.
        length: `len` of this one, at least one batch.
        lengths: of the dataset's rows; None = batches stay in the sampler's order.
        plan: is told what was given out.
    """

    def __init__(self, inner: Sampler[int], *, batch: int, length: int, lengths: Lengths | None, plan: Plan) -> None:
        self._inner, self._batch, self._length = inner, batch, length
        self._lengths, self._plan = lengths, plan

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return itertools.islice((int(row) for batch in self._batches() for row in batch), self._length)

    def _batches(self) -> Iterator[Ints]:
        while True:
            rows = np.fromiter(itertools.islice(self._endless(), self._chunk() * self._batch), dtype=np.int64)
            batches = rows.reshape(-1, self._batch)
            order = None if self._lengths is None else self._plan.drawn(self._lengths, batches)
            yield from batches if order is None else batches[order]

    def _chunk(self) -> int:
        """Full batches of one epoch; where it has few, of several."""
        own = max(1, len(self._inner) // self._batch)  # type: ignore[arg-type]
        least = max(64, min(LEAST_BATCHES, MOST_ROWS // self._batch))
        return min(MOST_BATCHES, -(-least // own) * own)

    def _endless(self) -> Iterator[int]:
        """Rows without end; the rows that would make a partial batch at an epoch's end are left out, as far as the epoch has a full one."""
        own = len(self._inner)  # type: ignore[arg-type]
        whole = own - own % self._batch or own
        while True:
            yield from itertools.islice(iter(self._inner), whole)
