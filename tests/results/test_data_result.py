"""What a result says of its data: computed from records and a child's description alone."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.problem.config import TrialConfig
from autofit.results.data_result import data_lines, data_of, data_problems
from autofit.trials.lengths import Lengths
from autofit.trials.measurement import Measurement
from autofit.trials.trial import Outcome, Role, TrialRecord

WINNER = TrialConfig(per_device_train_batch_size=8)
LENGTHS = Lengths.of([5, 20, 300, 40]).summary().to_json()


def record(facts: dict[str, Any] | None, role: Role = Role.SEARCH, config: TrialConfig = WINNER) -> TrialRecord:
    measurement = Measurement(micro_step_seconds=(1.0,), facts=None if facts is None else {"data": facts})
    return TrialRecord(number=0, config=config, role=role, outcome=Outcome.COMPLETED, measurement=measurement)


def seen(**facts: Any) -> dict[str, Any]:
    return {"lengths": LENGTHS, "uneven": True, "prelude_steps": 2, "prelude_longest": 304, "padding_share": 0.5, **facts}


def test_uneven_data_says_which_length_decided_the_memory() -> None:
    model = {"data": {"source": "r.csv", "columns": "text in 'review'", "num_labels": 3, "uneven": True, "lengths": LENGTHS}}
    records = [record(seen()), record(seen(padding_share=0.3)), record(seen(padding_share=0.9), Role.CONFIRMATION)]
    data = data_of(model, records, WINNER)
    assert data["memory_decided_by"] == {"length": 304, "unit": "tokens", "shown": True}
    assert data["padding_share"] == pytest.approx(0.4), "a confirmation times few batches"
    report = "\n".join(data_lines(data))
    assert "r.csv: 4 rows, text in 'review', 3 labels." in report
    assert "Memory was decided by length 304" in report
    assert "longest 300 (all rows)" in report
    assert "Padding was 40 %" in report
    assert data_problems(data) == []


def test_a_scripts_data_is_known_from_its_trials() -> None:
    data = data_of({}, [record(seen())], WINNER)
    assert data["lengths"]["longest"] == 300
    assert data["memory_decided_by"]["shown"]


def test_what_weakens_the_answer_is_said() -> None:
    part = Lengths.of([5, 20], rows=[1, 2], total=9).summary().to_json()
    model = {"data": {"source": "train_dataset", "uneven": True, "lengths": part}}
    data = data_of(model, [record(seen(prelude_steps=0, prelude_longest=None, lengths=part))], WINNER)
    codes = [code for code, _, _ in data_problems(data)]
    assert codes == ["partial_scan", "longest_not_shown"]
    assert data["memory_decided_by"] == {"length": 20, "unit": "tokens", "shown": False}
    assert "2 of 9 rows" in "\n".join(data_lines(data))


def test_texts_of_most_characters_that_are_not_the_longest_are_not_said_to_have_decided() -> None:
    texts = Lengths.of([500, 2000], unit="characters").summary().to_json()
    model = {"data": {"source": "train_dataset", "uneven": True, "lengths": texts}}
    data = data_of(model, [record(seen(lengths=texts, prelude_longest=400, measured_longest=400))], WINNER)
    assert data["memory_decided_by"] == {"length": 400, "unit": "tokens", "shown": True}
    assert data_problems(data) == []
    data = data_of(model, [record(seen(lengths=texts, prelude_longest=400, measured_longest=450))], WINNER)
    assert data["memory_decided_by"]["length"] == 450
    [(code, message, _)] = data_problems(data)
    assert code == "longer_came"
    assert "a batch of length 450 came, and the rows of most characters had made one of 400" in message
    assert "Memory was decided" not in "\n".join(data_lines(data))


def test_a_sample_of_named_data_is_not_told_to_have_a_column_that_is_not_read() -> None:
    part = Lengths.of([5, 20], total=9).summary().to_json()
    named = {"data": {"source": "r.csv", "columns": "text in 'review'", "uneven": True, "lengths": part}}
    [(code, _, step)] = data_problems(data_of(named, [record(seen(lengths=part))], WINNER))
    assert (code, "--seq-len" in step, "column" in step) == ("partial_scan", True, False)


def test_made_up_and_even_data_say_little() -> None:
    assert data_of({}, [record(None)], WINNER) == {}
    assert data_lines({}) == []
    assert data_problems({}) == []
    even = Lengths.of([7, 7]).summary().to_json()
    data = data_of({"data": {"source": "train_dataset", "uneven": False, "lengths": even}}, [], WINNER)
    assert "memory_decided_by" not in data
    assert data_lines(data) == []
    assert data_problems(data) == []
