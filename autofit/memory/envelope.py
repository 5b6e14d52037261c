"""Peaks that never fall as the batch grows, from replays that now and then do.

What a replay reserves depends on how blocks happen to fall into segments, so a batch of 6 can need a little less than a
batch of 5. A search that skips everything "at least as large as what failed" must not see that. What is told for a
batch is therefore the largest of what the replays of it and of some smaller batches say: the powers of two below it
and, after the last of them, every eighth of an octave; and, so that the steps join, not more than what is told for the
next power of two. Batches between the eighths (odd ones from 17 on) are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

EIGHTHS = 8


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
            low, high = self.at(batch - rest), self.at(batch - rest + step)
            return low + -(-(high - low) * rest // step)
        told = self._largest(range(batch, power - 1, -step))
        lower = power
        while lower := lower >> 1:
            told = self._larger(told, lower)
        if batch == power or told <= self.floor(2 * power):
            return told
        return min(told, self.at(2 * power))

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
