"""The report's lines on the winner's loader and evaluation, and the warnings that go with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autofit.reports.report import report_lines
from autofit.reports.report_after import (
    after_lines,
    after_trials,
    evaluation_line,
    loader_line,
)
from autofit.results.advisories_after import of_evaluation, of_loader
from autofit.results.evaluation import Evaluation, Pile, at_batch
from autofit.results.loader import without_settings
from autofit.results.result import TuneResult, estimates
from autofit.trials.trial import Reason, Role, TrialRecord
from autofit.units import GIB, MIB
from tests.builders import make_config, make_record, make_result

WINNER = make_config(8)
WORKERS = (("dataloader_num_workers", 4), ("dataloader_pin_memory", False))


def waiting(number: int, extra: Any, speed: float, role: Role) -> TrialRecord:
    record = make_record(number, WINNER.but(extra=extra), speed, role=role, micro_seconds=0.02)
    assert record.measurement is not None
    loader = {"wait_seconds": record.measurement.t_micro, "dataloader_num_workers": 0}
    return replace(record, measurement=replace(record.measurement, facts={"loader": loader}))


def result_with(*records: TrialRecord, best: Any = WINNER, **fields: Any) -> TuneResult:
    base = make_result(records)
    return replace(base, best=estimates(records)[best.key()], **fields)


def test_a_loader_that_helped_is_a_line_with_its_gain_and_flags_to_copy() -> None:
    records = (waiting(0, (), 100.0, Role.SEARCH), waiting(1, WORKERS, 190.0, Role.LOADER))
    result = result_with(*records, best=records[1].config)
    line = loader_line(result)
    assert line is not None
    assert "50 % of the winner's time" in line
    assert "dataloader_num_workers=4, dataloader_pin_memory=False it is 1.90x as fast (100.0 samples/s without)" in line
    text = "\n".join(line.text for line in report_lines(result, 100))
    assert "Loader: waiting for data took 50 %" in text
    assert "--dataloader_num_workers 4" in text
    assert after_trials(result) == 1
    assert "1 on the winner's loader and evaluation" in text
    assert without_settings(records[1].config) == WINNER
    assert [w.code for w in of_loader(records[1].config, records)] == ["loader_late"]


def test_a_loader_that_nothing_helped_is_said_and_one_that_failed_has_its_cause() -> None:
    failed = make_record(2, WINNER.but(extra=WORKERS[:1]), role=Role.LOADER, reason=Reason.ERROR, message="RuntimeError: a lock")
    result = result_with(waiting(0, (), 100.0, Role.SEARCH), failed)
    line = loader_line(result)
    assert line is not None
    assert "none of the settings" not in line
    assert "dataloader_num_workers=4 did not work (see the warnings)" in line
    (warning,) = of_loader(WINNER, result.trials)
    assert warning.code == "loader_failed"
    assert warning.message.endswith("dataloader_num_workers=4: RuntimeError: a lock")
    assert "forked from the training" in (warning.next_step or "")
    assert failed.failure is not None
    refused = replace(failed, failure=replace(failed.failure, hint="open it at the first read"))
    assert of_loader(WINNER, [refused])[0].next_step == "the answer does without; open it at the first read"
    slower = waiting(1, WORKERS[1:], 99.0, Role.LOADER)
    assert "faster beyond the noise (dataloader_pin_memory=False); dataloader_num_workers=4 did not work" in (loader_line(result_with(*result.trials, slower)) or "")


@pytest.mark.parametrize(
    ("reason", "says"),
    [(Reason.OUT_OF_MEMORY, "did not fit"), (Reason.CRASH, "crashed"), (Reason.INTERRUPTED, "was not confirmed"), (None, "was not confirmed")],
)
def test_settings_that_were_faster_and_did_not_become_the_answer_are_said(reason: Reason | None, says: str) -> None:
    records = [waiting(0, (), 100.0, Role.SEARCH), waiting(1, WORKERS, 200.0, Role.LOADER)]
    if reason is not None:
        records.append(make_record(2, records[1].config, role=Role.CONFIRMATION, reason=reason))
    line = loader_line(result_with(*records))
    assert line is not None
    assert "it was 2.00x as fast, but" in line
    assert says in line
    assert "none of the settings" not in line
    (warning,) = of_loader(WINNER, records)
    assert warning.code == "loader_lost"
    assert "dataloader_num_workers=4, dataloader_pin_memory=False" in warning.message
    assert says in warning.message
    assert len(warning.message.splitlines()) == 1


def test_settings_that_were_faster_within_the_noise_only_are_no_loss() -> None:
    records = (waiting(0, (), 100.0, Role.SEARCH), waiting(1, WORKERS, 100.3, Role.LOADER))
    line = loader_line(result_with(*records))
    assert line is not None
    assert "none of the settings measured was faster beyond the noise (dataloader_num_workers=4 dataloader_pin_memory=False)" in line
    assert of_loader(WINNER, records) == []


def test_nothing_is_said_where_nothing_was_tried() -> None:
    result = result_with(waiting(0, (), 100.0, Role.SEARCH))
    assert after_lines(result) == []
    assert after_trials(result) == 0
    assert of_loader(WINNER, result.trials) == []
    assert of_evaluation(None) == []


def test_what_became_of_the_evaluation_is_one_line() -> None:
    def said(**fields: Any) -> str:
        return evaluation_line(Evaluation(asked=64, **fields)) or ""

    assert said(fits=64, peak_bytes=2 * GIB) == "Evaluation: per_device_eval_batch_size=64 fits too: 2.0 GiB with the training state."
    assert "does not fit, 24 does: 2.0 GiB" in said(fits=24, peak_bytes=2 * GIB)
    assert "only the loss kept" in said(fits=64, peak_bytes=2 * GIB, loss_only=True)
    assert "failed (see the warnings)" in said(failure="KeyError: 'text'")
    assert "does not fit, nor does any smaller" in said()


def test_the_answers_arguments_hold_what_evaluation_needs() -> None:
    pile = Pile(bytes_per_row=1e6, rows=5000, peak_bytes=10 * GIB, left_bytes=GIB, steps=7, fits=True)
    attempts = (make_record(5, at_batch(WINNER, 24), 100.0, role=Role.EVALUATION),)
    found = Evaluation(asked=64, fits=24, peak_bytes=MIB, pile=pile, advice="use them", attempts=attempts)
    result = result_with(waiting(0, (), 100.0, Role.SEARCH), evaluation=found)
    assert result.arguments["per_device_eval_batch_size"] == 24
    assert result.arguments["eval_accumulation_steps"] == 7
    assert after_trials(result) == 1
    assert TuneResult.from_json(result.to_json()).evaluation == found
    (warning,) = of_evaluation(found)
    assert (warning.code, warning.message) == ("evaluation_memory", "use them")


def test_every_trouble_of_an_evaluation_is_a_warning_of_its_own() -> None:
    attempts = (make_record(5, at_batch(WINNER, 32), role=Role.EVALUATION, reason=Reason.ERROR, message="boom"),)
    found = Evaluation(asked=64, advice="a", failure="boom", metric_error="ValueError: b", attempts=attempts)
    assert [w.code for w in of_evaluation(found)] == ["evaluation_memory", "evaluation_failed", "metrics_failed"]
    assert "per_device_eval_batch_size=32 and failed: boom" in of_evaluation(found)[1].message
