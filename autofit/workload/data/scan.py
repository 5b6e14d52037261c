"""How long the rows of a live dataset are: from a column where that is cheap, else row by row within a bounded time, kept for later children."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autofit.errors import UserError
from autofit.processes.protocol import SCRATCH
from autofit.trials.lengths import Lengths
from autofit.workload.data.library import is_a, pa, pc
from autofit.workload.sources import first_line

MOST_ROWS, MOST_SECONDS = 200_000, 5.0  #: looked at one by one
INPUTS = {"input_ids": "tokens", "input_values": "samples of audio", "input_features": "elements", "attention_mask": "tokens"}
LENGTH = "length"


def lengths_of(
    dataset: Any, *, length_column: str = LENGTH, most_seconds: float = MOST_SECONDS, what: str = "training"
) -> Lengths | None:
    """Lengths of the rows of a map-style dataset; None for a stream, and for rows that hold nothing with a length.

    Args:
        dataset: what the Trainer gets.
        length_column: `TrainingArguments.length_column_name`, which counts where rows hold nothing that has a length.
        most_seconds: after which the scan of single rows ends; rows are looked at in random order, so that a part stands for the whole.
        what: which dataset it is, for messages, and so that lengths are not kept for another.

    Raises:
        UserError: the dataset is empty, or raises when a row is read.
    """
    if not is_map_style(dataset):
        return None
    if _count(dataset, what) == 0:
        raise UserError(f"the {what} dataset is empty", hint="give at least one sample")
    by_column = _by_column(dataset, length_column)
    if by_column is not None:
        return by_column
    kept = _kept(dataset, what)
    if kept is not None and kept.exists():
        return _load(kept)
    found = _by_row(dataset, length_column, most_seconds, what)
    if kept is not None and found is not None:
        _save(kept, found)
    return found


def _count(dataset: Any, what: str) -> int:
    try:
        return len(dataset)
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"the {what} dataset raises when asked how many rows it has: {type(error).__name__}: {first_line(error)}") from error


def is_map_style(dataset: Any) -> bool:
    """Whether rows can be read by number."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or is_a(dataset, "IterableDataset"):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def length_of_row(row: Any, length_column: str = LENGTH) -> tuple[int, int, str] | None:
    """(length of the input, length of the target sequence or 0, unit) of one row; None when it has none.

    Without a field that transformers' models read, all elements of all fields count: enough to tell the longest row.
    """
    if isinstance(row, Mapping):
        unit = next((name for name in INPUTS if row.get(name) is not None), None)
        if unit is not None:
            target = _target(row, unit)
            return _length(row[unit]), target, INPUTS[unit]
        if isinstance(row.get(length_column), int):
            return int(row[length_column]), 0, "tokens"
        texts = [value for value in row.values() if isinstance(value, str)]
        if texts and not any(_elements(value) > 1 for value in row.values()):
            return sum(map(len, texts)), 0, "characters"
        row = list(row.values())
    elements = sum(map(_elements, row)) if isinstance(row, tuple | list) else _elements(row)
    return (elements, 0, "elements") if elements else None


def _target(row: Mapping[str, Any], unit: str) -> int:
    """Length of labels that are padded apart from the input; 0 where they go along with it."""
    labels = row.get("labels")
    length = 0 if labels is None or isinstance(labels, str) else _length(labels)
    return 0 if length <= 1 or length == _length(row[unit]) else length


