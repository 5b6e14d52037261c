"""The data of a workload: JSON there and back, part of what a study is about, and refused where it makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.cli.data_options import data_source_of
from autofit.problem.data_source import DataSource
from autofit.problem.spec import Workload
from tests.refusals import refused

FULL = DataSource(
    dataset="reviews.csv", split="train[:10]", text_columns=("a", "b"), label_column="c", tokenizer="tok", pad_to_multiple_of=8
)


@pytest.mark.parametrize("source", [FULL, DataSource(dataset="x.jsonl"), DataSource(dataset="y", packing=True)])
def test_json_there_and_back(source: DataSource) -> None:
    assert DataSource.from_json(source.to_json()) == source
    workload = Workload(model="m", data=source)
    assert Workload.from_json(workload.to_json()) == workload


def test_old_files_load_and_keep_their_identity() -> None:
    plain = Workload(model="m", seq_len=8)
    old = {name: value for name, value in plain.to_json().items() if name != "data"}
    assert Workload.from_json(old) == plain
    assert "data" in plain.to_json()
    assert Workload.from_json(old).identity() == plain.identity()


def test_every_field_is_part_of_the_identity() -> None:
    different = [
        FULL,
        *(
            DataSource.from_json({**FULL.to_json(), **change})
            for change in (
                {"dataset": "other.csv"}, {"split": None}, {"text_columns": ["a"]}, {"label_column": "d"}, {"tokenizer": None},
                {"pad_to_multiple_of": 16}, {"packing": True, "pad_to_multiple_of": None},
            )
        ),
    ]  # fmt: skip
    names = {Workload(model="m", data=source).identity() for source in different} | {Workload(model="m").identity()}
    assert len(names) == len(different) + 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset": ""}, "no name"),
        ({"dataset": "x", "text_columns": ("a", "b", "c")}, "3 text columns"),
        ({"dataset": "x", "text_columns": ("a", "a")}, "'a' is named twice"),
        ({"dataset": "x", "split": ""}, "--split is empty"),
        ({"dataset": "x", "label_column": " "}, "--label-column is empty"),
        ({"dataset": "x", "tokenizer": ""}, "--tokenizer is empty"),
        ({"dataset": "x", "pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"dataset": "x", "pad_to_multiple_of": True}, "pad_to_multiple_of"),
        ({"dataset": "x", "packing": True, "pad_to_multiple_of": 8}, "no effect"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], words: str) -> None:
    with refused(words):
        DataSource(**fields)


def test_options_name_the_data() -> None:
    assert data_source_of({}) is None
    values = {"dataset": "r.csv", "text_column": "a, b", "label_column": "c", "packing": False, "pad_to_multiple_of": 8}
    with refused("--text-column is empty"):
        data_source_of({**values, "text_column": " , "})
    assert data_source_of(values) == DataSource(dataset="r.csv", text_columns=("a", "b"), label_column="c", pad_to_multiple_of=8)


@pytest.mark.parametrize("option", [{"split": "train"}, {"text_column": "a"}, {"packing": True}, {"pad_to_multiple_of": 0}, {"tokenizer": ""}])
def test_an_option_about_data_without_data_is_refused(option: dict[str, Any]) -> None:
    with refused("without --dataset"):
        data_source_of(option)
