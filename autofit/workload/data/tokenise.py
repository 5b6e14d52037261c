"""From rows of text to rows of tokens, per task, as the ecosystem's own example scripts do it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autofit.errors import UserError
from autofit.problem.task import Task
from autofit.workload.data.columns import Columns
from autofit.workload.data.labels import Labels

IGNORED = -100  #: label that cross entropy leaves out
Rows = dict[str, list[Any]]
Batch = Mapping[str, Sequence[Any]]


def tokenising(
    task: Task, tokenizer: Any, columns: Columns, labels: Labels | None, *, limit: int | None, packing: bool
) -> Callable[[Batch, Sequence[int]], Rows]:
    """Return the function (batch of rows, their indices) -> rows of tokens; rows without a token are left out.

    Args:
        limit: tokens after which a text is cut; with `packing` the length of a block. None = never.

    Raises (the function):
        UserError: a row without text, or without a target.
    """
    options = {"truncation": limit is not None, "max_length": limit} if limit is not None else {}

    def plain(batch: Batch, indices: Sequence[int]) -> Rows:
        return dict(tokenizer(*(_texts(batch, name, indices) for name in columns.text), **options))

    def classified(batch: Batch, indices: Sequence[int]) -> Rows:
        assert labels is not None
        return {**plain(batch, indices), "labels": [labels.number(value) for value in batch[labels.column]]}

    def translated(batch: Batch, indices: Sequence[int]) -> Rows:
        assert columns.label is not None
        targets = tokenizer(text_target=_texts(batch, columns.label, indices), **options)
        return {**plain(batch, indices), "labels": targets["input_ids"]}

    def tagged(batch: Batch, indices: Sequence[int]) -> Rows:
        assert labels is not None
        words = [list(row) for row in _texts(batch, columns.text[0], indices)]
        for index, row, tags in zip(indices, words, batch[labels.column]):
            _check_words(index, row, tags, columns.text[0], labels.column)
        found = tokenizer(words, is_split_into_words=True, **options)
        numbers = [_aligned(found.word_ids(i), tags, labels) for i, tags in enumerate(batch[labels.column])]
        return {**dict(found), "labels": numbers}

    def packed(batch: Batch, indices: Sequence[int]) -> Rows:
        assert limit is not None
        found = tokenizer(_texts(batch, columns.text[0], indices))
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        return blocks([[*ids, *([] if ids[-1:] == end else end)] for ids in found["input_ids"]], limit)

    if packing:
        return packed
    makers = {Task.SEQUENCE_CLASSIFICATION: classified, Task.SEQ2SEQ_LM: translated, Task.TOKEN_CLASSIFICATION: tagged}
    make = makers.get(task, plain)
    return lambda batch, indices: without_empty(make(batch, indices))


def blocks(texts: Sequence[Sequence[int]], length: int) -> Rows:
    """Token sequences joined and cut into blocks of exactly `length`; what is left over at the end is dropped."""
    joined = list(itertools.chain.from_iterable(texts))
    starts = range(0, len(joined) - length + 1, length)
    return {"input_ids": [joined[i : i + length] for i in starts], "attention_mask": [[1] * length for _ in starts]}


def without_empty(rows: Rows) -> Rows:
    """Rows that have a token at all: empty lines of a text file have none."""
    keep = [len(ids) > 0 for ids in rows["input_ids"]]
    return rows if all(keep) else {name: list(itertools.compress(values, keep)) for name, values in rows.items()}


def _texts(batch: Batch, column: str, indices: Sequence[int]) -> list[Any]:
    texts = list(batch[column])
    for index, text in zip(indices, texts):
        if text is None:
            raise UserError(f"row {index} has no text in column {column!r}", hint="remove such rows, or name another column")
    return texts


def _check_words(row: int, words: Sequence[Any], tags: Sequence[Any], column: str, label: str) -> None:
    if None in words:
        raise UserError(f"row {row} has a word without text in column {column!r}", hint="remove such rows, or name another column")
    if len(words) != len(tags):
        raise UserError(f"row {row} has {len(words)} words in column {column!r} and {len(tags)} labels in column {label!r}", hint="each word has one label")


def _aligned(word_ids: Sequence[int | None], tags: Sequence[Any], labels: Labels) -> list[int]:
    """A label for the first token of each word; the others do not count."""
    numbers, previous = [], None
    for word in word_ids:
        numbers.append(IGNORED if word is None or word == previous else int(labels.number(tags[word])))
        previous = word
    return numbers
