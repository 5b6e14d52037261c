"""Lengths of live datasets of many kinds, within a bounded time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import BertConfig

from autofit.problem.spec import Workload
from autofit.processes.protocol import SCRATCH
from autofit.workload import models
from autofit.workload.data.facts import STREAM, UNREAD, describe_data
from autofit.workload.data.scan import CHECKED_ROWS, length_of_row, lengths_of
from autofit.workload.objects import LiveObjects
from tests.refusals import refused
from tests.uneven import SMALL, Sentences, Torn

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

LENGTHS = [4, 9, 2, 7]
IDS = [[1] * n for n in LENGTHS]


class Rows(Dataset[Any]):
    """Rows as given."""

    def __init__(self, rows: list[Any], seconds: float = 0.0) -> None:
        self.rows, self.seconds, self.read = rows, seconds, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        time.sleep(self.seconds)
        return self.rows[index]


@dataclass
class Features:
    """A row that is no mapping."""

    input_ids: list[int]
    label: int = 0


class Stream(IterableDataset[Any]):
    """A stream has no rows by number."""

    def __iter__(self) -> Any:
        return iter([{"input_ids": [1]}])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [1, 2, 3], "labels": 1}, (3, 0, "tokens")),
        ({"input_ids": torch.ones(5, dtype=torch.int64), "labels": torch.tensor(1)}, (5, 0, "tokens")),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, (3, 3, "tokens")),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4, 5]}, (3, 5, "tokens")),
        ({"input_ids": [1, 2, 3], "length": 30}, (3, 0, "tokens")),
        ({"attention_mask": [1, 1]}, (2, 0, "tokens")),
        ({"input_values": np.zeros(1600, dtype=np.float32), "labels": [3, 4]}, (1600, 2, "samples of audio")),
        ({"input_features": np.zeros((80, 300)), "labels": [1] * 7}, (24_000, 7, "elements")),
        ({"length": 12, "text": "abc"}, (12, 0, "tokens")),
        ({"text": "four", "label": 1}, (4, 0, "characters")),
        ({"chosen_input_ids": [1] * 4, "rejected_input_ids": [1] * 6}, (10, 0, "elements")),
        ({"x": torch.zeros(3, 4), "labels": torch.tensor(0.0)}, (13, 0, "elements")),
        ((torch.zeros(6), 1), (6, 0, "elements")),
        ({"name": None}, None),
        (Features(input_ids=[1, 2, 3]), (3, 0, "tokens")),
        ({"input_ids": [[1, 2], [1, 2, 3, 4]], "labels": 1}, (4, 0, "tokens")),
        ({"input_ids": torch.ones(4, 7), "labels": 1}, (7, 0, "tokens")),
        ({"input_features": [[0.0] * 300] * 80, "labels": [1] * 7}, (24_000, 7, "elements")),
        (("four", 1), (4, 0, "characters")),
        ({"text": np.array(["four", "seven"])[1], "label": 1}, (5, 0, "characters")),
        ({"image": {"bytes": b"...", "path": "a long name.png"}}, None),
        ({"text": "three", "labels": [0, 1, 0]}, (8, 0, "characters")),
        ({"words": ["one", "three"], "tags": [0, 0]}, (10, 0, "characters")),
        ({"messages": [{"role": "me", "content": "four"}, {"role": "you", "content": "five"}]}, (13, 0, "characters")),
        ({"inputs": {"input_ids": [1] * 5}, "labels": 1}, (5, 0, "elements")),
        ({"image": np.zeros((3, 4)), "text": "four"}, (16, 0, "elements")),
    ],
)
def test_the_length_of_a_row(row: Any, expected: Any) -> None:
    assert length_of_row(row) == expected


@pytest.mark.parametrize("kind", ["list", "torch dataset", "arrow", "selected", "shuffled and sliced", "transformed", "formatted"])
def test_every_kind_of_dataset_gives_the_same_lengths(kind: str) -> None:
    rows = [{"input_ids": ids, "labels": 0} for ids in IDS]
    arrow = datasets.Dataset.from_list(rows)
    made = {
        "list": rows,
        "torch dataset": Rows(rows),
        "arrow": arrow,
        "selected": datasets.Dataset.from_list([*rows[::-1], rows[0]]).select([3, 2, 1, 0]),
        "shuffled and sliced": datasets.concatenate_datasets([arrow, arrow]).select(range(4)),
        "transformed": arrow.with_transform(dict),
        "formatted": arrow.with_format("torch"),
    }[kind]
    found = lengths_of(made)
    assert found is not None
    assert found.inputs.tolist() == LENGTHS
    assert (found.unit, found.total, found.complete) == ("tokens", 4, True)
    assert not found.targets.any()


def test_rows_of_several_choices_are_as_long_as_the_longest() -> None:
    rows = [{"input_ids": [[1] * (n + k) for k in range(3)], "labels": 0} for n in (5, 60, 7)]
    rows.append({"input_ids": [], "labels": 0})
    arrow = datasets.Dataset.from_list(rows)
    for made in (rows[:3], arrow.select(range(3)), datasets.concatenate_datasets([arrow, arrow]).select([0, 1, 6])):
        found = lengths_of(made)
        assert found is not None
        assert found.inputs.tolist() == [7, 62, 9]
    empty = lengths_of(arrow)
    assert empty is not None
    assert empty.inputs.tolist() == [7, 62, 9, 0]


@pytest.mark.parametrize("kind", ["rows", "arrow"])
@pytest.mark.parametrize("time_first", [True, False])
def test_features_are_as_long_as_their_steps_whichever_axis_these_are(kind: str, time_first: bool) -> None:
    features = [np.zeros((n, 3) if time_first else (3, n), dtype=np.float32) for n in LENGTHS]
    rows = [{"input_features": values if kind == "rows" else values.tolist(), "labels": [1] * 2} for values in features]
    found = lengths_of(rows if kind == "rows" else datasets.Dataset.from_list(rows))
    assert found is not None
    assert (found.inputs.tolist(), found.unit) == (LENGTHS, "steps of 3 elements")


@pytest.mark.parametrize("kind", ["rows", "arrow"])
def test_labels_are_targets_where_any_is_longer_or_shorter_than_its_input(kind: str) -> None:
    def targets(lengths: list[tuple[int, int]]) -> list[int]:
        rows = [{"input_ids": [1] * n, "labels": [1] * m} for n, m in lengths]
        found = lengths_of(rows if kind == "rows" else datasets.Dataset.from_list(rows))
        assert found is not None
        return list(found.targets)

    assert targets([(8, 8), (3, 2), (5, 8)]) == [8, 2, 8], "both may be cut at the same length"
    assert targets([(8, 8), (3, 3)]) == [0, 0], "a label for each token is padded with it"


def test_rows_of_one_fixed_length_are_not_as_long_as_a_column_says() -> None:
    rows = datasets.Dataset.from_list([{"input_ids": [1] * 8, "length": n} for n in LENGTHS])
    fixed = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"), length=8), "length": datasets.Value("int64")})
    found = lengths_of(rows.cast(fixed))
    assert found is not None
    assert found.inputs.tolist() == [8] * 4


def test_of_very_many_rows_only_those_that_are_looked_at_are_drawn() -> None:
    class Endless(Rows):
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": [1]}

    found = lengths_of(Endless([]), most_seconds=0.1)
    assert found is not None
    assert 1 <= len(found.rows) < found.total == 1 << 40


def test_targets_are_read_from_arrow_and_a_column_of_lengths_where_rows_have_none() -> None:
    rows = datasets.Dataset.from_list([{"input_ids": ids, "labels": [1] * 3, "size": 10 * len(ids)} for ids in IDS])
    found = lengths_of(rows, length_column="size")
    assert found is not None
    assert found.inputs.tolist() == LENGTHS, "whatever a column says: the rows are what a batch is made of"
    assert found.targets.tolist() == [3] * 4
    found = lengths_of(rows.remove_columns("input_ids"), length_column="size")
    assert found is not None
    assert found.inputs.tolist() == [10 * n for n in LENGTHS]


def test_a_slow_dataset_is_looked_at_in_part() -> None:
    found = lengths_of(Rows([{"input_ids": [1] * n} for n in range(1, 401)], seconds=0.01), most_seconds=0.2)
    assert found is not None
    assert 1 <= len(found.rows) < 100
    assert not found.complete
    assert found.total == 400
    assert found.inputs.tolist() == [row + 1 for row in found.rows], "lengths belong to their rows"


def test_streams_and_rows_without_a_length_say_nothing() -> None:
    assert lengths_of(Stream()) is None
    assert lengths_of(Rows([{"name": None}])) is None


@pytest.mark.parametrize(("rows", "warning"), [(Stream(), STREAM), ([{"name": None}], UNREAD)])
def test_rows_whose_lengths_cannot_be_known_are_a_warning(rows: Any, warning: str) -> None:
    objects = LiveObjects(config=BertConfig(**SMALL), train_dataset=rows)
    resolved = models.resolve_with(Workload(model="tiny", task="sequence-classification"), objects)
    assert describe_data(resolved) == {"sample_length": None, "warnings": [warning]}


def test_the_length_of_a_sample_is_that_of_the_longest_row_and_none_where_rows_have_no_tokens() -> None:
    def length(rows: list[dict[str, Any]] | None) -> int | None:
        objects = LiveObjects(config=BertConfig(**SMALL), train_dataset=rows)
        resolved = models.resolve_with(Workload(model="tiny", task="sequence-classification", seq_len=9), objects)
        found: int | None = describe_data(resolved)["sample_length"]
        return found

    assert length(None) == 9, "made up"
    assert length([{"input_ids": ids} for ids in IDS]) == max(LENGTHS)
    assert length([{"x": [0.0] * 16}]) is None
    assert length([{"text": "how many tokens that makes is not known"}]) is None


def test_an_empty_dataset_and_one_that_raises_are_refused() -> None:
    with refused("dataset is empty"):
        lengths_of(Rows([]))
    with refused("raises at row 5: OSError: the shard with this row is truncated"):
        lengths_of(Torn([3] * 10))


def test_a_dataset_that_raises_when_its_rows_are_counted_is_refused() -> None:
    class Uncounted(Rows):
        def __len__(self) -> int:
            raise OSError("the index is missing")

    with refused("training dataset raises when asked how many rows it has: OSError: the index is missing"):
        lengths_of(Uncounted([]))


def test_a_second_child_reads_few_rows_unless_they_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    rows = [{"input_ids": [1] * (5 + i)} for i in range(100)]
    first, second, slow, shuffled = Rows(rows), Rows(rows), Rows(rows, seconds=0.3), Rows([rows[7 * i % 100] for i in range(100)])
    found, again, third, other = map(lengths_of, (first, second, slow, shuffled))
    assert found is not None
    assert again is not None
    assert third is not None
    assert other is not None
    assert first.read == 100
    assert second.read <= 2 * CHECKED_ROWS
    assert slow.read <= 3
    assert again.summary() == third.summary() == found.summary()
    assert other.longest_batch(1) == (57,), "where row 99 is now"
    assert lengths_of(Sentences(LENGTHS)) is not None


class Crops(Rows):
    """Rows that are cut to another length at every read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        super().__getitem__(index)
        return {"input_ids": [1] * (self.read % 7 + 1)}


def test_rows_of_another_length_at_every_read_are_not_all_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    first, second = Crops([{}] * 100), Crops([{}] * 100)
    found, again = map(lengths_of, (first, second))
    assert found is not None
    assert again is not None
    assert first.read == 100
    assert second.read <= 4 * CHECKED_ROWS
    assert again.summary() == found.summary()
