"""How long the rows of a live dataset are: from a column where that is cheap, else row by row within a bounded time, kept for later children."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
CHECKED_ROWS, CHECKED_SECONDS = 8, 0.5  #: of the longest that were kept, then of others, looked at again
ELEMENTS = "elements"
INPUTS = {"input_ids": "tokens", "input_values": "samples of audio", "input_features": ELEMENTS, "attention_mask": "tokens"}
PADDED = ("tokens", "samples of audio")  #: units of what a batch is padded in, as it is
LENGTH = "length"
UNDECODED = {"bytes", "path"}  #: what `datasets` gives for an image or a sound that it is told not to decode


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
    scan = _load(kept) if kept is not None and kept.exists() else None
    if scan is None or not _still_so(dataset, scan, length_column, what):
        scan = _by_row(dataset, length_column, most_seconds, what)
        if kept is not None and scan is not None:
            _save(kept, scan)
    return None if scan is None else _lengths(scan.inputs, scan.targets, scan.unit, rows=scan.rows, total=len(dataset))


def _count(dataset: Any, what: str) -> int:
    try:
        return len(dataset)
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"the {what} dataset raises when asked how many rows it has: {type(error).__name__}: {first_line(error)}") from error


def is_map_style(dataset: Any) -> bool:
    """Whether rows can be read by number: not those of a stream, nor of several datasets by name."""
    if isinstance(dataset, torch.utils.data.IterableDataset | Mapping) or is_a(dataset, "IterableDataset"):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def length_of_row(row: Any, length_column: str = LENGTH) -> tuple[int, int, str] | None:
    """(length of the input, length of the target sequence or 0, unit) of one row; None when it has none.

    Without a field that transformers' models read, all characters and elements of all fields count, however they are nested: enough to tell the
    longest row.
    """
    if is_dataclass(row) and not isinstance(row, type):
        row = {field.name: getattr(row, field.name) for field in fields(row)}
    if isinstance(row, Mapping):
        name = next((name for name in INPUTS if row.get(name) is not None), None)
        if name is not None:
            length = _content(row[name])[1] if INPUTS[name] == ELEMENTS else _length(row[name])
            return length, _target(row), INPUTS[name]
        if isinstance(row.get(length_column), int):
            return int(row[length_column]), 0, "tokens"
        row = list(row.values())
    values = list(row) if isinstance(row, tuple | list) else [row]
    characters, elements = _summed([value for value in values if not isinstance(value, int | float)])
    if not characters + elements:
        elements = _summed(values)[1]
    whole = characters + elements
    return (whole, 0, "characters" if characters >= elements else ELEMENTS) if whole else None


def _target(row: Mapping[str, Any]) -> int:
    """Length of the labels where they are a sequence, else 0."""
    labels = row.get("labels")
    if labels is None or isinstance(labels, str) or not (isinstance(labels, Sequence) or getattr(labels, "ndim", None)):
        return 0
    return _length(labels)


def _length(value: Any) -> int:
    """Steps along the axis that is padded: the last one of several choices, the first of anything else."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[-1]) if len(shape) == 2 else int(shape[0]) if len(shape) else 1
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return max(map(_length, value))
    return len(value) if isinstance(value, Sequence) else 1


def _content(value: Any) -> tuple[int, int]:
    """(characters, numbers) in a text, a tensor, an array, an image, a number, or what is nested of them; nothing in anything else, such as
    a file that was not decoded."""
    if isinstance(value, str):  # numpy's has a size too, which is 1
        return len(value), 0
    size = getattr(value, "numel", None)
    if callable(size):
        return 0, int(size())
    if isinstance(getattr(value, "size", None), int):  # numpy
        return 0, int(value.size)
    if isinstance(getattr(value, "size", None), tuple):  # PIL: width and height
        return 0, int(np.prod(value.size))
    if isinstance(value, Mapping):
        return (0, 0) if value.keys() == UNDECODED else _summed(value.values())
    if isinstance(value, list | tuple):
        return (0, len(value)) if value and isinstance(value[0], int | float) else _summed(value)
    return 0, int(isinstance(value, int | float))


def _summed(values: Iterable[Any]) -> tuple[int, int]:
    characters, elements = 0, 0
    for value in values:
        found = _content(value)
        characters, elements = characters + found[0], elements + found[1]
    return characters, elements


