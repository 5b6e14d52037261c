"""A trial record is consistent in itself, survives JSON, and refuses what is no record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Measurement
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord
from tests.refusals import refused
from tests.strategies import FAILED_REASONS, INFEASIBLE_REASONS, SKIPPED_REASONS, trial_records

CONFIG = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
MEASURED = Measurement(micro_step_seconds=(0.5,))
FAILURE = Failure(reason=Reason.OUT_OF_MEMORY, message="out of memory")


@given(trial_records())
def test_a_record_survives_json(record: TrialRecord) -> None:
    assert TrialRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record


@given(trial_records())
def test_a_record_has_a_speed_exactly_when_it_completed(record: TrialRecord) -> None:
    completed = record.outcome is Outcome.COMPLETED
    assert (record.samples_per_second is not None) == completed
    assert (record.interval is not None) == completed


def test_the_speed_is_the_formulas_at_the_configurations_own_accumulation() -> None:
    record = TrialRecord(number=0, config=CONFIG, outcome=Outcome.COMPLETED, measurement=MEASURED)
    assert record.samples_per_second == pytest.approx(8.0)
    assert record.interval is not None
    assert not record.interval.known, "one sample shows no spread"
    twice = replace(record, measurement=replace(MEASURED, micro_step_seconds=MEASURED.micro_step_seconds * 2))
    assert twice.interval is not None
    assert twice.interval.low == twice.interval.high == pytest.approx(8.0)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETED])
def test_a_trial_that_did_not_complete_has_a_failure_and_no_measurement(outcome: Outcome) -> None:
    with refused("^a trial record has a failure exactly when it did not complete$"):
        TrialRecord(number=0, config=CONFIG, outcome=outcome)
    with refused("^a trial record has a measurement exactly when it completed$"):
        TrialRecord(number=0, config=CONFIG, outcome=outcome, measurement=MEASURED, failure=FAILURE)


def test_a_trial_that_completed_has_a_measurement_and_no_failure() -> None:
    with refused("^a trial record has a measurement exactly when it completed$"):
        TrialRecord(number=0, config=CONFIG, outcome=Outcome.COMPLETED)
    with refused("^a trial record has a failure exactly when it did not complete$"):
        TrialRecord(number=0, config=CONFIG, outcome=Outcome.COMPLETED, measurement=MEASURED, failure=FAILURE)


GOOD = TrialRecord(number=0, config=CONFIG, outcome=Outcome.INFEASIBLE, failure=FAILURE).to_json()


@pytest.mark.parametrize(
    "data",
    [
        *({key: value for key, value in GOOD.items() if key != missing} for missing in GOOD),
        {**GOOD, "outcome": "won"},
        {**GOOD, "role": "leading"},
        {**GOOD, "seconds": "long"},
        {**GOOD, "seconds": None},
        {**GOOD, "failure": "out of memory"},
        {**GOOD, "failure": {"reason": "gremlins", "message": ""}},
        {**GOOD, "failure": {"message": "no reason"}},
        {**GOOD, "failure": {"reason": "error", "message": "", "colour": "red"}},
        [],
        None,
        "record",
    ],
)
def test_json_that_is_no_record_is_refused(data: Any) -> None:
    with refused("^not a trial record: "):
        TrialRecord.from_json(data)


def test_a_record_with_a_broken_part_is_refused_by_that_part() -> None:
    with refused("^a configuration lacks optim$"):
        TrialRecord.from_json({**GOOD, "config": {k: v for k, v in GOOD["config"].items() if k != "optim"}})
    with refused("^not a measurement: "):
        TrialRecord.from_json({**GOOD, "outcome": "completed", "failure": None, "measurement": {"joules": 1}})
    with refused("^a trial record has a failure exactly when it did not complete$"):
        TrialRecord.from_json({**GOOD, "failure": None})


def test_every_reason_belongs_to_one_outcome() -> None:
    groups = (INFEASIBLE_REASONS, SKIPPED_REASONS, FAILED_REASONS)
    assert sorted(r for group in groups for r in group) == sorted(Reason)
