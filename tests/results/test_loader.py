"""The walk over the loader's settings: what is tried, in which order, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from autofit.problem.config import Scalar, TrialConfig
from autofit.results.loader import (
    LoaderStep,
    gain,
    kept_settings,
    lost_settings,
    next_step,
    wait_share,
    window_seconds,
)
from autofit.trials.trial import LOADER_KNOBS, Failure, Outcome, Reason, Role, TrialRecord
from tests.builders import make_config, make_record

WINNER = make_config(8)
MICRO_SECONDS = 0.05  #: in a walk, whatever the loader does
Settings = Mapping[str, Scalar]
BASE: dict[str, Any] = {
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "wait_seconds": 0.5,
    "first_seconds": 1.0,
    "rows": 100_000,
    "user_data": True,
}


def run(config: TrialConfig, speed: float, role: Role = Role.SEARCH, *, micro_seconds: float | None = None, **facts: Any) -> TrialRecord:
    found = make_record(1, config, speed, role=role, micro_seconds=micro_seconds)
    assert found.measurement is not None
    loader = {**BASE, **{k: v for k, v in config.extra if k in LOADER_KNOBS}, **facts}
    return replace(found, measurement=replace(found.measurement, facts={"loader": loader}))


def walk(
    speed_of: Callable[[Settings], float | None], *, cores: int = 8, cuda: bool = False, **facts: Any
) -> tuple[list[Settings], LoaderStep]:
    """All settings that are tried where each has a speed (None: it fails), and the end of the walk; only the waiting differs."""
    facts = {"micro_seconds": MICRO_SECONDS, **facts}
    records = [run(WINNER, speed_of({}) or 1.0, **facts)]
    tried: list[Settings] = []
    while True:
        step = next_step(WINNER, records, cores=cores, cuda=cuda, tolerance=0.01)
        if step.next is None:
            return tried, step
        settings = dict(kept_settings(step.next))
        assert settings not in tried
        tried.append(settings)
        speed = speed_of(settings)
        if speed is None:
            records.append(make_record(2, step.next, role=Role.LOADER, reason=Reason.ERROR, message="pickling"))
        else:
            wait = facts.get("wait_of", lambda s: 0.5)(settings)
            records.append(run(step.next, speed, Role.LOADER, **{**facts, "wait_seconds": wait}))


WORKERS, PINNED, PREFETCH, PERSISTENT = LOADER_KNOBS


def test_workers_are_doubled_up_to_the_processors_while_they_help() -> None:
    tried, step = walk(lambda s: 10.0 * max(1, int(s.get(WORKERS, 0) or 0)) - bool(s.get(PREFETCH)), cores=8)
    assert [s[WORKERS] for s in tried[:3]] == [2, 4, 8]
    assert tried[3] == {WORKERS: 8, PREFETCH: 4}
    assert step.kept == ((WORKERS, 8),)
    assert step.best == WINNER.but(extra=((WORKERS, 8),))


def test_workers_that_do_not_help_end_it() -> None:
    tried, step = walk(lambda s: 10.0)
    assert tried == [{WORKERS: 2}]
    assert step.limits
    assert step.best == WINNER


def test_a_setting_whose_trial_was_interrupted_is_tried_again() -> None:
    cut = run(WINNER.but(extra=((WORKERS, 2),)), 1.0, Role.LOADER)
    cut = replace(cut, outcome=Outcome.FAILED, measurement=None, failure=Failure(reason=Reason.INTERRUPTED, message="interrupted"))
    start = run(WINNER, 10.0)
    first, again = (next_step(WINNER, records, cores=8, cuda=False, tolerance=0.01) for records in ([start], [start, cut]))
    assert first.next is not None
    assert again.next == first.next


def test_a_gain_below_the_tolerance_is_not_kept() -> None:
    assert walk(lambda s: 10.05 if s else 10.0)[1].best == WINNER


def test_a_loader_that_fails_with_workers_is_left_as_it_is() -> None:
    tried, step = walk(lambda s: None if s else 10.0)
    assert tried == [{WORKERS: 2}]
    assert step.best == WINNER


def test_of_one_sample_nothing_is_faster_until_the_confirmation_says_how_much_it_scatters() -> None:
    def sampled(record: TrialRecord, samples: int) -> TrialRecord:
        assert record.measurement is not None
        one = {name: getattr(record.measurement, name)[:samples] for name in ("micro_step_seconds", "fetch_seconds", "update_seconds")}
        return replace(record, measurement=replace(record.measurement, **one))

    fast = WINNER.but(extra=((WORKERS, 2),))
    alike = {"micro_seconds": MICRO_SECONDS}
    records = [sampled(run(WINNER, 10.0, **alike), 1), run(fast, 20.0, Role.LOADER, wait_seconds=0.0, **alike)]
    assert next_step(WINNER, records, cores=2, cuda=False, tolerance=0.01).best == WINNER
    assert lost_settings(WINNER, records) is None
    records.append(run(WINNER, 10.0, Role.CONFIRMATION, **alike))
    assert next_step(WINNER, records, cores=2, cuda=False, tolerance=0.01).best == fast


def test_a_machine_that_has_become_faster_is_no_gain_of_the_loader() -> None:
    """All of the step is shorter, the micro-steps too, which no loader makes shorter."""
    fast = WINNER.but(extra=((WORKERS, 2),))
    records = [run(WINNER, 10.0), run(fast, 20.0, Role.LOADER)]
    assert next_step(WINNER, records, cores=2, cuda=False, tolerance=0.01).best == WINNER
    assert lost_settings(WINNER, records) is None
    both = run(fast, 40.0, Role.LOADER, micro_seconds=records[1].measurement.t_micro / 2)  # type: ignore[union-attr]
    records = [run(WINNER, 10.0, micro_seconds=records[1].measurement.t_micro), both]  # type: ignore[union-attr]
    assert next_step(WINNER, records, cores=2, cuda=False, tolerance=0.01).best == fast
    assert gain(fast, records) == pytest.approx(2.0), "of four times as fast"


def test_nothing_more_is_tried_once_the_loader_does_not_hold_back() -> None:
    tried, step = walk(lambda s: 30.0 if s else 10.0, wait_of=lambda s: 0.0001)
    assert tried == [{WORKERS: 2}]
    assert step.kept == ((WORKERS, 2),)


def test_pinning_is_tried_on_a_card_where_the_user_switched_it_off() -> None:
    speed = lambda s: 10.0 + 5 * bool(s.get(PINNED))  # noqa: E731
    tried, step = walk(speed, cuda=True, dataloader_pin_memory=False)
    assert tried == [{WORKERS: 2}, {PINNED: True}]
    assert step.kept == ((PINNED, True),)
    assert {PINNED: True} not in walk(speed, cuda=True)[0]
    assert {PINNED: True} not in walk(speed, cuda=False, dataloader_pin_memory=False)[0]


def test_workers_stay_alive_where_starting_them_costs_a_share_of_an_epoch() -> None:
    # 10000 rows at 20 a second: an epoch of 500 s; 1 s of start is nothing, 50 s are something
    speed = lambda s: 20.0 if s.get(WORKERS) else 10.0  # noqa: E731
    assert (PERSISTENT, True) not in walk(speed, cores=2, rows=10_000)[1].kept
    tried, step = walk(speed, cores=2, rows=10_000, first_seconds=50.0)
    assert tried[-1] == {WORKERS: 2, PERSISTENT: True}
    assert step.kept == ((WORKERS, 2), (PERSISTENT, True))


@pytest.mark.parametrize(
    "facts",
    [{"user_data": False}, {"wait_seconds": 0.0005}, {"wait_seconds": None}, {"wait_seconds": 0.0}],
    ids=str,
)
def test_nothing_is_tried_where_the_loader_is_not_the_users_or_does_not_hold_back(facts: dict[str, Any]) -> None:
    tried, step = walk(lambda s: 10.0, **facts)
    assert tried == []
    assert not step.limits
    assert step.best == WINNER


def test_a_wait_is_judged_by_its_share_too() -> None:
    fast, slow = run(WINNER, 1.0, wait_seconds=0.02), run(WINNER, 1000.0, wait_seconds=0.02)
    assert wait_share(fast) < 0.1 < wait_share(slow)
    assert not next_step(WINNER, [fast], cores=2, cuda=False, tolerance=0.01).limits
    assert next_step(WINNER, [slow], cores=2, cuda=False, tolerance=0.01).limits


def test_the_users_own_workers_are_where_it_starts() -> None:
    tried, _ = walk(lambda s: 10.0 + int(s.get(WORKERS, 0) or 0), cores=8, dataloader_num_workers=2)
    assert tried[0] == {WORKERS: 4}


def test_a_stream_that_each_worker_would_give_whole_gets_none() -> None:
    tried, step = walk(lambda s: 10.0 + int(s.get(WORKERS, 0) or 0), repeats=True)
    assert (tried, step.best, step.limits) == ([], WINNER, True)


def test_a_winner_without_a_word_on_its_loader_is_left_alone() -> None:
    step = next_step(WINNER, [make_record(1, WINNER, 10.0)], cores=8, cuda=False, tolerance=0.01)
    assert step == LoaderStep(best=WINNER)


def test_a_slow_loader_is_measured_for_longer() -> None:
    assert window_seconds(WINNER, [run(WINNER, 1000.0)]) == 2.0
    assert 2.0 < window_seconds(WINNER, [run(WINNER, 10.0)]) <= 8.0
    assert window_seconds(WINNER, [run(WINNER, 0.1)]) == 8.0


def test_records_of_the_walk_say_nothing_of_the_space() -> None:
    assert run(WINNER, 10.0, Role.LOADER).after_search
    assert run(WINNER.but(extra=((WORKERS, 2),)), 10.0, Role.CONFIRMATION).after_search
    assert not run(WINNER, 10.0, Role.CONFIRMATION).after_search
