"""Measured rows and what each method says of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement and what each method says of it.

    Attributes:
        name: of the configuration.
        measured_bytes: device memory in use, or peak bytes of the CPU's allocator.
        told: method -> bytes, as comparable with the measurement; a method without an answer is left out.
    """

    name: str
    measured_bytes: int
    told: Mapping[str, int]

    def error(self, method: str) -> float | None:
        """Relative error; None without an answer."""
        return None if method not in self.told else self.told[method] / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one kind.

    Attributes:
        key, title: of the table.
        methods: in the order of the columns; those beyond the first set answer another question (see `notes`).
        notes: what the reader must know before the figures.
        residuals: mechanisms of what is left, as far as they are known.
    """

    key: str
    title: str
    rows: Sequence[Row]
    methods: Sequence[str]
    notes: Sequence[str]
    residuals: Sequence[str]
    constants: Mapping[str, float] = field(default_factory=dict)

    def summary(self, method: str) -> dict[str, float] | None:
        """Mean absolute, signed mean and worst error, and the number of rows answered; None without any."""
        errors = [e for row in self.rows if (e := row.error(method)) is not None]
        if not errors:
            return None
        return {
            "mean_absolute": statistics.fmean(map(abs, errors)),
            "mean": statistics.fmean(errors),
            "worst": max(errors, key=abs),
            "rows": len(errors),
        }
