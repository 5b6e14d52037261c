"""Peaks that never fall as the batch grows, from replays that now and then do.

What a replay reserves depends on how blocks happen to fall into segments, so a batch of 6 can need a little less than a
batch of 5. A search that skips everything "at least as large as what failed" must not see that. What is told for a
batch is therefore the largest of what the replays of it and of some smaller batches say: the powers of two below it
and, after the last of them, every eighth of an octave; and, so that the steps join, not more than what is told for the
next power of two. Batches between the eighths (there are some from 17 on) lie between what is told for both ends: halving leads to
four neighbours, and among those it is a running maximum again. A straight line there would be up to 4 % too low, because an odd
batch has blocks that fit together less well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

EIGHTHS, NEIGHBOURS = 8, 4


def _nothing(batch: int) -> int:
    return 0


@dataclass(slots=True, kw_only=True)
class Envelope:
    """A running maximum over batches that asks for few of them.

    Attributes:
        raw: bytes for a batch; called at most once per batch.
        floor: a cheap lower bound of `raw`; saves calls.
        ceiling: a cheap upper bound of `raw`; saves calls.
        known: what `raw` has answered.
    """

    raw: Callable[[int], int]
    floor: Callable[[int], int] = _nothing
    ceiling: Callable[[int], int] | None = None
    known: dict[int, int] = field(default_factory=dict)

    def at(self, batch: int) -> int:
        """Bytes for `batch` (>= 1); never less than for a smaller one."""
        power = 1 << (batch.bit_length() - 1)
        step = max(1, power // EIGHTHS)
        rest = batch % step
        if rest:
            return self._between(batch - rest, batch - rest + step, batch)
        told = self._largest(range(batch, power - 1, -step))
        lower = power
        while lower := lower >> 1:
            told = self._larger(told, lower)
        if batch == power or told <= self.floor(2 * power):
            return told
        return min(told, self.at(2 * power))

    def _between(self, low: int, high: int, batch: int) -> int:
        """Bytes for `batch`, which lies between the eighths `low` and `high`."""
        least, most = self.at(low), self.at(high)
        while low < batch and least < most and high - low > NEIGHBOURS:
            middle = (low + high) // 2
            told = self._limited(least, middle, most)
            if batch < middle:
                high, most = middle, told
            else:
                low, least = middle, told
        for lower in range(low + 1, batch + 1):
            least = self._limited(least, lower, most)
        return least

    def _limited(self, told: int, batch: int, most: int) -> int:
        """As `_larger`, but not more than `most`."""
        return most if told >= most or self.floor(batch) >= most else min(most, self._larger(told, batch))

    def _largest(self, batches: range) -> int:
        told = 0
        for batch in batches:
            told = self._larger(told, batch)
        return told

    def _larger(self, told: int, batch: int) -> int:
        if self.ceiling is not None and self.ceiling(batch) <= told:
            return told
        if batch not in self.known:
            self.known[batch] = self.raw(batch)
        return max(told, self.known[batch])
