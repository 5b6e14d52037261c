"""The search on landscapes: what it runs and in which order, what it never runs, how it ends, and that a kill changes nothing."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from rich.console import Console

import autofit
from autofit.beliefs.predict import dominates
from autofit.cli import cli
from autofit.errors import NothingFits, SearchFailed, UserError
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec, Workload
from autofit.reports.report import render
from autofit.results.result import TuneResult, estimates
from autofit.search.baselines import plain_defaults
from autofit.search.conduct import FAILURES_ALIKE
from autofit.search.playoff import find_leaders
from autofit.search.tuning import run_search
from autofit.study.study import CONSTRAINT, RECORD
from autofit.testing import simulated_landscape
from autofit.trials.landscape import Landscape
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord
from autofit.units import GIB, MIB, format_bytes
from tests.builders import make_measurement
from tests.refusals import refused
from tests.searching import (
    BEFORE_PLAYOFF,
    SAMPLERS,
    Oracle,
    Play,
    Script,
    failed,
    fastest_that_fits,
    needed_bytes,
    play,
    prepare,
    speeds,
)
from tests.strategies import NAMED_BATCHES

GRID = simulated_landscape(64, optims=("adamw_torch_fused",))
LIMIT = 6 * GIB  #: of GRID's configurations about a third does not fit
EXHAUSTIVE = ("tpe", "random", "grid")
FUSED = "adamw_torch_fused"


def config(
    batch: int, precision: Precision = Precision.BF16, total: int = 64, **fields: object
) -> TrialConfig:
    return TrialConfig(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=total // batch,
        precision=precision,
        **fields,  # type: ignore[arg-type]
    )


def only_when(wanted: TrialConfig, *results: TrialResult) -> Script:
    """The first runs of `wanted` end like this."""
    left = list(results)

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        return left.pop(0) if left and request.config == wanted else None

    return script


def instant(config: TrialConfig) -> TrialResult:
    """A trial of `config` that is faster than any other."""
    measurement = make_measurement(config, 1e6, needed_bytes=GIB)
    return TrialResult(outcome=Outcome.COMPLETED, measurement=measurement, seconds=1.0)


def interrupted_at(number: int) -> Script:
    """Ctrl-C during trial `number`, counted from 0."""

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        if before == number:
            raise KeyboardInterrupt
        return None

    return script


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_baselines_come_first_then_the_search_then_the_playoff_then_the_confirmation(sampler: str) -> None:
    played = play(simulated_landscape(36, jitter=0.05), sampler=sampler)
    order = [r.role for r in played.records]
    stages = (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH, Role.PLAYOFF, Role.CONFIRMATION)
    assert order == sorted(order, key=stages.index)
    assert played.records[0].config == plain_defaults(36, FUSED)
    assert order[1] is Role.HAND_RECIPE
    assert order[-1] is Role.CONFIRMATION


def test_only_the_confirmation_runs_at_full_length() -> None:
    played = play(GRID, limit=LIMIT)
    assert [request.full_length for request in played.requests] == [
        record.role is Role.CONFIRMATION for record in played.records if record.outcome is not Outcome.SKIPPED
    ]
    assert played.finding is not None
    assert played.finding.confirmed
    assert played.requests[-1].config == played.finding.winner


def test_every_trial_has_the_limit_and_the_seed_of_the_search() -> None:
    played = play(GRID, limit=LIMIT, seed=7)
    assert {(r.memory_limit_bytes, r.seed) for r in played.requests} == {(LIMIT, 7)}


@pytest.mark.parametrize("sampler", ["auto", "grid"])
@pytest.mark.parametrize("largest", [1, 2, 4, 8, 16, 32, 64])
def test_the_hand_recipe_is_the_largest_power_of_two_that_fits(sampler: str, largest: int) -> None:
    needs = needed_bytes(GRID)
    played = play(GRID, sampler=sampler, limit=needs[config(largest)])
    assert played.finding is not None
    assert played.finding.hand_recipe == config(largest)
    tried = played.asked(Role.HAND_RECIPE)
    assert set(tried) <= {config(size) for size in (1, 2, 4, 8, 16, 32, 64)}
    misfits = [c for c in tried if needs[c] > needs[config(largest)]]
    halvings = {1: 5, 2: 4, 4: 3, 8: 2, 16: 1, 32: 1, 64: 0}
    assert len(misfits) <= halvings[largest], "a hand that starts at 32 and halves pays no less"


def test_the_hand_takes_fp16_where_bf16_is_not_native_and_fp32_where_neither_is() -> None:
    half = simulated_landscape(16, precisions=(Precision.FP32, Precision.FP16))
    assert {c.precision for c in play(half).asked(Role.HAND_RECIPE)} == {Precision.FP16}
    plain = play(simulated_landscape(16, precisions=(Precision.FP32,)))
    assert plain.finding is not None
    assert plain.finding.hand_recipe == config(16, Precision.FP32, total=16)


def test_a_hand_recipe_that_does_not_exist_is_none() -> None:
    needs = needed_bytes(GRID)
    limit = needs[config(1)] - 1  # checkpointing still fits
    played = play(GRID, limit=limit)
    assert played.finding is not None
    assert played.finding.hand_recipe is None


def test_a_baseline_outside_the_space_is_run_on_a_device_and_not_on_a_recording() -> None:
    narrow = simulated_landscape(64, precisions=(Precision.BF16,))
    inside = play(narrow)
    assert Role.DEFAULTS not in {r.role for r in inside.records}
    defaults = plain_defaults(64, FUSED)
    outside = play(narrow, baselines_outside_space=True, script=only_when(defaults, instant(defaults)))
    assert outside.records[0].config == defaults
    assert outside.records[0].role is Role.DEFAULTS
    assert outside.finding is not None
    assert outside.finding.winner.precision is Precision.BF16, "however fast it is, it was not asked for"
    assert defaults not in outside.finding.tied
    assert defaults not in outside.asked(Role.PLAYOFF)


def test_where_only_a_baseline_outside_the_space_fits_nothing_fits() -> None:
    narrow = simulated_landscape(64, precisions=(Precision.BF16,))
    defaults = plain_defaults(64, FUSED)
    prepared = prepare(
        narrow, limit=GIB, baselines_outside_space=True, script=only_when(defaults, instant(defaults))
    )
    with refused("no configuration fits", kind=NothingFits):
        prepared.run()


# -- laws -------------------------------------------------------------------------------------------------------------


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Landscape, int]:
    """A landscape and a limit under which at least one of its configurations fits."""
    landscape = simulated_landscape(
        draw(st.sampled_from((1, 7, 12, 36, 50, 64))),
        precisions=draw(st.sampled_from(((Precision.FP32,), (Precision.FP32, Precision.BF16)))),
        optims=draw(st.sampled_from(((FUSED,), (FUSED, "adafactor")))),
        checkpointing=draw(st.sampled_from(((False,), (False, True)))),
        parameters=draw(st.integers(10**6, 10**9)),
        activation_bytes=draw(st.integers(MIB, GIB)),
        seconds_per_sample=draw(st.floats(1e-4, 0.1)),
        launch_seconds=draw(st.floats(1e-4, 0.1)),
        update_seconds=draw(st.floats(1e-4, 0.1)),
        total_memory_bytes=64 * GIB,
        ruggedness=draw(st.sampled_from((0.0, 0.02, 0.3))),
        jitter=draw(st.sampled_from((0.0, 0.01, 0.1))),
        seed=draw(st.integers(0, 1000)),
    )
    needs = sorted(needed_bytes(landscape).values())
    return landscape, draw(st.integers(needs[0], max(needs[0] + 1, int(1.1 * needs[-1]))))


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=15)
@given(scene=scenes(), seed=st.integers(0, 3))
def test_the_laws_hold_on_any_landscape(sampler: str, scene: tuple[Landscape, int], seed: int) -> None:
    landscape, limit = scene
    played = play(landscape, limit=limit, sampler=sampler, seed=seed)
    check_product(played)
    check_nothing_runs_twice(played)
    check_winner(played, limit)


def check_product(played: Play) -> None:
    assert {r.config.effective_batch() for r in played.records} == {played.landscape.effective_batch}


def check_nothing_runs_twice(played: Play) -> None:
    ran = Counter(played.asked(*BEFORE_PLAYOFF))
    assert set(ran.values()) <= {1}
    later = played.asked(Role.PLAYOFF, Role.CONFIRMATION)
    assert len(played.requests) == len(ran) + len(later)
    assert set(later) <= set(ran)


def check_winner(played: Play, limit: int) -> None:
    assert played.finding is not None
    winner, needs = played.finding.winner, needed_bytes(played.landscape)
    assert needs[winner] <= limit
    assert any(r.config == winner and r.outcome is Outcome.COMPLETED for r in played.records)
    found = estimates(played.records)
    best = found[winner.key()]
    in_playoff = {leader.config: leader for leader in find_leaders(played.records)}
    assert winner in played.finding.tied
    for other in found.values():
        if other.config in played.finding.tied:
            assert other.memory.needed_bytes is not None
            assert best.memory.needed_bytes is not None
            as_fast = in_playoff[other.config].log_speed >= in_playoff[winner].log_speed
            assert not as_fast or best.memory.needed_bytes <= other.memory.needed_bytes, (
                f"{other.config.label()} is tied, ran no slower than {winner.label()}, and needs less memory"
            )
        else:
            slower = other.samples_per_second <= 1.01 * best.samples_per_second
            assert slower or other.interval.low <= best.interval.high, (
                f"{other.config.label()} beats {winner.label()}"
            )


@pytest.mark.parametrize("sampler", EXHAUSTIVE)
@pytest.mark.parametrize("limit", [3 * GIB, 4 * GIB, 6 * GIB, 16 * GIB])
def test_without_noise_a_sampler_that_tries_everything_finds_the_best(sampler: str, limit: int) -> None:
    played = play(GRID, sampler=sampler, limit=limit)
    assert played.finding is not None
    speed = speeds(GRID)
    assert speed[played.finding.winner] >= 0.99 * speed[fastest_that_fits(GRID, limit)]
    assert played.finding.stopped == "every configuration was run, or cannot fit"


@pytest.mark.parametrize("limit", [3 * GIB, 4 * GIB, 6 * GIB, 16 * GIB])
def test_the_cost_model_finds_it_in_a_fraction_of_the_trials(limit: int) -> None:
    played = play(GRID, limit=limit)
    assert played.finding is not None
    speed = speeds(GRID)
    assert speed[played.finding.winner] >= 0.99 * speed[fastest_that_fits(GRID, limit)]
    assert len(played.asked(*BEFORE_PLAYOFF)) <= len(GRID.points) // 2
    assert "untested" in played.finding.stopped
    assert played.finding.winner.label() in played.finding.stopped


@pytest.mark.parametrize("effective_batch", NAMED_BATCHES)
def test_the_product_is_exact_in_every_trial(effective_batch: int) -> None:
    played = play(simulated_landscape(effective_batch, activation_bytes=20 * MIB), trials=8)
    check_product(played)
    assert played.finding is not None
    winner = played.finding.winner
    assert winner.per_device_train_batch_size * winner.gradient_accumulation_steps == effective_batch


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_predicted_too_big_is_never_run(sampler: str) -> None:
    needs = needed_bytes(GRID)
    played = play(GRID, sampler=sampler, limit=LIMIT, memory=Oracle(needs))
    assert all(0.97 * needs[request.config] <= LIMIT for request in played.requests)
    check_winner(played, LIMIT)


def test_what_is_predicted_too_big_is_recorded_with_its_bytes() -> None:
    needs = needed_bytes(GRID)
    played = play(GRID, sampler="grid", limit=LIMIT, memory=Oracle(needs))
    skipped = {r.config: r for r in played.records if r.outcome is Outcome.SKIPPED}
    assert set(skipped) == {c for c in needs if int(0.98 * needs[c]) > LIMIT}
    for found, record in skipped.items():
        assert record.failure is not None
        assert record.failure.reason is Reason.PREDICTED_TOO_BIG
        assert record.predicted_bytes == needs[found]
        assert format_bytes(needs[found]) in record.failure.message
        assert format_bytes(LIMIT) in record.failure.message


def test_what_needs_no_less_than_one_that_did_not_fit_is_skipped_and_names_it() -> None:
    needs = needed_bytes(GRID)
    limit = needs[config(8, Precision.FP32)]
    played = play(GRID, sampler="grid", limit=limit, memory=Oracle(needs, factor=0.2))
    ran = set(played.asked(*BEFORE_PLAYOFF))
    skipped = [r for r in played.records if r.outcome is Outcome.SKIPPED]
    assert skipped
    for record in skipped:
        assert record.failure is not None
        assert record.failure.reason is Reason.DOMINATED
        assert record.predicted_bytes == int(0.2 * needs[record.config])
        assert needs[record.config] > limit
        assert any(c.label() in record.failure.message for c in ran if needs[c] > limit)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_out_of_memory_is_complete_with_a_violated_constraint_for_optuna(sampler: str) -> None:
    played = play(GRID, sampler=sampler, limit=needed_bytes(GRID)[plain_defaults(64, FUSED)] - 1)
    trials = {t.number: t for t in played.raw.get_trials(deepcopy=False)}
    misfits = [r for r in played.records if r.outcome is not Outcome.COMPLETED]
    assert misfits
    for record in played.records:
        trial = trials[record.number]
        assert trial.state is TrialState.COMPLETE
        assert trial.constraints == {CONSTRAINT: 1.0 if record in misfits else -1.0}
    assert all(t.state is TrialState.COMPLETE for t in trials.values())
    assert played.raw.best_trial.user_attrs[RECORD]["outcome"] == "completed"


def test_nothing_fits_says_by_how_much() -> None:
    needs = needed_bytes(GRID)
    for sampler, memory in itertools.product(("auto", "grid"), (None, Oracle(needs))):
        prepared = prepare(GRID, sampler=sampler, limit=GIB, memory=memory)
        with refused("no configuration fits into 1.0 GiB", hint="adafactor", kind=NothingFits) as caught:
            prepared.run()
        assert isinstance(caught.value, NothingFits)
        assert caught.value.shortfall_bytes == min(needs.values()) - GIB
        assert caught.value.exit_code == 3


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("reason", "runs"),
    [
        (Reason.CRASH, 2),
        (Reason.UNREADABLE_ANSWER, 2),
        (Reason.ERROR, 1),
        (Reason.TIMEOUT, 1),
        (Reason.UNSUPPORTED, 1),
        (Reason.NON_FINITE_LOSS, 1),
        (Reason.ALLOCATOR_THRASH, 1),
    ],
)
def test_only_crashes_and_unreadable_answers_are_tried_once_more(
    sampler: str, reason: Reason, runs: int
) -> None:
    bad = plain_defaults(36, FUSED)
    played = play(simulated_landscape(36), sampler=sampler, script=only_when(bad, *[failed(reason)] * 9))
    assert sum(request.config == bad for request in played.requests) == runs
    assert played.finding is not None
    assert played.finding.winner != bad


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_crash_that_does_not_come_back_costs_nobody_its_place(sampler: str) -> None:
    landscape = simulated_landscape(36)
    best = fastest_that_fits(landscape, 64 * GIB)
    played = play(landscape, sampler=sampler, script=only_when(best, failed(Reason.CRASH)))
    assert played.finding is not None
    assert speeds(landscape)[played.finding.winner] >= 0.99 * speeds(landscape)[best]
    assert sum(r.config == best and r.outcome is Outcome.FAILED for r in played.records) == 1


def test_a_baseline_that_crashed_once_still_counts() -> None:
    recipe = config(32, total=32)
    played = play(simulated_landscape(32), script=only_when(recipe, failed(Reason.CRASH)))
    assert played.asked(Role.HAND_RECIPE) == [recipe, recipe]
    assert played.finding is not None
    assert played.finding.hand_recipe == recipe


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_trials_that_all_fail_alike_end_the_search_with_one_traceback(sampler: str) -> None:
    def script(request: TrialRequest, before: int) -> TrialResult:
        message = f"the label encoder knows {before} classes"
        return failed(Reason.ERROR, message, traceback=f"Traceback: {message}")

    prepared = prepare(GRID, sampler=sampler, script=script)
    with refused(
        "all 3 trials failed alike: the label encoder", hint="traceback", kind=SearchFailed
    ) as caught:
        prepared.run()
    assert isinstance(caught.value, SearchFailed)
    assert caught.value.traceback == "Traceback: the label encoder knows 0 classes"
    assert len(prepared.requests) == FAILURES_ALIKE


def test_trials_that_fail_each_in_its_own_way_do_not_end_the_search() -> None:
    reasons = itertools.cycle((Reason.ERROR, Reason.TIMEOUT))
    landscape = simulated_landscape(4, optims=(FUSED,))
    prepared = prepare(
        landscape, script=lambda request, before: failed(next(reasons), f"{request.config.label()}")
    )
    with refused(f"all {len(landscape.points)} trials failed: ", kind=SearchFailed):
        prepared.run()
    assert len(prepared.requests) == len(landscape.points)


def test_one_trial_that_completes_is_an_answer_whatever_the_others_do() -> None:
    good = config(1, Precision.FP32, total=4, optim="adafactor")
    landscape = simulated_landscape(4)
    played = play(
        landscape,
        script=lambda request, before: None if request.config == good or before < 2 else failed(Reason.ERROR),
    )
    assert played.finding is not None
    assert not played.finding.interrupted


def test_crashes_count_as_alike_only_over_several_configurations() -> None:
    bad = plain_defaults(36, FUSED)
    recipe = config(4, total=36)
    crash = [failed(Reason.CRASH)] * 2
    first, second = only_when(bad, *crash), only_when(recipe, failed(Reason.CRASH))
    played = play(simulated_landscape(36), script=lambda r, n: first(r, n) or second(r, n))
    assert played.finding is not None


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("trials", [1, 3, 6])
def test_a_budget_of_trials_is_kept(sampler: str, trials: int) -> None:
    played = play(GRID, sampler=sampler, limit=8 * GIB, trials=trials)
    assert len(played.asked(*BEFORE_PLAYOFF)) <= trials
    assert played.finding is not None
    assert played.finding.confirmed, "the confirmation is not counted"
    assert "budget" in played.finding.stopped or sampler == "auto"


def test_a_budget_of_time_leaves_some_for_the_confirmation() -> None:
    played = play(GRID, sampler="grid", seconds=2.0, timeout_seconds=40.0)
    assert played.finding is not None
    assert played.finding.confirmed
    assert played.finding.stopped == "the 70 % for proposals of the time budget of 40.00 s are spent"
    assert len(played.asked(*BEFORE_PLAYOFF)) == 14, "70 % of the time"
    assert played.finding.seconds == played.clock.now <= 40.0


@pytest.mark.parametrize("timeout", [120.0, 200.0, 300.0])
def test_a_playoff_that_meets_the_end_of_its_time_leaves_some_for_the_confirmation(timeout: float) -> None:
    landscape = simulated_landscape(36, jitter=0.2, launch_seconds=0.0)
    played = play(landscape, sampler="grid", seconds=2.0, timeout_seconds=timeout)
    assert played.finding is not None
    assert played.clock.now <= timeout
    assert played.asked(Role.PLAYOFF)
    assert played.finding.confirmed


def test_no_trial_may_take_longer_than_the_time_that_is_left() -> None:
    played = play(GRID, sampler="grid", seconds=2.0, timeout_seconds=40.0, trial_timeout_seconds=30.0)
    limits = [request.timeout_seconds for request in played.requests]
    assert limits == [min(30.0, 40.0 - 2.0 * number) for number in range(len(limits))]


def test_a_trial_that_the_budget_cuts_off_is_no_failure_of_its_configuration(tmp_path: Path) -> None:
    first = play(GRID, sampler="grid", seconds=15.0, timeout_seconds=50.0, path=tmp_path / "study")
    assert first.finding is not None
    cut = [r for r in first.records if r.outcome is Outcome.FAILED]
    assert [r.interrupted for r in cut] == [True]
    assert not first.finding.interrupted
    again = play(GRID, sampler="grid", path=tmp_path / "study")
    assert any(r.config == cut[0].config and r.outcome is Outcome.COMPLETED for r in again.records)


def test_a_time_limit_of_one_trial_is_a_failure_of_that_trial() -> None:
    slow = plain_defaults(36, FUSED)

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        return failed(Reason.TIMEOUT, seconds=5.0) if request.config == slow else None

    played = play(simulated_landscape(36), script=script, trial_timeout_seconds=5.0, timeout_seconds=600.0)
    (record,) = [r for r in played.records if r.config == slow]
    assert record.failure is not None
    assert record.failure.reason is Reason.TIMEOUT
    assert {request.timeout_seconds for request in played.requests} == {5.0}


def test_a_confirmation_has_the_time_that_its_steps_are_known_to_take() -> None:
    """A bound for trials, which run two micro-steps at a time, would end it where the accumulation is long."""
    landscape, bound = simulated_landscape(36, seconds_per_sample=1.0), 5.0

    def script(request: TrialRequest, before: int) -> TrialResult:
        seconds = 3 * 36 / speeds(landscape)[request.config] if request.full_length else 1.0
        return replace(ReplayRunner(landscape).run(request), seconds=seconds)

    played = play(landscape, script=script, trial_timeout_seconds=bound)
    assert played.finding is not None
    assert played.finding.confirmed
    (confirmation,) = [r for r in played.records if r.role is Role.CONFIRMATION]
    assert confirmation.seconds > bound
    assert {request.timeout_seconds for request in played.requests if not request.full_length} == {bound}
    end = played.clock.now - 1.0
    cut = play(landscape, script=script, trial_timeout_seconds=bound, timeout_seconds=end)
    assert cut.clock.now <= end + 1.0, "the time budget still ends it"


def test_a_budget_within_which_nothing_completed_is_not_nothing_fits() -> None:
    limit = needed_bytes(GRID)[plain_defaults(64, FUSED)] - 1
    prepared = prepare(GRID, limit=limit, trials=1)
    with refused("budget of 1 trials is spent, and no trial completed", hint="--trials") as caught:
        prepared.run()
    assert caught.value.exit_code == UserError.exit_code


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("trials", [1, 2, 3])
def test_baselines_that_were_not_asked_for_leave_a_trial_for_what_was(sampler: str, trials: int) -> None:
    narrow = simulated_landscape(64, precisions=(Precision.BF16,), optims=("adafactor",))
    outside = {plain_defaults(64, FUSED), *(config(size) for size in (1, 2, 4, 8, 16, 32, 64))}
    played = play(
        narrow,
        sampler=sampler,
        trials=trials,
        baselines_outside_space=True,
        script=lambda request, _: instant(request.config) if request.config in outside else None,
    )
    assert played.finding is not None
    assert played.finding.winner.optim == "adafactor"
    ran = played.asked(*BEFORE_PLAYOFF)
    assert len(ran) <= trials
    assert sum(c in outside for c in ran) <= trials - 1


def test_what_completed_and_was_lost_again_is_not_said_to_be_a_baseline() -> None:
    script: Script = lambda request, _: failed(Reason.OUT_OF_MEMORY, "CUDA out of memory") if request.full_length else None  # noqa: E731
    prepared = prepare(GRID, script=script, trials=1)
    with refused("the only configuration that completed did not hold when run again or checked: 8x8 fp32 .*CUDA out of memory"):
        prepared.run()


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 8))
def test_an_interrupt_returns_the_best_so_far(number: int) -> None:
    played = play(GRID, sampler="grid", limit=LIMIT, script=interrupted_at(number))
    assert played.finding is not None
    assert played.finding.interrupted
    assert not played.finding.confirmed
    assert played.finding.stopped == "interrupted"
    assert len(played.requests) == number + 1, "nothing is run after it"
    check_winner(played, LIMIT)


def test_an_interrupt_that_the_runner_answers_is_one_too() -> None:
    def script(request: TrialRequest, before: int) -> TrialResult | None:
        return failed(Reason.INTERRUPTED) if before == 3 else None

    played = play(GRID, sampler="grid", script=script)
    assert played.finding is not None
    assert played.finding.interrupted
    assert len(played.requests) == 4


def test_an_interrupt_before_anything_completed_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(GRID, script=interrupted_at(0)).run()


@pytest.mark.parametrize("role", [Role.PLAYOFF, Role.CONFIRMATION])
def test_an_interrupt_late_in_the_search_returns_the_winner(role: Role) -> None:
    landscape = simulated_landscape(36, jitter=0.05, seed=3, launch_seconds=0.0)
    whole = play(landscape, sampler="grid")
    ran = [r for r in whole.records if r.outcome is not Outcome.SKIPPED]
    number = next(n for n, record in enumerate(ran) if record.role is role)
    played = play(landscape, sampler="grid", script=interrupted_at(number))
    assert played.finding is not None
    assert played.finding.interrupted
    assert not played.finding.confirmed
    assert played.finding.winner.key() in estimates(played.records)


def test_interrupted_trials_cost_no_budget_and_are_no_failures(tmp_path: Path) -> None:
    path = tmp_path / "study"
    for _ in range(FAILURES_ALIKE + 1):
        with pytest.raises(KeyboardInterrupt):
            prepare(GRID, sampler="grid", path=path, script=interrupted_at(0)).run()
    played = play(GRID, sampler="grid", path=path, trials=5)
    ran = [r for r in played.records if r.role in BEFORE_PLAYOFF and not r.interrupted]
    assert len(ran) == 5
    assert ran[0].role is Role.DEFAULTS
    assert ran[1].role is Role.HAND_RECIPE


# -- play-off and confirmation ----------------------------------------------------------------------------------------


def test_a_playoff_runs_the_leaders_in_turn() -> None:
    landscape = simulated_landscape(36, jitter=0.1, launch_seconds=0.0)
    played = play(landscape, sampler="grid")
    rounds = played.asked(Role.PLAYOFF)
    assert rounds
    size = len(dict.fromkeys(rounds[:5]))
    first = [config for config in rounds if config in rounds[:size]]  # who comes in later catches up in between
    assert len(first) >= 2 * size
    assert first[:size] == first[size : 2 * size][::-1]


def test_a_playoff_in_which_every_run_fails_still_has_a_winner() -> None:
    landscape = simulated_landscape(36, jitter=0.1, launch_seconds=0.0)
    ran: Counter[TrialConfig] = Counter()

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        ran[request.config] += 1
        again = ran[request.config] > 1 and not request.full_length
        return failed(Reason.TIMEOUT, seconds=0.0) if again else None

    played = play(landscape, sampler="grid", script=script)
    assert played.finding is not None
    assert played.finding.confirmed
    assert len(played.asked(Role.PLAYOFF)) >= 4, "each leader may fail twice"


def test_a_playoff_in_which_a_leader_does_not_fit_takes_it_out() -> None:
    landscape = simulated_landscape(36, jitter=0.1, launch_seconds=0.0)
    whole = play(landscape, sampler="grid")
    lost = whole.asked(Role.PLAYOFF)[0]
    ran: Counter[TrialConfig] = Counter()

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        ran[request.config] += 1
        return failed(Reason.OUT_OF_MEMORY) if request.config == lost and ran[lost] > 1 else None

    played = play(landscape, sampler="grid", script=script)
    assert ran[lost] == 2
    assert played.finding is not None
    assert played.finding.winner != lost
    assert lost not in played.finding.tied


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_winner_that_does_not_fit_at_full_length_makes_place_for_the_next(sampler: str) -> None:
    best = fastest_that_fits(GRID, 16 * GIB)

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        return failed(Reason.OUT_OF_MEMORY) if request.full_length and request.config == best else None

    played = play(GRID, sampler=sampler, script=script)
    assert played.finding is not None
    assert played.finding.confirmed
    speed = {c: s for c, s in speeds(GRID).items() if c != best}
    assert played.finding.winner != best
    assert speed[played.finding.winner] >= 0.98 * max(speed.values()), (
        "the search goes on where its certainty is gone"
    )
    assert played.asked(Role.CONFIRMATION)[0] == best


def test_a_search_that_lost_its_winner_and_has_no_trial_left_does_not_say_that_nothing_beats_it() -> None:
    landscape = simulated_landscape(64)
    fresh = play(landscape)
    searched = sum(r.role in (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH) for r in fresh.records)
    lost: list[TrialConfig] = []

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        if not request.full_length or lost:
            return None
        lost.append(request.config)
        return failed(Reason.OUT_OF_MEMORY)

    played = play(landscape, script=script, trials=searched)
    assert lost
    assert played.finding.winner != lost[0]
    assert f"beat {lost[0].label()} " not in played.finding.stopped
    assert "budget" in played.finding.stopped


@pytest.mark.parametrize("losses", [3, 5])
def test_as_many_winners_are_confirmed_as_it_takes(losses: int) -> None:
    played = prepare(GRID, script=lambda request, _: failed(Reason.OUT_OF_MEMORY) if request.full_length and lost() < losses else None)

    def lost() -> int:
        return sum(r.outcome is Outcome.INFEASIBLE for r in played.records)

    finding = played.run()
    assert finding.confirmed
    assert played.asked(Role.CONFIRMATION)[-1] == finding.winner
    assert len(played.asked(Role.CONFIRMATION)) == losses + 1


def test_confirmations_that_never_pass_end_with_the_time_and_an_answer_that_is_not_confirmed() -> None:
    played = play(
        GRID, script=lambda request, _: failed(Reason.OUT_OF_MEMORY) if request.full_length else None, seconds=2.0, timeout_seconds=40.0
    )
    assert played.finding is not None
    assert not played.finding.confirmed
    assert "before the winner was confirmed" in played.finding.stopped or "nothing was left" in played.finding.stopped
    assert played.finding.winner not in played.asked(Role.CONFIRMATION)


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.ERROR])
def test_a_confirmation_that_fails_for_another_reason_leaves_the_winner_unconfirmed(reason: Reason) -> None:
    played = play(GRID, script=lambda request, _: failed(reason) if request.full_length else None)
    assert played.finding is not None
    assert not played.finding.confirmed
    assert played.asked(Role.CONFIRMATION) == [played.finding.winner]


def test_a_winner_that_crashes_again_where_it_is_confirmed_makes_place_for_the_next() -> None:
    best = fastest_that_fits(GRID, 16 * GIB)
    played = play(GRID, script=lambda request, _: failed(Reason.CRASH) if request.full_length and request.config == best else None)
    assert played.finding is not None
    assert played.finding.confirmed
    assert played.finding.winner != best
    assert played.asked(Role.CONFIRMATION) == [best, best, played.finding.winner]
    assert f"beat {best.label()} " not in played.finding.stopped


def test_where_every_confirmation_crashes_the_search_does_not_try_them_all() -> None:
    played = play(GRID, script=lambda request, _: failed(Reason.CRASH) if request.full_length else None)
    assert played.finding is not None
    assert not played.finding.confirmed
    assert len(played.asked(Role.CONFIRMATION)) == 2 * FAILURES_ALIKE
    assert "crashed where they were confirmed" in played.finding.stopped


def test_a_confirmation_that_crashed_once_is_run_again() -> None:
    crashes = [failed(Reason.CRASH)]
    played = play(GRID, script=lambda request, _: crashes.pop() if request.full_length and crashes else None)
    assert played.finding is not None
    assert played.finding.confirmed
    assert played.asked(Role.CONFIRMATION) == [played.finding.winner] * 2


@pytest.mark.parametrize("seed", [3, 8, 10])
@pytest.mark.parametrize("reason", [Reason.OUT_OF_MEMORY, Reason.CRASH, Reason.NON_FINITE_LOSS])
def test_a_leader_that_is_lost_in_the_playoff_reopens_the_search(seed: int, reason: Reason) -> None:
    landscape = simulated_landscape(
        64, precisions=(Precision.BF16, Precision.FP16, Precision.FP32), optims=(FUSED,), jitter=0.02, update_seconds=0.0005,
        launch_seconds=0.03, seconds_per_sample=0.002, seed=seed, total_memory_bytes=80 * GIB,
    )  # fmt: skip

    def large(found: TrialConfig) -> bool:
        return found.per_device_train_batch_size >= 32 and not found.gradient_checkpointing

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        again = any(r.config == request.config for r in played.records)
        return failed(reason, seconds=1.0) if large(request.config) and again else None

    played = prepare(landscape, script=script, seed=seed, memory=Oracle(needed_bytes(landscape)))
    finding = played.run()
    lost = [r for r in played.records if r.role is Role.PLAYOFF and r.outcome is not Outcome.COMPLETED]
    assert lost
    left = {c: speed for c, speed in speeds(landscape).items() if not large(c)}
    assert finding.confirmed
    assert left[finding.winner] >= 0.95 * max(left.values())
    assert not any(f"beat {r.config.label()} " in finding.stopped for r in lost), "what was lost is no best"
    certificate = played.study.sampler.certificate(played.records)  # type: ignore[attr-defined]
    assert certificate is not None
    assert finding.stopped == certificate.statement


def test_a_certificate_that_lost_its_ground_is_not_repeated() -> None:
    played = play(GRID)
    assert played.finding is not None
    searched = played.finding.stopped
    played.search._trials.reject(played.finding.winner, Failure(reason=Reason.OUT_OF_MEMORY, message="out of memory"), "a later run")
    stopped = played.search._finding(False).stopped
    assert stopped != searched
    assert "may still be faster" in stopped or f"beat {played.finding.winner.label()} " not in stopped


@pytest.mark.parametrize("seed", range(4))
def test_the_winner_is_the_one_that_was_confirmed_also_when_that_took_more_memory(seed: int) -> None:
    landscape = simulated_landscape(
        36, jitter=0.1, launch_seconds=0.0, seed=seed, activation_bytes=MIB, precisions=(Precision.BF16,), checkpointing=(False,)
    )
    replay = ReplayRunner(landscape)

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        result = replay.run(request)
        if not request.full_length or result.measurement is None:
            return result
        memory = result.measurement.memory
        larger = replace(memory, peak_reserved_bytes=int(1.02 * (memory.peak_reserved_bytes or 0)))
        return replace(result, measurement=replace(result.measurement, memory=larger))

    played = play(landscape, sampler="grid", script=script)
    assert played.finding is not None
    assert played.finding.confirmed
    assert played.asked(Role.CONFIRMATION) == [played.finding.winner]


@pytest.mark.parametrize("how", ["out of time", "interrupted"])
def test_who_takes_the_place_of_an_unsound_winner_is_not_confirmed_by_it(how: str) -> None:
    def check(winner: TrialConfig, records: Sequence[TrialRecord], left: float | None) -> Failure | None:
        if winner.precision is not Precision.BF16:
            return None
        played.clock.now = 399.5 if how == "out of time" else played.clock.now
        return Failure(reason=Reason.DEPARTS_FROM_FP32, message="bf16 departs from fp32")

    def script(request: TrialRequest, before: int) -> TrialResult | None:
        if how == "interrupted" and request.full_length and request.config.precision is not Precision.BF16:
            raise KeyboardInterrupt
        return None

    played = prepare(GRID, seconds=10.0, timeout_seconds=400.0, script=script, check=check)
    finding = played.run()
    assert finding.winner.precision is not Precision.BF16
    assert not finding.confirmed
    assert finding.interrupted == (how == "interrupted")


def test_when_nothing_survives_its_confirmation_nothing_fits() -> None:
    landscape = simulated_landscape(1, precisions=(Precision.FP32,), optims=(FUSED,), checkpointing=(False,))
    prepared = prepare(
        landscape, script=lambda request, _: failed(Reason.OUT_OF_MEMORY) if request.full_length else None
    )
    with refused("no configuration fits", kind=NothingFits):
        prepared.run()


# -- resuming ---------------------------------------------------------------------------------------------------------


def history(played: Play) -> list[tuple[TrialConfig, Role, Outcome]]:
    return [(r.config, r.role, r.outcome) for r in played.records if not r.interrupted]


@pytest.mark.parametrize("sampler", ["auto", "grid"])
def test_an_interrupted_search_goes_the_way_it_would_have_gone(sampler: str, tmp_path: Path) -> None:
    landscape = simulated_landscape(6, optims=(FUSED,), activation_bytes=320 * MIB)
    whole = play(landscape, sampler=sampler, limit=3 * GIB)
    assert whole.finding is not None
    for number in range(1, len(whole.requests)):
        path = tmp_path / f"study-{number}"
        with contextlib.suppress(KeyboardInterrupt):  # nothing had completed
            prepare(landscape, sampler=sampler, limit=3 * GIB, path=path, script=interrupted_at(number)).run()
        again = play(landscape, sampler=sampler, limit=3 * GIB, path=path)
        assert again.finding is not None
        assert history(again) == history(whole)
        assert again.finding.winner == whole.finding.winner
        assert again.finding.confirmed
        assert len(again.requests) == len(whole.requests) - number, "nothing is run again"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_cut_at_any_byte_ends_with_the_same_answer(sampler: str, tmp_path: Path) -> None:
    landscape = simulated_landscape(12, precisions=(Precision.BF16,), optims=(FUSED,))
    whole = play(landscape, sampler=sampler, limit=3 * GIB, path=tmp_path / "whole")
    assert whole.finding is not None
    data = (tmp_path / "whole").read_bytes()
    for part in range(1, 6):
        path = tmp_path / f"part-{part}"
        path.write_bytes(data[: len(data) * part // 6])
        again = play(landscape, sampler=sampler, limit=3 * GIB, path=path)
        assert again.finding is not None
        assert again.finding.winner == whole.finding.winner
        check_winner(again, 3 * GIB)
        ran = Counter(
            r.config for r in again.records if r.role in BEFORE_PLAYOFF and r.outcome is Outcome.COMPLETED
        )
        assert set(ran.values()) <= {1}


@pytest.mark.parametrize(("first", "second"), itertools.permutations(SAMPLERS, 2))
def test_another_sampler_may_go_on_with_a_study(first: str, second: str, tmp_path: Path) -> None:
    path = tmp_path / "study"
    begun = play(GRID, sampler=first, limit=LIMIT, path=path, script=interrupted_at(5))
    again = play(GRID, sampler=second, limit=LIMIT, path=path)
    assert again.finding is not None
    assert [r.config for r in again.records[:5]] == [r.config for r in begun.records[:5]]
    assert not {r.config for r in begun.records if not r.interrupted} & {
        request.config for request in again.requests[: len(again.asked(*BEFORE_PLAYOFF)) - 6]
    }
    speed = speeds(GRID)
    assert speed[again.finding.winner] >= 0.99 * speed[fastest_that_fits(GRID, LIMIT)]


def test_a_finished_search_is_answered_from_its_record(tmp_path: Path) -> None:
    first = play(GRID, limit=LIMIT, path=tmp_path / "study")
    again = play(GRID, limit=LIMIT, path=tmp_path / "study")
    assert again.requests == []
    assert first.finding is not None
    assert again.finding is not None
    assert again.finding.winner == first.finding.winner
    assert again.finding.confirmed
    assert again.finding.seconds == pytest.approx(sum(r.seconds for r in first.records))


def test_a_limit_of_trials_counts_those_of_earlier_searches(tmp_path: Path) -> None:
    play(GRID, sampler="grid", path=tmp_path / "study", trials=4)
    more = play(GRID, sampler="grid", path=tmp_path / "study", trials=7)
    assert len(more.asked(*BEFORE_PLAYOFF)) == 7
    assert sum(not request.full_length for request in more.requests) >= 3


def test_messages_are_one_line_each() -> None:
    played = play(GRID, sampler="grid", limit=LIMIT)
    for record in played.records:
        if record.failure is not None:
            assert re.fullmatch(r"[^\n]+", record.failure.message)


# -- the answer -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer() -> TuneResult:
    """A result of every kind of trial: completed, out of memory, skipped, tied."""
    spec = SearchSpec(
        workload=Workload(model="simulated"), effective_batch=64, memory_limit_bytes=4 * GIB, sampler="tpe"
    )
    return run_search(spec, landscape=simulated_landscape(64, jitter=0.02), predict=False)


def test_the_result_survives_its_file(answer: TuneResult, tmp_path: Path) -> None:
    answer.save(tmp_path / "best.json")
    assert autofit.load(tmp_path / "best.json") == answer
    assert {r.outcome for r in answer.trials} >= {Outcome.COMPLETED, Outcome.INFEASIBLE}


def test_show_prints_the_same_report_from_the_file(answer: TuneResult, tmp_path: Path) -> None:
    answer.save(tmp_path / "best.json")
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "best.json")])
    assert shown.exit_code == 0, shown.output
    expected = io.StringIO()
    render(answer, Console(file=expected, width=80))
    assert shown.stdout == expected.getvalue()
    assert answer.best.config.label() in shown.stdout


@pytest.mark.parametrize("form", ["json", "python", "cli"])
def test_export_names_what_was_found(answer: TuneResult, tmp_path: Path, form: str) -> None:
    answer.save(tmp_path / "best.json")
    printed = CliRunner().invoke(cli, ["export", str(tmp_path / "best.json"), "--format", form])
    assert printed.exit_code == 0, printed.output
    assert f"{answer.best.config.per_device_train_batch_size}" in printed.stdout
    assert "bf16" in printed.stdout


def test_a_replayed_answer_says_that_nothing_was_run(answer: TuneResult) -> None:
    assert answer.best.config.effective_batch() == 64
    assert answer.confirmed
    (warning,) = [w for w in answer.warnings if w.code == "replayed"]
    assert "modelled" in warning.message
    assert answer.speedup["defaults"] is not None
    assert answer.speedup["defaults"] > 1
    assert answer.cost.trials == sum(
        r.role in BEFORE_PLAYOFF and r.outcome is not Outcome.SKIPPED for r in answer.trials
    )


def test_same_seed_same_answer() -> None:
    landscape = simulated_landscape(36, jitter=0.05)
    spec = SearchSpec(workload=Workload(model="simulated"), effective_batch=36, seed=5)
    first, second = (run_search(spec, landscape=landscape, predict=False) for _ in range(2))
    assert first.trials == second.trials
    assert first.best == second.best


@given(st.sampled_from(NAMED_BATCHES), st.integers(0, 5), st.floats(0, 0.2))
@settings(max_examples=10)
def test_a_simulated_landscape_is_a_function_of_its_arguments(total: int, seed: int, jitter: float) -> None:
    first, second = (simulated_landscape(total, seed=seed, jitter=jitter, ruggedness=0.1) for _ in range(2))
    assert first == second
    assert {p.config.effective_batch() for p in first.points} == {total}
    needs = needed_bytes(first)
    for one, other in itertools.permutations(needs, 2):
        if dominates(one, other):
            assert needs[one] >= needs[other]
