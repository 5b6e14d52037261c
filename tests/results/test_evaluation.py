"""Whether evaluation fits: what is tried next, what piles up, and what is advised."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.results.evaluation import (
    Evaluation,
    at_batch,
    batch_of,
    conclude,
    eval_batch_of,
    next_batch,
    pile_up,
)
from autofit.trials.trial import EVAL_BATCH, Reason, Role, TrialRecord
from autofit.units import GIB, MIB
from tests.builders import make_config, make_record

WINNER = make_config(8, extra=(("dataloader_num_workers", 2),))
FACTS: dict[str, Any] = {
    "batch": 32,
    "batches": 3,
    "rows": 10_000,
    "gathered_bytes_per_row": 100_000.0,
    "loss_only": False,
    "concatenates": True,
    "accumulation_steps": None,
    "metric_error": None,
}


def attempt(batch: int, *, reason: Reason | None = None, needed: int = 10 * GIB, **facts: Any) -> TrialRecord:
    config = at_batch(WINNER, batch)
    if reason is not None:
        return make_record(9, config, role=Role.EVALUATION, reason=reason, message="it broke")
    found = make_record(9, config, 100.0, role=Role.EVALUATION, needed_bytes=needed)
    assert found.measurement is not None
    return replace(found, measurement=replace(found.measurement, facts={"evaluation": {**FACTS, "batch": batch, **facts}}))


def walk(asked: int, largest: int) -> list[TrialRecord]:
    """All attempts where `largest` rows fit."""
    attempts: list[TrialRecord] = []
    while (batch := next_batch(attempts, asked)) is not None:
        assert batch not in [batch_of(r) for r in attempts]
        attempts.append(attempt(batch, reason=None if batch <= largest else Reason.OUT_OF_MEMORY))
    return attempts


@given(st.integers(1, 4096), st.integers(0, 5000))
def test_the_walk_ends_with_what_fits_and_wastes_at_most_a_third(asked: int, largest: int) -> None:
    attempts = walk(asked, largest)
    found = conclude(attempts, asked=asked, limit_bytes=16 * GIB, on_cpu=False)
    best = min(asked, largest)
    assert len(attempts) <= asked.bit_length() + 2
    if best == 0:
        assert found.fits is None
        assert found.advice is not None
    else:
        assert found.fits is not None
        assert found.fits <= best
        assert found.fits >= best / 1.5 or found.fits >= best - 1
        if best == asked:
            assert found.fits == asked
            assert len(attempts) == 1


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.TIMEOUT, Reason.CRASH])
def test_a_failure_that_is_not_memory_ends_the_walk_and_is_said(reason: Reason) -> None:
    attempts = [attempt(64, reason=Reason.OUT_OF_MEMORY), attempt(32, reason=reason)]
    assert next_batch(attempts, 64) is None
    found = conclude(attempts, asked=64, limit_bytes=GIB, on_cpu=False)
    assert found.fits is None
    assert found.failure == "it broke"
    assert found.must_change == {}


def test_what_fits_is_kept_where_a_later_attempt_fails() -> None:
    attempts = [attempt(64, reason=Reason.OUT_OF_MEMORY), attempt(32), attempt(48, reason=Reason.ERROR)]
    found = conclude(attempts, asked=64, limit_bytes=16 * GIB, on_cpu=False)
    assert (found.fits, found.failure) == (32, "it broke")
    assert found.must_change == {EVAL_BATCH: 32}


def test_a_walk_that_was_cut_short_does_not_say_more_than_it_knows() -> None:
    attempts = [attempt(64, reason=Reason.OUT_OF_MEMORY), attempt(32, reason=Reason.OUT_OF_MEMORY)]
    found = conclude(attempts, asked=64, limit_bytes=16 * GIB, on_cpu=False)
    assert found.advice is not None
    assert "use less than 32" in found.advice
    one = conclude([*attempts, attempt(1, reason=Reason.OUT_OF_MEMORY)], asked=64, limit_bytes=16 * GIB, on_cpu=False)
    assert one.advice is not None
    assert "not even one row" in one.advice


def test_an_evaluation_batch_goes_beside_other_settings_and_replaces_an_earlier_one() -> None:
    config = at_batch(at_batch(WINNER, 32), 16)
    assert dict(config.extra) == {"dataloader_num_workers": 2, EVAL_BATCH: 16}


# -- what piles up ----------------------------------------------------------------------------------------------------


def test_results_that_fit_need_nothing() -> None:
    pile = pile_up(bytes_per_row=8.0, rows=1000, batch=8, left_bytes=GIB)
    assert pile.fits
    assert pile.steps is None
    assert pile.peak_bytes == 16_000  # old and new tensor at once


def test_results_that_do_not_fit_are_moved_away_in_time() -> None:
    # 30522 logits of 4 bytes at 128 positions: 15.6 MB a row
    pile = pile_up(bytes_per_row=30522 * 4 * 128, rows=5000, batch=16, left_bytes=4 * GIB)
    assert pile.fits
    assert pile.steps == int(4 * GIB * 0.8 / (30522 * 4 * 128 * 16 * 2))
    assert pile.peak_bytes == 30522 * 4 * 128 * 5000 * 2


@given(
    size=st.floats(0.0, 1e9),
    rows=st.integers(1, 10**6),
    batch=st.integers(1, 512),
    left=st.integers(-GIB, 64 * GIB),
    concatenates=st.booleans(),
    steps=st.none() | st.integers(1, 1000),
)
def test_the_steps_that_are_advised_fit_and_the_advice_does_not_repeat_itself(
    size: float, rows: int, batch: int, left: int, concatenates: bool, steps: int | None
) -> None:
    terms: dict[str, Any] = {"bytes_per_row": size, "rows": rows, "batch": batch, "left_bytes": left, "concatenates": concatenates}
    pile = pile_up(**terms, accumulation_steps=steps)
    if pile.steps is not None:
        again = pile_up(**terms, accumulation_steps=pile.steps)
        assert again.fits
        assert again.steps is None
        assert again.peak_bytes <= pile.peak_bytes
    elif pile.fits:
        assert pile.peak_bytes <= max(0, left)
    on_cpu = pile_up(**terms, accumulation_steps=steps, moves_away=False)
    assert on_cpu.steps is None


def test_a_list_of_batches_takes_half_of_what_concatenation_takes() -> None:
    terms: dict[str, Any] = {"bytes_per_row": 1000.0, "rows": 1000, "batch": 8, "left_bytes": GIB}
    assert pile_up(**terms).peak_bytes == 2 * pile_up(**terms, concatenates=False).peak_bytes


# -- advice -----------------------------------------------------------------------------------------------------------


def test_advice_names_batch_and_accumulation_steps_and_the_arguments_hold_them() -> None:
    attempts = [attempt(64, reason=Reason.OUT_OF_MEMORY), attempt(32, rows=100_000), attempt(48, reason=Reason.OUT_OF_MEMORY)]
    found = conclude(attempts, asked=64, limit_bytes=12 * GIB, on_cpu=False)
    assert found.pile is not None
    steps = found.pile.steps
    assert steps is not None
    assert found.must_change == found.arguments == {EVAL_BATCH: 32, "eval_accumulation_steps": steps}
    assert found.advice is not None
    assert "use per_device_eval_batch_size=32" in found.advice
    assert f"use eval_accumulation_steps={steps}" in found.advice


def test_on_a_cpu_moving_results_does_not_help_and_the_advice_says_what_does() -> None:
    found = conclude([attempt(32, rows=100_000)], asked=32, limit_bytes=12 * GIB, on_cpu=True)
    assert found.must_change == {}
    assert found.arguments == {EVAL_BATCH: 32}
    assert found.advice is not None
    assert "preprocess_logits_for_metrics" in found.advice


@pytest.mark.parametrize("facts", [{"rows": None}, {"gathered_bytes_per_row": None}, {"rows": 0}])
def test_nothing_is_said_of_results_that_are_not_known(facts: dict[str, Any]) -> None:
    found = conclude([attempt(32, **facts)], asked=32, limit_bytes=12 * GIB, on_cpu=False)
    assert found.pile is None
    assert found.advice is None


def test_what_the_trial_itself_had_gathered_counts_once() -> None:
    found = conclude([attempt(32, needed=10 * GIB)], asked=32, limit_bytes=10 * GIB + 200 * MIB, on_cpu=False)
    assert found.pile is not None
    assert found.pile.left_bytes == 200 * MIB + 2 * 3 * 32 * 100_000


def test_it_survives_json() -> None:
    attempts = [attempt(64, reason=Reason.OUT_OF_MEMORY), attempt(32, rows=100_000, metric_error="ValueError: no")]
    found = conclude(attempts, asked=64, limit_bytes=12 * GIB, on_cpu=False)
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_batch_is_that_of_the_users_arguments_where_there_is_data() -> None:
    class Arguments:
        per_device_eval_batch_size = 5

    assert eval_batch_of(Arguments(), [1]) == 5
    assert eval_batch_of(None, [1]) == 8
    assert eval_batch_of(Arguments(), None) is None
