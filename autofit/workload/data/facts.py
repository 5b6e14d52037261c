"""What the parent is told of the data, and which rows stand for the worst of it where only one batch is looked at."""

from __future__ import annotations

import hashlib
from typing import Any

from autofit.trials.lengths import Lengths
from autofit.workload.data.scan import LENGTH, is_map_style, lengths_of
from autofit.workload.models import ResolvedModel

STREAM = "train_dataset is a stream: its longest rows cannot be looked up, and memory holds for the batches that came"


def describe_data(resolved: ResolvedModel) -> dict[str, Any]:
    """`sample_length`: of the longest row (made-up data: of every row), None where nobody looked. Under `data`, for rows that are somebody's: where they are
    from, their lengths, whether they differ, and a digest. For a stream its `warnings`.

    Raises:
        UserError: a live dataset is empty, or raises when a row is read.
    """
    if resolved.data is not None:
        return {"sample_length": resolved.seq_len, "data": resolved.data.facts()}
    objects = resolved.objects
    if objects is None or objects.train_dataset is None:
        return {"sample_length": resolved.seq_len}
    if not is_map_style(objects.train_dataset):
        return {"sample_length": None, "warnings": [STREAM]}
    lengths = lengths_of(objects.train_dataset, length_column=_length_column(resolved))
    if lengths is None:
        return {"sample_length": None}
    summary = lengths.summary()
    return {
        "sample_length": None if summary.unit == "elements" else summary.longest,
        "data": {
            "source": "train_dataset",
            "uneven": lengths.uneven,
            "digest": _digest(lengths),
            "lengths": summary.to_json(),
        }
    }


def worst_rows(dataset: Any, count: int) -> list[int]:
    """Indices of `count` rows that make a batch as long as the worst of any size: the longest row, or the longest input and the longest target in turn."""
    lengths = lengths_of(dataset)
    if lengths is None:
        return [i % len(dataset) for i in range(count)]
    longest = lengths.longest_batch(2 if lengths.targets.any() and count > 1 else 1)
    return [longest[i % len(longest)] for i in range(count)]


def _length_column(resolved: ResolvedModel) -> str:
    arguments = {} if resolved.objects is None else resolved.objects.extra.get("arguments") or {}
    return str(arguments.get("length_column_name") or LENGTH)


def _digest(lengths: Lengths) -> str:
    """Of all lengths; of their number where a bounded scan would not see the same rows again."""
    content = lengths.inputs.tobytes() + lengths.targets.tobytes() if lengths.complete else b""
    return hashlib.sha256(str(lengths.total).encode() + content).hexdigest()[:16]