def _length(value: Any) -> int:
    """Steps along the axis that is padded: the last one of features and of several choices, the first of anything else."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[-1]) if len(shape) == 2 else int(shape[0]) if len(shape) else 1
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return max(map(_length, value))
    return len(value) if isinstance(value, Sequence) else 1


def _elements(value: Any) -> int:
    """Numbers in a tensor, an array, an image or a (nested) list; 0 for what is none of these."""
    size = getattr(value, "numel", None)
    if callable(size):
        return int(size())
    if isinstance(getattr(value, "size", None), int):  # numpy
        return int(value.size)
    if isinstance(getattr(value, "size", None), tuple):  # PIL: width and height
        return int(np.prod(value.size))
    if isinstance(value, list | tuple):
        return sum(map(_elements, value)) if value and not isinstance(value[0], int | float) else len(value)
    return 1 if isinstance(value, int | float) else 0


def _by_column(dataset: Any, length_column: str) -> Lengths | None:
    """From arrow columns, without making a Python object; None where rows are made on the fly or have no such columns."""
    if not is_a(dataset, "Dataset") or dataset.format["type"] == "custom":
        return None
    table, names = dataset.data, dataset.column_names
    name = next((n for n in INPUTS if n in names and _is_list(table, n)), None)
    if name is not None:
        inputs = _list_lengths(table.column(name))
    elif length_column in names and pa.types.is_integer(table.column(length_column).type):
        inputs = table.column(length_column)
    else:
        return None
    lengths = _numbers(inputs)
    targets = _numbers(pc.list_value_length(table.column("labels"))) if "labels" in names and _is_list(table, "labels") else None
    if targets is not None and np.array_equal(targets, lengths):
        targets = None
    rows = None if dataset._indices is None else _numbers(dataset._indices.column(0))
    if rows is not None:
        lengths, targets = lengths[rows], None if targets is None else targets[rows]
    return Lengths.of(lengths, unit=INPUTS[name or "input_ids"], targets=targets)


def _is_list(table: Any, name: str) -> bool:
    kind = table.column(name).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _list_lengths(column: Any) -> Any:
    """Length of each list of a chunked column; of lists of lists (several choices) that of the longest inside."""
    inner = column.type.value_type
    if not (pa.types.is_list(inner) or pa.types.is_large_list(inner)):
        return pc.list_value_length(column)
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in column.chunks:
        longest = np.zeros(len(chunk), dtype=np.int64)
        np.maximum.at(longest, pc.list_parent_indices(chunk).to_numpy(), _numbers(pc.list_value_length(chunk.flatten())))
        found.append(longest)
    return pa.chunked_array([np.concatenate(found)])


def _numbers(column: Any) -> Any:
    return np.asarray(pc.fill_null(column, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _by_row(dataset: Any, length_column: str, most_seconds: float, what: str) -> Lengths | None:
    order = np.random.default_rng(0).permutation(len(dataset))[:MOST_ROWS]
    rows, inputs, targets, unit = [], [], [], None
    for index, row in _read(dataset, order, time.monotonic() + most_seconds, what):
        found = length_of_row(row, length_column)
        if found is None:
            return None
        rows.append(index)
        inputs.append(found[0])
        targets.append(found[1])
        unit = unit or found[2]
    if unit is None:
        return None
    in_order = np.argsort(rows)
    picked = (np.asarray(values)[in_order] for values in (rows, inputs, targets))
    numbers, lengths, others = picked
    return Lengths.of(lengths, unit=unit, targets=others, rows=numbers, total=len(dataset))


def _read(dataset: Any, order: Any, deadline: float, what: str) -> Iterator[tuple[int, Any]]:
    """(index, row) until the time is over; one row at least."""
    for number, index in enumerate(order):
        if number and time.monotonic() > deadline:
            return
        try:
            row = dataset[int(index)]
        except MemoryError:
            raise
        except Exception as error:  # the user's own code may raise anything
            name = "train_dataset" if what == "training" else "eval_dataset"
            message = f"the {what} dataset raises at row {int(index)}: {type(error).__name__}: {first_line(error)}"
            raise UserError(message, hint=f"read that row by hand, e.g. {name}[i], to see where") from error
        yield int(index), row


def _kept(dataset: Any, what: str) -> Path | None:
    """Where the lengths of this dataset are kept for the children that come later; None without a runner's directory."""
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return None
    fingerprint = getattr(dataset, "_fingerprint", "")
    key = json.dumps([what, type(dataset).__qualname__, len(dataset), str(fingerprint)])
    return Path(scratch) / f"lengths-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"


def _save(path: Path, lengths: Lengths) -> None:
    own = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(own, unit=lengths.unit, total=lengths.total, rows=lengths.rows, inputs=lengths.inputs, targets=lengths.targets)
    os.replace(own, path)


def _load(path: Path) -> Lengths:
    with np.load(path) as kept:
        return Lengths(
            unit=str(kept["unit"]), total=int(kept["total"]), rows=kept["rows"], inputs=kept["inputs"], targets=kept["targets"]
        )
