"""What is run on the winner when the search has ended, on a simulated device: loader, evaluation, budgets, interruptions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.evaluation import batch_of
from autofit.results.loader import without_settings
from autofit.search.epilogue import Epilogue, asked_batch
from autofit.search.epilogue import play as play_epilogue
from autofit.search.scene import Scene
from autofit.testing import simulated_landscape
from autofit.trials.observer import Silent
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import EVAL_BATCH, LOADER_KNOBS, Outcome, Reason, Role
from autofit.units import GIB
from tests.searching import Play, failed, prepare

LANDSCAPE = simulated_landscape(8)
WORKERS = LOADER_KNOBS[0]


@dataclass
class Device:
    """A device on which the loader takes `wait` seconds a batch, less with workers, and evaluation fits up to a batch.

    Attributes:
        wait: seconds per batch.
        fits: largest evaluation batch.
        instead: role -> what happens in the place of a trial in it.
    """

    wait: float = 0.0
    fits: int = 1 << 20
    instead: dict[str, Any] | None = None

    def __call__(self, request: TrialRequest, before: int) -> TrialResult:
        extra = dict(request.config.extra)
        kind = "evaluation" if request.evaluate else "loader" if WORKERS in extra else "search"
        happens = (self.instead or {}).get(kind)
        if isinstance(happens, TrialResult):
            return happens
        if happens is not None:
            raise happens
        if request.evaluate and int(extra[EVAL_BATCH] or 0) > self.fits:
            return failed(Reason.OUT_OF_MEMORY)
        base = TrialConfig.from_json({**request.config.but(extra=()).to_json()})
        result = ReplayRunner(LANDSCAPE).run(replace(request, config=base))
        if result.measurement is None:
            return result
        wait = self.wait / max(1, int(extra.get(WORKERS) or 1))
        loader = {**dict.fromkeys(LOADER_KNOBS), **extra, "wait_seconds": wait, "user_data": True}
        facts: dict[str, Any] = {"loader": loader}
        if request.evaluate:
            facts["evaluation"] = {"rows": 100, "batches": 3, "gathered_bytes_per_row": 8.0, "loss_only": True}
        measurement = replace(result.measurement, fetch_seconds=(wait,) * 8, facts=facts)
        return replace(result, measurement=measurement)


def afterwards(device: Device, *, asked: int | None = None, **terms: Any) -> tuple[Play, Epilogue]:
    played = prepare(LANDSCAPE, script=device, seconds=1.0, **terms)
    finding = played.run()
    scene = Scene(
        runner=played.runner,
        device=replace(LANDSCAPE.device, kind="cuda"),
        space=Space(configs=tuple(p.config for p in LANDSCAPE.points)),
        facts={},
    )
    spec = SearchSpec(workload=Workload(model="m"), effective_batch=8, eval_batch_size=asked)
    epilogue = play_epilogue(
        finding, search=played.search, study=played.study, scene=scene, spec=spec, limit_bytes=16 * GIB, observer=Silent()
    )
    return played, epilogue


def test_nothing_is_run_where_nothing_is_asked_for_and_the_loader_is_fast() -> None:
    played, epilogue = afterwards(Device())
    assert played.finding is not None
    assert epilogue.finding == played.finding
    assert epilogue.evaluation is None
    assert not played.asked(Role.LOADER, Role.EVALUATION)


def test_a_loader_that_holds_back_gets_workers_and_the_winner_is_confirmed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.epilogue.cores", lambda: 4)
    played, epilogue = afterwards(Device(wait=1.0))
    assert played.finding is not None
    winner = epilogue.finding.winner
    assert dict(winner.extra)[WORKERS] == 4
    assert without_settings(winner) == played.finding.winner
    assert epilogue.finding.confirmed
    last = played.records[-1]
    assert (last.role, last.config, last.outcome) == (Role.CONFIRMATION, winner, Outcome.COMPLETED)
    assert played.requests[-1].full_length
    assert epilogue.finding.seconds > played.finding.seconds


def test_a_winner_that_does_not_pass_with_workers_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.epilogue.cores", lambda: 2)
    device = Device(wait=1.0)

    def script(request: TrialRequest, before: int) -> TrialResult:
        late = request.full_length and WORKERS in dict(request.config.extra)
        return failed(Reason.OUT_OF_MEMORY) if late else device(request, before)

    played, epilogue = afterwards(script)  # type: ignore[arg-type]
    assert played.finding is not None
    assert epilogue.finding.winner == played.finding.winner


def test_settings_that_could_not_be_confirmed_in_time_are_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.epilogue.cores", lambda: 2)
    device = Device(wait=1.0)

    def script(request: TrialRequest, before: int) -> TrialResult:
        if request.full_length and WORKERS in dict(request.config.extra):
            raise KeyboardInterrupt
        return device(request, before)

    _, epilogue = afterwards(script)  # type: ignore[arg-type]
    assert [w.message for w in epilogue.warnings] == ["interrupted: the loader's settings that were faster were not confirmed"]


def test_evaluation_is_tried_until_it_fits() -> None:
    played, epilogue = afterwards(Device(fits=20), asked=64)
    assert epilogue.evaluation is not None
    assert [batch_of(r) for r in epilogue.evaluation.attempts] == [64, 32, 16, 24]
    assert epilogue.evaluation.fits == 16
    asked = [r for r in played.requests if r.evaluate]
    assert all(r.optimizer_steps == 2 for r in asked)
    assert all(r.memory_limit_bytes is not None for r in asked)


def test_evaluation_goes_with_the_loader_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.epilogue.cores", lambda: 2)
    _, epilogue = afterwards(Device(wait=1.0), asked=4)
    assert epilogue.evaluation is not None
    assert dict(epilogue.evaluation.attempts[0].config.extra) == {**dict(epilogue.finding.winner.extra), EVAL_BATCH: 4}


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.ERROR, Reason.CRASH])
def test_an_evaluation_that_fails_does_not_lose_the_answer(reason: Reason) -> None:
    played, epilogue = afterwards(Device(instead={"evaluation": failed(reason, "why it failed")}), asked=8)
    assert played.finding is not None
    assert epilogue.finding.winner == played.finding.winner
    assert epilogue.evaluation is not None
    assert epilogue.evaluation.failure == "why it failed"


@pytest.mark.parametrize(
    ("kind", "left"), [("loader", "the loader's settings were not all tried and evaluation was not tried"), ("evaluation", "evaluation was not tried")]
)
def test_an_interrupt_leaves_the_answer_of_the_search(kind: str, left: str) -> None:
    played, epilogue = afterwards(Device(wait=1.0, instead={kind: KeyboardInterrupt()}), asked=8)
    assert played.finding is not None
    assert epilogue.finding.confirmed
    assert not epilogue.finding.interrupted, "the search itself had ended"
    assert [w.message for w in epilogue.warnings] == [f"interrupted: {left}"]
    assert without_settings(epilogue.finding.winner) == played.finding.winner
    assert epilogue.evaluation is None


def test_a_trial_that_was_ended_from_outside_counts_as_an_interrupt() -> None:
    _, epilogue = afterwards(Device(instead={"evaluation": failed(Reason.INTERRUPTED)}), asked=8)
    assert [w.message for w in epilogue.warnings] == ["interrupted: evaluation was not tried"]
    assert epilogue.evaluation is None


def test_without_time_it_says_what_was_left_out() -> None:
    seconds = sum(r.seconds for r in afterwards(Device())[0].records)
    _, epilogue = afterwards(Device(), asked=8, timeout_seconds=seconds)
    assert epilogue.evaluation is None
    assert [w.code for w in epilogue.warnings] == ["cut_short"]
    assert "evaluation was not tried" in epilogue.warnings[0].message


@pytest.mark.parametrize("why", ["interrupted", "not confirmed"])
def test_an_answer_that_is_not_confirmed_says_that_its_evaluation_was_not_tried(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Play.run
    monkeypatch.setattr(Play, "run", lambda self: replace(run(self), confirmed=False, interrupted=why == "interrupted"))
    played, epilogue = afterwards(Device(), asked=8)
    assert not [r for r in played.records if r.role is Role.EVALUATION]
    (warning,) = epilogue.warnings
    assert "evaluation was not tried" in warning.message
    assert why in warning.message
    assert "--timeout" in (warning.next_step or "")
    assert afterwards(Device())[1].warnings == ()


def test_more_time_is_no_advice_where_the_confirmation_itself_failed() -> None:
    def script(request: TrialRequest, before: int) -> TrialResult:
        return failed(Reason.ERROR, "a bug") if request.full_length else Device()(request, before)

    _, epilogue = afterwards(script, asked=8)  # type: ignore[arg-type]
    assert not epilogue.finding.confirmed
    (warning,) = epilogue.warnings
    assert "the winner was not confirmed" in warning.message
    assert warning.next_step is None


def test_what_was_run_before_is_not_run_again(tmp_path: Any) -> None:
    first, before = afterwards(Device(wait=1.0, fits=4), asked=8, path=tmp_path / "study")
    second, after = afterwards(Device(wait=1.0, fits=4), asked=8, path=tmp_path / "study")
    assert second.requests == []
    assert second.records == first.records
    assert after.finding.winner == before.finding.winner
    assert after.evaluation == before.evaluation


def test_another_evaluation_batch_is_another_trial(tmp_path: Any) -> None:
    afterwards(Device(), asked=8, path=tmp_path / "study")
    second, epilogue = afterwards(Device(), asked=16, path=tmp_path / "study")
    assert [r.config for r in second.requests if r.evaluate] == [r.config for r in second.requests]
    assert epilogue.evaluation is not None
    assert epilogue.evaluation.fits == 16


def test_the_batch_is_asked_for_by_the_user_or_else_by_the_script() -> None:
    spec = SearchSpec(workload=Workload(model="m"), effective_batch=8)
    facts = {"model": {"script": {"evaluation": {"batch_size": 3, "data": "Rows of 5 rows"}}}}
    assert asked_batch(spec, facts) == (3, "Rows of 5 rows")
    assert asked_batch(replace(spec, eval_batch_size=7), facts) == (7, "Rows of 5 rows")
    assert asked_batch(spec, {"model": {"script": None}}) == (None, "the training data")
