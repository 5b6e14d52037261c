"""What the parent is told of the data, and which rows stand for the worst of it where only one batch is looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from autofit.trials.lengths import Lengths
from autofit.workload.data.scan import LENGTH, PADDED, is_map_style, lengths_of
from autofit.workload.models import ResolvedModel

STREAM = "train_dataset is a stream: its longest rows cannot be looked up, and memory holds for the batches that came"
SEVERAL = "train_dataset is several datasets: their longest rows are not looked up, and memory holds for the batches that came"
UNREAD = "the rows of train_dataset hold nothing that has a length: which are the longest is not known, and memory holds for the batches that came"


def describe_data(resolved: ResolvedModel) -> dict[str, Any]:
    """`sample_length`: of the longest row (made-up data: of every row), None where nobody looked, or knows how many tokens it makes. Under `data`,
    for rows that are somebody's: where they are from, their lengths, whether they differ, and a digest. Where lengths cannot be known, `warnings`.

    Raises:
        UserError: a live dataset is empty, or raises when a row is read.
    """
    if resolved.data is not None:
        return {"sample_length": resolved.seq_len, "data": resolved.data.facts()}
    objects = resolved.objects
    if objects is None or objects.train_dataset is None:
        return {"sample_length": resolved.seq_len}
    return live_data(objects.train_dataset, length_column=_length_column(resolved))


def live_data(dataset: Any, *, length_column: str = LENGTH, ordered: bool = True) -> dict[str, Any]:
    """As `describe_data`, of the dataset that somebody's Trainer gets.

    Args:
        dataset: of any kind.
        length_column: `TrainingArguments.length_column_name`.
        ordered: whether the same rows in another order have another digest: a script may make them from a set, whose order is another in each run.

    Raises:
        UserError: the dataset is empty, or raises when a row is read.
    """
    if not is_map_style(dataset):
        return {"sample_length": None, "warnings": [SEVERAL if isinstance(dataset, Mapping) else STREAM]}
    lengths = lengths_of(dataset, length_column=length_column)
    if lengths is None:
        return {"sample_length": None, "warnings": [UNREAD]}
    summary = lengths.summary()
    return {
        "sample_length": summary.longest if summary.unit in PADDED else None,
        "data": {
            "source": "train_dataset",
            "uneven": lengths.uneven,
            "digest": lengths_digest(lengths, ordered=ordered),
            "lengths": summary.to_json(),
        }
    }


def worst_rows(dataset: Any, count: int) -> list[int]:
    """Indices of `count` rows that make a batch as long as the worst of any size: the longest row, or the longest input and the longest target in
    turn. For one row that cannot be both, the two: each row of what they make is as long as the worst."""
    lengths = lengths_of(dataset)
    if lengths is None:
        return [i % len(dataset) for i in range(count)]
    longest = [row for batch in lengths.longest_batches(1) for row in batch]
    return [longest[i % len(longest)] for i in range(max(count, len(longest)))]


def _length_column(resolved: ResolvedModel) -> str:
    arguments = {} if resolved.objects is None else resolved.objects.extra.get("arguments") or {}
    return str(arguments.get("length_column_name") or LENGTH)


def lengths_digest(lengths: Lengths, *, ordered: bool) -> str:
    """Of all lengths; of their number where a bounded scan would not see the same rows again."""
    content = b""
    if lengths.complete and ordered:
        content = lengths.inputs.tobytes() + lengths.targets.tobytes()
    elif lengths.complete:
        content = np.sort(lengths.inputs * (int(lengths.targets.max()) + 1) + lengths.targets).tobytes() + lengths.targets.max().tobytes()
    return hashlib.sha256(str(lengths.total).encode() + content).hexdigest()[:16]
