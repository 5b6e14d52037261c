"""Recording a grid in rounds: what runs again, what is pooled, what is known without a run. The command is tested in `cli`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from autofit.errors import FileFormatError, SearchFailed, UserError
from autofit.problem.adaptation import adaptation_of
from autofit.problem.space import Space
from autofit.problem.spec import SearchSpec, Workload
from autofit.search.recording import (
    FAILURES_BEFORE_STOP,
    FAILURES_LATER,
    FAILURES_OF_A_KIND,
    GIVEN_UP,
    Recording,
    in_order,
    record_landscape,
)
from autofit.trials.landscape import Landscape
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Failure, Outcome, Reason
from tests.adversaries import CONTEXT, grid
from tests.refusals import refused

GRID = grid(effective_batch=8)
CONFIGS = tuple(point.config for point in GRID.points)


def recording_at(path: Path, limit: int | None = None) -> Recording:
    """An empty recording of the grid, to a file."""
    return Recording(
        path=path,
        device=GRID.device,
        described={"model": "m"},
        software={},
        request_of=partial(TrialRequest, memory_limit_bytes=limit),
    )


def recorded(path: Path, rounds: int, limit: int | None = None) -> tuple[Recording, list[str]]:
    """The whole grid after some rounds, and the labels of what was run or answered."""
    recording, runner, ran = recording_at(path, limit), ReplayRunner(GRID, seed=1), []
    for number, config in enumerate(in_order(CONFIGS, rounds, seed=0)):
        if recording.wants(config, number // len(CONFIGS) + 1):
            recording.run(config, runner)
            ran.append(config.label())
    return recording, ran


def test_every_configuration_runs_once_in_each_round(tmp_path: Path) -> None:
    recording, ran = recorded(tmp_path / "grid.json", rounds=3)
    assert len(ran) == 3 * len(CONFIGS)
    assert sorted(ran[: len(CONFIGS)]) == sorted(ran[len(CONFIGS) : 2 * len(CONFIGS)])
    assert {point.runs for point in recording.landscape().points} == {3}


def test_later_rounds_come_in_another_order() -> None:
    order = list(in_order(CONFIGS, 3, seed=0))
    first, second, third = (order[i * len(CONFIGS) : (i + 1) * len(CONFIGS)] for i in range(3))
    assert first != second != third
    assert set(first) == set(second) == set(third) == set(CONFIGS)


def test_samples_of_all_rounds_are_kept_and_the_file_has_them(tmp_path: Path) -> None:
    once, _ = recorded(tmp_path / "one.json", rounds=1)
    thrice, _ = recorded(tmp_path / "three.json", rounds=3)
    for one, three in zip(once.landscape().points, thrice.landscape().points):
        assert one.measurement is not None
        assert three.measurement is not None
        assert len(three.measurement.micro_step_seconds) == 3 * len(one.measurement.micro_step_seconds)
        assert three.measurement.memory.peak_reserved_bytes == one.measurement.memory.peak_reserved_bytes
    assert {p.runs for p in Landscape.load(tmp_path / "three.json").points} == {3}


def test_what_did_not_fit_is_not_run_again_and_what_needs_more_not_at_all(tmp_path: Path) -> None:
    needs = sorted(p.measurement.memory.peak_reserved_bytes or 0 for p in GRID.points if p.measurement is not None)
    limit = CONTEXT + needs[len(needs) // 2]
    recording, ran = recorded(tmp_path / "grid.json", rounds=2, limit=limit)
    points = recording.landscape().points
    misfits = [p for p in points if p.measurement is None]
    assert misfits
    assert len(ran) == 2 * (len(points) - len(misfits)) + len(misfits)


class Unsound(ReplayRunner):
    """Small batches lose their loss."""

    def run(self, request: TrialRequest) -> TrialResult:
        if request.config.per_device_train_batch_size > 2:
            return super().run(request)
        return TrialResult(outcome=Outcome.INFEASIBLE, failure=Failure(reason=Reason.NON_FINITE_LOSS, message="nan"))


def test_what_trains_unsoundly_is_left_out_and_rules_nothing_out(tmp_path: Path) -> None:
    recording, runner = recording_at(tmp_path / "grid.json"), Unsound(GRID)
    said = [recording.run(config, runner) for config in in_order(CONFIGS, 1, seed=0)]
    assert "left out: non finite loss" in said
    assert not any("out of memory" in text for text in said)
    kept = {p.config for p in recording.landscape().points}
    assert kept == {c for c in CONFIGS if c.per_device_train_batch_size > 2}


def test_a_recording_that_was_cut_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recording, runner = recording_at(tmp_path / "grid.json"), ReplayRunner(GRID)
    for config in CONFIGS[:3]:
        recording.run(config, runner)
    assert [recording.wants(config, 1) for config in CONFIGS[:4]] == [False, False, False, True]
    assert [recording.wants(config, 2) for config in CONFIGS[:4]] == [True] * 4
    assert recording.progress(len(CONFIGS), 2) == f"3 of {len(CONFIGS)} configurations are recorded, 0 of them in all 2 rounds"


class Without(ReplayRunner):
    """Some optimizers or precisions do not work here."""

    broken: ClassVar[tuple[str, ...]] = ()

    def run(self, request: TrialRequest) -> TrialResult:
        if {request.config.optim, str(request.config.precision)} & set(self.broken):
            return TrialResult(outcome=Outcome.FAILED, failure=Failure(reason=Reason.ERROR, message="no such kernel"))
        return super().run(request)


@pytest.mark.parametrize("name", ["optim", "precision"])
def test_an_optimizer_or_precision_that_does_not_work_costs_its_own_points_only(name: str, tmp_path: Path) -> None:
    first = next(in_order(CONFIGS, 1, seed=0))
    recording, runner, ran = recording_at(tmp_path / "grid.json"), Without(GRID), []
    values = sorted({str(getattr(config, name)) for config in CONFIGS}, key=lambda value: value == str(getattr(first, name)))
    runner.broken = (values[0],)  # type: ignore[misc]
    for config in in_order(CONFIGS, 1, seed=0):
        if recording.wants(config, 1):
            ran.append((config, recording.run(config, runner)))
    assert {p.config for p in recording.landscape().points} == {c for c in CONFIGS if str(getattr(c, name)) != values[0]}
    tries = [said for config, said in ran if str(getattr(config, name)) == values[0]]
    kinds = {c.but(per_device_train_batch_size=1, gradient_accumulation_steps=1) for c in CONFIGS if str(getattr(c, name)) == values[0]}
    assert len(tries) == FAILURES_OF_A_KIND * len(kinds)
    assert sum(GIVEN_UP in said for said in tries) == len(kinds)


def test_a_batch_size_that_fails_alone_does_not_cost_the_others(tmp_path: Path) -> None:
    class Alone(ReplayRunner):
        def run(self, request: TrialRequest) -> TrialResult:
            if request.config.per_device_train_batch_size == 1:
                return TrialResult(outcome=Outcome.FAILED, failure=Failure(reason=Reason.ERROR, message="more than one row"))
            return super().run(request)

    recording, runner = recording_at(tmp_path / "grid.json"), Alone(GRID)
    for config in in_order(CONFIGS, 1, seed=0):
        if recording.wants(config, 1):
            recording.run(config, runner)
    assert {p.config for p in recording.landscape().points} == {c for c in CONFIGS if c.per_device_train_batch_size > 1}


def test_batch_sizes_that_fail_do_not_cost_later_rounds_what_has_run(tmp_path: Path) -> None:
    class Small(ReplayRunner):
        def run(self, request: TrialRequest) -> TrialResult:
            if request.config.per_device_train_batch_size > 2:
                return TrialResult(outcome=Outcome.FAILED, failure=Failure(reason=Reason.TIMEOUT, message="took too long"))
            return super().run(request)

    recording, runner, rounds = recording_at(tmp_path / "grid.json"), Small(GRID), 3
    for number, config in enumerate(in_order(CONFIGS, rounds, seed=0)):
        if recording.wants(config, number // len(CONFIGS) + 1):
            recording.run(config, runner)
    runs = {p.config: p.runs for p in recording.landscape().points}
    assert runs == {c: rounds for c in CONFIGS if c.per_device_train_batch_size <= 2}


@pytest.mark.parametrize(("recorded_before", "most"), [(False, FAILURES_BEFORE_STOP), (True, FAILURES_LATER)])
def test_failures_in_a_row_end_the_recording_and_lose_nothing(recorded_before: bool, most: int, tmp_path: Path) -> None:
    recording, runner = recording_at(tmp_path / "grid.json"), ReplayRunner(GRID)
    if recorded_before:
        recording.run(CONFIGS[0], runner)
    foreign = [CONFIGS[0].but(optim=f"unknown{number}") for number in range(most)]
    for config in foreign[:-1]:
        assert "not in the landscape" in recording.run(config, runner)
    with pytest.raises(SearchFailed, match=f"{most} configurations failed in a row"):
        recording.run(foreign[-1], runner)
    assert (tmp_path / "grid.json").exists() == recorded_before


def test_no_time_for_any_configuration_is_not_a_failure_of_the_training(tmp_path: Path) -> None:
    with refused("too short to record", hint="--timeout"):
        recording_at(tmp_path / "grid.json").landscape()


def test_no_round_is_refused(tmp_path: Path) -> None:
    spec = SearchSpec(workload=Workload(model="bert-tiny"), effective_batch=8)
    with pytest.raises(UserError, match="rounds must be at least 1"):
        record_landscape(spec, tmp_path / "grid.json", rounds=0)


class Described:
    """A runner that is asked what there is, and nothing more."""

    facts: ClassVar[dict[str, Any]] = {"model": {"digest": "d", "task": "causal-lm", "seq_len": 8}, "software": {}, "device": GRID.device.to_json()}

    def __init__(self, *_: Any) -> None:
        self.context_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return self.facts


@pytest.mark.parametrize(
    ("recorded_as", "workload", "data", "what"),
    [
        ({}, {}, {"source": "a.csv", "digest": "1"}, "data"),
        ({"data": "a.csv 1"}, {}, {"source": "a.csv", "digest": "2"}, "data"),
        ({"data": "a.csv 1"}, {}, None, "data"),
        ({}, {"attn_implementation": "eager"}, None, "attention"),
        ({"attention": "eager"}, {}, None, "attention"),
        ({}, {"adaptation": adaptation_of(adapter="lora")}, None, "adaptation"),
    ],
)
def test_a_landscape_of_other_data_attention_or_adapter_is_not_gone_on_with(
    recorded_as: dict[str, Any], workload: dict[str, Any], data: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.search.recording.ProcessRunner", Described)
    monkeypatch.setitem(Described.facts["model"], "data", data)
    spec = {"model": "m", "digest": "d", "task": "causal-lm", "seq_len": 8, "effective_batch": 8, "memory_limit_bytes": None}
    path = tmp_path / "grid.json"
    replace(GRID, spec={**spec, **recorded_as}).save(path)
    before = path.read_bytes()
    with refused(f"is the landscape of another {what}", hint="--output", kind=FileFormatError):
        record_landscape(SearchSpec(workload=Workload(model="m", **workload), effective_batch=8, device="cpu"), path)
    assert path.read_bytes() == before


def test_a_recording_says_at_its_end_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class Here(Described, Without):
        broken = (CONFIGS[-1].optim,)

        def __init__(self, *_: Any) -> None:
            Without.__init__(self, GRID)
            self.context_bytes = 0

    monkeypatch.setattr("autofit.search.recording.ProcessRunner", Here)
    monkeypatch.setattr("autofit.search.recording.space_of", lambda *_: Space(configs=CONFIGS))
    said: list[str] = []
    record_landscape(SearchSpec(workload=Workload(model="m"), effective_batch=8, device="cpu"), tmp_path / "grid.json", say=said.append)
    works = sum(config.optim != CONFIGS[-1].optim for config in CONFIGS)
    assert said[-1] == f"{works} of {len(CONFIGS)} configurations are recorded; the same command tries the others again"


def test_a_replayed_trial_has_as_many_samples_as_one_run(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path / "grid.json", rounds=3)
    one = ReplayRunner(GRID).run(TrialRequest(config=CONFIGS[0])).measurement
    pooled = ReplayRunner(recording.landscape()).run(TrialRequest(config=CONFIGS[0])).measurement
    assert one is not None
    assert pooled is not None
    assert len(pooled.micro_step_seconds) == len(one.micro_step_seconds)
    assert pooled.optimizer_steps == one.optimizer_steps
