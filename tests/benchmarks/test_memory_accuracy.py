"""The accuracy benchmark: errors are computed from the rows, caveats come first, and other methods are asked as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import BertConfig

from autofit.problem.config import Precision
from autofit.units import MIB
from benchmarks.memory_accuracy import cpu, document
from benchmarks.memory_methods import METHODS, Question, by_accelerate, by_formula
from benchmarks.memory_report import describe_machine, markdown, summary_lines
from benchmarks.memory_rows import BERT_LARGE, founding_name, founding_tables
from benchmarks.memory_table import Row, Table
from tests.tracing import test_exactness

PARAMETERS = 335_143_938


def _question(**fields: object) -> Question:
    values: dict[str, object] = {
        "config": BertConfig(**BERT_LARGE),
        "n_params": PARAMETERS,
        "batch": 4,
        "seq_len": 512,
        "precision": Precision.FP32,
        "optim": "adamw",
        "checkpointing": False,
        "accumulates": False,
    }
    return Question(**{**values, **fields})  # type: ignore[arg-type]


def _table() -> Table:
    rows = [
        Row(name="small", measured_bytes=100 * MIB, told={"ours": 101 * MIB, "theirs": 50 * MIB}),
        Row(name="large", measured_bytes=200 * MIB, told={"ours": 196 * MIB}),
    ]
    return Table(
        key="k",
        title="Rows by hand",
        rows=rows,
        methods=("ours", "theirs", "nobody"),
        notes=("read me",),
        residuals=("none",),
    )


def test_errors_are_relative_to_what_was_measured_and_unanswered_rows_do_not_count() -> None:
    ours = _table().summary("ours")
    assert ours is not None
    assert ours["mean_absolute"] == pytest.approx(0.015)
    assert ours["mean"] == pytest.approx(-0.005)
    assert ours["worst"] == pytest.approx(-0.02)
    theirs = _table().summary("theirs")
    assert theirs is not None
    assert (theirs["rows"], theirs["worst"]) == (1, pytest.approx(-0.5))
    assert _table().summary("nobody") is None


def test_the_report_begins_with_caveats_and_says_what_was_not_asked() -> None:
    text = markdown([_table()], METHODS[:2], describe_machine() | {"seconds": 1})
    assert text.index("## Caveats") < text.index("## Summary") < text.index("Rows by hand")
    assert "No GPU took part" in text
    assert "no GPU was used" not in text.split("## Machine")[0]
    for method in METHODS:
        if method.version is None:
            assert f"`{method.name}` is not installed here" in text
    assert any("ours" in line and "1.50 %" in line for line in summary_lines([_table()]))


def test_the_document_is_json_with_every_row() -> None:
    data = json.loads(json.dumps(document([_table()], METHODS, {"date": "today"}), allow_nan=False))
    assert [row["name"] for row in data["tables"]["k"]["rows"]] == ["small", "large"]


def test_accelerate_is_four_times_the_weights_whatever_the_batch() -> None:
    few, many = by_accelerate(_question(batch=1)), by_accelerate(_question(batch=64))
    assert few == many
    assert few == pytest.approx(16 * PARAMETERS, rel=0.01)


def test_the_formula_hears_of_batch_and_checkpointing() -> None:
    assert by_formula(_question(batch=1)) < by_formula(_question(batch=64))
    assert by_formula(_question(checkpointing=True)) < by_formula(_question())


def test_rows_of_the_founding_tables_have_names_of_their_own() -> None:
    for table in founding_tables().values():
        names = [founding_name(row) for row in table["rows"]]
        assert len(set(names)) == len(names)


def test_real_steps_on_this_cpu_are_rows_beside_our_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_exactness, "ALL", [("bert", "bf16")])
    pool: Any = type("Here", (), {"map": staticmethod(map)})
    (row,) = cpu(pool, METHODS[:1]).rows
    assert row.told["autofit"] == pytest.approx(row.measured_bytes, rel=0.001)
    assert METHODS[0].name in row.told