def _by_column(dataset: Any, length_column: str) -> Lengths | None:
    """From arrow columns, without making a Python object; None where rows are made on the fly or have no such columns."""
    if not is_a(dataset, "Dataset") or dataset.format["type"] == "custom":
        return None
    table, names = dataset.data, dataset.column_names
    name = next((n for n in INPUTS if n in names and _is_list(table, n)), None)
    if name is not None:
        inputs = _list_lengths(table.column(name), np.add if INPUTS[name] == ELEMENTS else np.maximum)
    elif not INPUTS.keys() & set(names) and length_column in names and pa.types.is_integer(table.column(length_column).type):
        inputs = table.column(length_column)
    else:
        return None
    lengths = _numbers(inputs)
    targets = _numbers(pc.list_value_length(table.column("labels"))) if "labels" in names and _is_list(table, "labels") else np.zeros_like(lengths)
    rows = slice(None) if dataset._indices is None else _numbers(dataset._indices.column(0))
    return _lengths(lengths[rows], targets[rows], INPUTS[name or "input_ids"])


def _lengths(inputs: Any, targets: Any, unit: str, **more: Any) -> Lengths:
    """Of rows whose labels are no targets where all are as long as their inputs; elements in steps, of which an input that is padded has a whole number."""
    if np.array_equal(inputs, targets):
        targets = np.zeros_like(inputs)
    found = Lengths.of(inputs, unit=unit, targets=targets, **more)
    step = int(np.gcd.reduce(inputs)) if unit == ELEMENTS and found.uneven else 1
    return found if step <= 1 else replace(found, inputs=inputs // step, unit=f"steps of {step} {ELEMENTS}")


def _is_list(table: Any, name: str) -> bool:
    kind = table.column(name).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _list_lengths(column: Any, of_lists: Any) -> Any:
    """Length of each list of a chunked column; of lists of lists the longest inside (several choices) or their sum, as the ufunc `of_lists` says."""
    inner = column.type.value_type
    if not (pa.types.is_list(inner) or pa.types.is_large_list(inner)):
        return pc.list_value_length(column)
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in column.chunks:
        lengths = np.zeros(len(chunk), dtype=np.int64)
        of_lists.at(lengths, pc.list_parent_indices(chunk).to_numpy(), _numbers(pc.list_value_length(chunk.flatten())))
        found.append(lengths)
    return pa.chunked_array([np.concatenate(found)])


def _numbers(column: Any) -> Any:
    return np.asarray(pc.fill_null(column, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """What `length_of_row` said of some rows, by ascending number."""

    rows: Any
    inputs: Any
    targets: Any
    unit: str


def _by_row(dataset: Any, length_column: str, most_seconds: float, what: str) -> _Scan | None:
    total = len(dataset)
    order = np.random.default_rng(0).choice(total, min(total, MOST_ROWS), replace=False)
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
    numbers, lengths, others = (np.asarray(values)[in_order] for values in (rows, inputs, targets))
    return _Scan(rows=numbers, inputs=lengths, targets=others, unit=unit)


def _still_so(dataset: Any, scan: _Scan, length_column: str, what: str) -> bool:
    """Whether rows have the lengths that were kept, by the longest and some others: code of the user's may order or draw them anew in each process.

    Where a row's length is another at every read, nothing is gained by reading them all again.
    """
    some = [*np.argsort(-scan.inputs)[:CHECKED_ROWS], *np.linspace(0, len(scan.rows) - 1, CHECKED_ROWS, dtype=np.int64)]
    deadline = time.monotonic() + CHECKED_SECONDS
    for (index, row), *kept in zip(_read(dataset, scan.rows[some], deadline, what), scan.inputs[some], scan.targets[some]):
        found = length_of_row(row, length_column)
        if (found or ())[:2] != tuple(kept):
            again = _read(dataset, [index] * CHECKED_ROWS, deadline, what)
            return any(length_of_row(row, length_column) != found for _, row in again)
    return True


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


def _save(path: Path, scan: _Scan) -> None:
    own = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(own, unit=scan.unit, rows=scan.rows, inputs=scan.inputs, targets=scan.targets)
    os.replace(own, path)


def _load(path: Path) -> _Scan:
    with np.load(path) as kept:
        return _Scan(unit=str(kept["unit"]), rows=kept["rows"], inputs=kept["inputs"], targets=kept["targets"])
