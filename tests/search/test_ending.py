"""What is said when a search has no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofit.beliefs.predict import dominates
from autofit.errors import NothingFits, SearchFailed, UserError
from autofit.problem.config import Precision
from autofit.search.ending import (
    alike,
    all_failed,
    nothing_completed,
    nothing_fits,
    search_failed,
    shortfall,
    signature,
)
from autofit.trials.trial import OUTSIDE, SCRIPT_PHASE, Failure, Reason, Role, TrialRecord
from autofit.units import GIB, MIB
from tests.builders import make_config, make_record

ONE, TWO = make_config(8), make_config(16)
HALF = make_config(8, precision=Precision.BF16)


def missing(number: int, requested_bytes: int | None) -> TrialRecord:
    record = make_record(number, ONE, reason=Reason.OUT_OF_MEMORY)
    assert record.failure is not None
    return replace(record, failure=replace(record.failure, requested_bytes=requested_bytes))


def test_messages_that_differ_in_their_numbers_only_are_alike() -> None:
    first, second = (
        make_record(n, ONE, reason=Reason.ERROR, message=f"index {n} of 30522 is bad") for n in (1, 2)
    )
    assert alike([first, second])
    assert not alike([first, make_record(3, TWO, reason=Reason.ERROR, message="no such column")])
    assert not alike([first, make_record(3, TWO, reason=Reason.CRASH, message="index 1 of 30522 is bad")])
    assert signature(Failure(reason=Reason.CRASH, message="7")) == ("crash", "#")


def test_trials_that_were_skipped_or_interrupted_are_no_failures() -> None:
    error = make_record(0, ONE, reason=Reason.ERROR)
    others = [make_record(1, TWO, reason=Reason.DOMINATED), make_record(2, TWO, reason=Reason.INTERRUPTED)]
    assert all_failed([error, *others]) == [error]
    assert all_failed(others) == []
    assert all_failed([error, make_record(3, TWO, 10.0)]) == []
    assert all_failed([error, make_record(3, TWO, reason=Reason.OUT_OF_MEMORY)]) == []


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (["boom"], "the only trial failed: boom"),
        (["boom 1", "boom 2"], "all 2 trials failed alike: boom 1"),
        (["boom", "bang"], "all 2 trials failed: boom"),
    ],
)
def test_a_search_that_failed_says_how_many_and_the_first(messages: list[str], says: str) -> None:
    records = [make_record(n, ONE, reason=Reason.ERROR, message=text) for n, text in enumerate(messages)]
    assert str(search_failed(records)) == says


def test_what_every_trial_refused_is_the_mistake_of_the_user() -> None:
    refusal = Failure(reason=Reason.ERROR, message="the model has an adapter already", refused=True, hint="leave it out")
    records = [replace(make_record(n, ONE, reason=Reason.ERROR), failure=refusal) for n in range(2)]
    error = search_failed(records)
    assert type(error) is UserError
    assert (error.message, error.hint) == (refusal.message, "leave it out")
    assert TrialRecord.from_json(records[0].to_json()) == records[0]
    assert type(search_failed([*records, make_record(3, ONE, reason=Reason.ERROR, message="other")])) is SearchFailed


def test_a_knob_that_the_users_code_decides_is_not_cured_by_other_configurations() -> None:
    error = search_failed([make_record(n, ONE, reason=Reason.KNOB_WITHOUT_EFFECT, message="asked for 1, the run had 4") for n in range(2)])
    assert str(error.hint).startswith("something else than the arguments decides it")


def test_a_time_out_has_another_remedy_than_a_traceback() -> None:
    error = search_failed([make_record(0, ONE, reason=Reason.TIMEOUT)])
    assert error.hint is not None
    assert "--trial-timeout" in error.hint
    assert isinstance(error, SearchFailed)
    assert error.traceback == ""
    slow = search_failed([make_record(0, ONE, reason=Reason.TIMEOUT, phase=SCRIPT_PHASE)])
    assert str(slow.hint).startswith("the script takes longer than that before it trains")


def test_the_shortfall_is_the_smallest_that_is_predicted_else_the_smallest_that_was_seen() -> None:
    records = [missing(0, 300 * MIB), missing(1, 200 * MIB), missing(2, None)]
    assert shortfall(records, limit_bytes=GIB, predicted_bytes=[3 * GIB, 2 * GIB]) == GIB
    assert shortfall(records, limit_bytes=GIB, predicted_bytes=[GIB // 2]) == 200 * MIB, "it did not fit, whatever was predicted"
    assert shortfall(records, limit_bytes=GIB, predicted_bytes=[]) == 200 * MIB
    assert shortfall([missing(0, None)], limit_bytes=GIB, predicted_bytes=[]) is None
    error = nothing_fits(records, effective_batch=64, limit_bytes=GIB, predicted_bytes=[])
    assert str(error) == "no configuration fits into 1.0 GiB at effective batch 64"
    assert error.shortfall_bytes == 200 * MIB


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.CRASH, Reason.TIMEOUT])
def test_a_training_that_fails_where_it_would_fit_is_not_a_lack_of_memory(reason: Reason) -> None:
    records = [
        make_record(0, ONE, reason=Reason.OUT_OF_MEMORY),
        make_record(1, HALF, reason=reason, message="expected mat1 and mat2 to have the same dtype"),
    ]
    error = nothing_completed(
        records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[]
    )
    assert isinstance(error, SearchFailed)
    assert str(error) == "no trial completed: 1 did not fit into 1.0 GiB, 1 failed: expected mat1 and mat2 to have the same dtype"


@pytest.mark.parametrize("reason", [Reason.UNSUPPORTED, Reason.CRASH, Reason.ERROR])
def test_what_fails_beside_baselines_that_were_not_asked_for_is_not_a_lack_of_memory(reason: Reason) -> None:
    records = [make_record(0, ONE, 10.0, why=OUTSIDE), make_record(1, HALF, reason=reason, message="asked for 'bf16', the run had 'fp32'")]
    error = nothing_completed(records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[])
    assert isinstance(error, SearchFailed)
    assert str(error) == "no trial completed but baselines that were not asked for: 1 failed: asked for 'bf16', the run had 'fp32'"
    assert "--precision" in (error.hint or "")


def test_trials_that_completed_and_were_lost_again_are_told_as_that() -> None:
    records = [
        make_record(0, ONE, 10.0),
        make_record(1, ONE, reason=Reason.OUT_OF_MEMORY, role=Role.CONFIRMATION, message="CUDA out of memory"),
        make_record(2, HALF, reason=Reason.ERROR, message="boom"),
    ]
    given = {"stopped": "the time is spent", "effective_batch": 64, "limit_bytes": GIB, "predicted_bytes": []}
    for left in (0, 3):
        said = str(nothing_completed(records, left=left, **given))  # type: ignore[arg-type]
        assert "the only configuration that completed did not hold when run again or checked" in said
        assert "CUDA out of memory" in said
        assert "not asked for" not in said
    records += [make_record(3, HALF, 10.0), make_record(4, HALF, reason=Reason.DEPARTS_FROM_FP32, role=Role.CONFIRMATION, message="departs")]
    assert "none of the 2 configurations that completed held" in str(nothing_completed(records, left=3, **given))  # type: ignore[arg-type]


def test_what_all_but_such_baselines_refused_is_the_mistake_of_the_user() -> None:
    refusal = Failure(reason=Reason.ERROR, message="Own makes fp16=False of fp16=True", refused=True, hint="let it be")
    records = [make_record(0, ONE, 10.0), replace(make_record(1, HALF, reason=Reason.ERROR), failure=refusal)]
    error = nothing_completed(records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[])
    assert (type(error), str(error)) == (UserError, refusal.message)


def test_what_fits_and_trains_unsoundly_is_not_a_lack_of_memory() -> None:
    records = [
        make_record(0, TWO, reason=Reason.OUT_OF_MEMORY),
        make_record(1, ONE, 10.0),
        make_record(2, ONE, reason=Reason.DEPARTS_FROM_FP32, message="bf16 is 21 % off"),
    ]
    error = nothing_completed(records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[])
    assert isinstance(error, SearchFailed)
    assert str(error) == "no configuration that fits into 1.0 GiB trains soundly: bf16 is 21 % off"


def test_a_time_out_of_what_needs_more_than_one_that_did_not_fit_is_a_lack_of_memory() -> None:
    records = [make_record(0, ONE, reason=Reason.OUT_OF_MEMORY), make_record(1, TWO, reason=Reason.TIMEOUT)]
    assert dominates(TWO, ONE)
    error = nothing_completed(records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[])
    assert isinstance(error, NothingFits)


@pytest.mark.parametrize("reason", [Reason.UNSUPPORTED, Reason.INTERRUPTED, Reason.DOMINATED])
def test_what_could_not_have_fitted_hides_no_lack_of_memory(reason: Reason) -> None:
    records = [make_record(0, ONE, reason=Reason.OUT_OF_MEMORY), make_record(1, TWO, reason=reason)]
    error = nothing_completed(
        records, stopped="", left=0, effective_batch=64, limit_bytes=GIB, predicted_bytes=[]
    )
    assert isinstance(error, NothingFits)
