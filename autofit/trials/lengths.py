"""Lengths of a dataset's rows: their distribution, the longest batch, and an order of batches whose every beginning stands for the whole. Pure.

A batch is padded to its longest row, so memory follows the longest row of the longest batch, and time the mean over batches. A sampler
may put the longest rows into one batch; whoever trains an epoch must survive that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SHOWN_ROWS = 8  #: of the longest, in a summary


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """The distribution of the lengths that were seen.

    Attributes:
        unit: what is counted: `tokens`, `characters`, `samples of audio`, `elements`.
        rows: of the dataset.
        scanned: of them, those whose length is known.
        shortest, median, mean, p95, longest: of the scanned rows.
        longest_target: longest target sequence, where rows have one beside their input; else None.
        longest_rows: indices of the longest, longest first, at most `SHOWN_ROWS`.
    """

    unit: str
    rows: int
    scanned: int
    shortest: int
    median: float
    mean: float
    p95: float
    longest: int
    longest_target: int | None = None
    longest_rows: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every row was looked at."""
        return self.scanned >= self.rows

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {**asdict(self), "longest_rows": list(self.longest_rows)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LengthSummary:
        """Inverse of `to_json`; unknown keys are ignored."""
        names = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in names}
        return cls(**{**kept, "longest_rows": tuple(kept.get("longest_rows") or ())})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the scanned rows of a dataset.

    Attributes:
        unit: see `LengthSummary`.
        total: rows of the dataset.
        rows: (n,) indices of the scanned rows, at least one.
        inputs: (n,) length of each one's input.
        targets: (n,) length of its target sequence; 0 where it has none of its own.
    """

    unit: str
    total: int
    rows: Ints
    inputs: Ints
    targets: Ints

    @classmethod
    def of(
        cls, inputs: Sequence[int] | Ints, *, unit: str = "tokens", targets: Sequence[int] | Ints | None = None,
        rows: Sequence[int] | Ints | None = None, total: int | None = None,
    ) -> Lengths:  # fmt: skip
        """From plain sequences; without `rows` they are those of the whole dataset, in order."""
        lengths = np.asarray(inputs, dtype=np.int64)
        return cls(
            unit=unit,
            total=len(lengths) if total is None else total,
            rows=np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64),
            inputs=lengths,
            targets=np.zeros_like(lengths) if targets is None else np.asarray(targets, dtype=np.int64),
        )

    @property
    def complete(self) -> bool:
        """Whether every row was looked at."""
        return len(self.rows) >= self.total

    @property
    def uneven(self) -> bool:
        """Whether rows differ, so that batches do."""
        return bool(np.ptp(self.inputs) or np.ptp(self.targets))

    def summary(self) -> LengthSummary:
        """The distribution, as the result keeps it."""
        return LengthSummary(
            unit=self.unit,
            rows=self.total,
            scanned=len(self.rows),
            shortest=int(self.inputs.min()),
            median=float(np.median(self.inputs)),
            mean=float(self.inputs.mean()),
            p95=float(np.percentile(self.inputs, 95)),
            longest=int(self.inputs.max()),
            longest_target=int(self.targets.max()) if self.targets.any() else None,
            longest_rows=self.longest_batch(min(SHOWN_ROWS, len(self.rows))),
        )

    def longest_batch(self, size: int) -> tuple[int, ...]:
        """Indices of the `size` rows that make the largest batch that a sampler can draw; repeated where there are fewer rows.

        Inputs and targets are padded apart: where they differ, rows of the longest inputs and of the longest targets take turns.
        """
        by_input = np.lexsort((-self.targets, -self.inputs))
        chosen = by_input
        if self.targets.any() and size > 1:
            by_target = np.lexsort((-self.inputs, -self.targets))
            chosen = np.stack([by_input, by_target], axis=1).ravel()
        elif self.targets.any():
            chosen = np.argsort(-(self.inputs + self.targets), kind="stable")
        distinct = list(dict.fromkeys(int(i) for i in chosen[: 2 * size]))[:size]
        return tuple(int(self.rows[distinct[i % len(distinct)]]) for i in range(size))

    def longest_batches(self, size: int) -> tuple[tuple[int, ...], ...]:
        """`longest_batch`, or where no single row can stand for the longest input and for the longest target, one batch for each: which of
        them needs more memory depends on the model."""
        if size > 1 or not self.targets.any():
            return (self.longest_batch(size),)
        longest = np.lexsort((self.targets, self.inputs))[-1], np.lexsort((self.inputs, self.targets))[-1]
        return tuple((int(self.rows[i]),) for i in dict.fromkeys(longest))

    def batch_sizes(self, batches: Ints, *, padded: bool = True) -> Floats | None:
        """Elements of each batch: rows times the longest of them, inputs and targets apart; or without padding, as collators that flatten make them.

        Args:
            batches: (m, b) row indices.
            padded: whether rows are padded to the longest.

        Returns:
            (m,) elements; None where the length of a row is not known.
        """
        if not self.complete:
            return None
        inputs, targets = np.zeros(self.total, dtype=np.int64), np.zeros(self.total, dtype=np.int64)
        inputs[self.rows], targets[self.rows] = self.inputs, self.targets
        if not padded:
            return np.asarray((inputs + targets)[batches].sum(axis=1), dtype=np.float64)
        longest = inputs[batches].max(axis=1) + targets[batches].max(axis=1)
        return np.asarray(longest * batches.shape[1], dtype=np.float64)


def spread_order(sizes: Sequence[float] | Floats) -> Ints:
    """An order of batches in which every even number of them at the beginning has nearly the mean and spread of all.

    Sorted by size, batches are taken in pairs that mirror each other about the middle (quantiles q and 1 - q), the pairs in the order of
    van der Corput's sequence. So the mean of a short trial is off by the curvature of time over size at most, not by luck, and
    not by a sampler's own order: Trainer's length grouping begins each group with its longest batch.
    """
    ranks = np.argsort(np.asarray(sizes, dtype=np.float64), kind="stable")
    count, half = len(ranks), len(ranks) // 2
    lower = np.array(_van_der_corput(half), dtype=np.int64)
    order = np.stack([lower, count - 1 - lower], axis=1).ravel()
    middle = [half] if count % 2 else []
    return np.asarray(ranks[np.concatenate([order, np.array(middle, dtype=np.int64)])], dtype=np.int64)


def _van_der_corput(count: int) -> list[int]:
    """0 .. count - 1 in the order of the base-2 radical inverse of 1, 2, 3, ...: each next one falls into the widest gap."""
    levels = max(1, (count - 1).bit_length() if count > 1 else 1)
    found: dict[int, None] = {}
    for number in range(1, (1 << levels) + 1):
        inverse = int(format(number % (1 << levels), f"0{levels}b")[::-1], 2) / (1 << levels)
        found.setdefault(int(inverse * count))
    for rest in range(count):
        found.setdefault(rest)
    return [position for position in found if position < count]
