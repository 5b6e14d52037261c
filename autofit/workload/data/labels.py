"""From a label column to class numbers, and how many classes there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofit.errors import UserError
from autofit.workload.data.library import arrow_column, datasets, pa, pc

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
    feature, values = rows.features[column], arrow_column(rows, column)
    _refuse_missing(values, column)
    if isinstance(feature, datasets.Value) and str(feature.dtype).startswith(("float", "double")):
        return Labels(column=column, names=(), values={})
    return _classes(feature, values, column, rows=len(rows))


def tags_of(rows: datasets.Dataset, column: str) -> Labels:
    """Labels of one value per word."""
    tags = arrow_column(rows, column)
    _refuse_missing(tags, column)
    before = 0
    for chunk in tags.chunks:
        _refuse_missing(chunk.flatten(), column, of=pc.add(pc.list_parent_indices(chunk), before))
        before += len(chunk)
    return _classes(getattr(rows.features[column], "feature", None), pc.list_flatten(tags), column, rows=None)


def _classes(feature: Any, values: Any, column: str, *, rows: int | None) -> Labels:
    distinct = sorted(pc.unique(values).to_pylist())
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


def _refuse_missing(values: Any, column: str, *, of: Any = None) -> None:
    """Refuse an arrow column with a value that is missing or not finite; `of`: the row of each value where rows have several."""
    missing = pc.index(pc.is_null(values, nan_is_null=True), True).as_py()
    if missing >= 0:
        row = missing if of is None else of[missing]
        raise UserError(f"row {row} has no label in column {column!r}", hint="remove such rows, or name another column with --label-column")
    infinite = pc.index(pc.is_inf(values), True).as_py() if pa.types.is_floating(values.type) else -1
    if infinite >= 0:
        message = f"the label of row {infinite} in column {column!r} is not finite: {values[infinite]}"
        raise UserError(message, hint="remove such rows, or name another column with --label-column")
