"""From a label column to class numbers, and how many classes there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.errors import UserError
from autofit.workload.data.library import datasets

MOST_CLASSES = 10_000
TOO_UNIQUE = 20  #: rows from which on "every row has its own label" is a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the labels are.

    Attributes:
        column: where they stand.
        names: of the classes, in the order of their numbers; empty for regression.
        values: value in the column -> class number; empty where the column holds class numbers, and for regression.
    """

    column: str
    names: tuple[str, ...]
    values: dict[Any, int]

    @property
    def regression(self) -> bool:
        """Whether a number is predicted, not a class."""
        return not self.names

    @property
    def count(self) -> int:
        """`num_labels` of the model."""
        return max(1, len(self.names))

    def number(self, value: Any) -> int | float:
        """The class number of a value, or the value itself in a regression."""
        if self.regression:
            return float(value)
        return self.values[value] if self.values else int(value)


def labels_of(rows: datasets.Dataset, column: str) -> Labels:
    """Labels of one value per row, all rows checked.

    Raises:
        UserError: a row without a label, one outside the classes, or labels that are no classes.
    """
    feature = rows.features[column]
    if isinstance(feature, datasets.Value) and str(feature.dtype).startswith(("float", "double")):
        _refuse_missing(rows[column], column)
        return Labels(column=column, names=(), values={})
    return _classes(feature, rows[column], column, rows=len(rows))


def tags_of(rows: datasets.Dataset, column: str) -> Labels:
    """Labels of one value per word."""
    feature = rows.features[column]
    inner = getattr(feature, "feature", None)
    _refuse_missing(rows[column], column)
    return _classes(inner, [tag for tags in rows[column] for tag in tags], column, rows=None)


def _classes(feature: Any, values: Sequence[Any], column: str, *, rows: int | None) -> Labels:
    _refuse_missing(values, column)
    distinct = sorted(set(values))
    if isinstance(feature, datasets.ClassLabel):
        outside = [v for v in distinct if not 0 <= v < feature.num_classes]
        if outside:
            raise UserError(
                f"label {outside[0]} in column {column!r} is out of range: the classes are 0 to {feature.num_classes - 1}",
                hint="-1 usually marks rows without a label: filter them out, or take another --split",
            )
        return Labels(column=column, names=tuple(feature.names), values={})
    if any(isinstance(v, int) and not isinstance(v, bool) and v < 0 for v in distinct):
        raise UserError(
            f"label {distinct[0]} in column {column!r} is out of range: class numbers begin at 0",
            hint="-1 usually marks rows without a label: filter them out, or take another --split",
        )
    if len(distinct) > MOST_CLASSES or (rows is not None and len(distinct) == rows > TOO_UNIQUE):
        raise UserError(f"column {column!r} has {len(distinct)} different values: these are no classes", hint="name another with --label-column")
    return Labels(column=column, names=tuple(map(str, distinct)), values={value: number for number, value in enumerate(distinct)})


def _refuse_missing(values: Sequence[Any], column: str) -> None:
    for row, value in enumerate(values):
        if value is None or value != value:
            raise UserError(f"row {row} has no label in column {column!r}", hint="remove such rows, or name another column with --label-column")
        if isinstance(value, float) and math.isinf(value):
            raise UserError(f"the label of row {row} in column {column!r} is not finite: {value}", hint="remove such rows, or name another column with --label-column")
