"""What the sampler proposes lies in the space, what is told is what Optuna should know of it, and a kill loses nothing finished."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import StudyError
from autofit.problem.config import Precision
from autofit.problem.space import Capabilities, Space, build_space
from autofit.study.study import CONSTRAINT, RECORD, TrialStudy
from autofit.trials.trial import Outcome, Reason, Role, TrialRecord
from tests.builders import make_config, make_record
from tests.refusals import refused
from tests.strategies import trial_records
from tests.studies import SPACE, journal_bytes, numberless, opened, opened_trials

ONE = SPACE.configs[0]


@pytest.fixture
def raw() -> optuna.Study:
    """Optuna's side of the study."""
    return opened(None)


@pytest.fixture
def study(raw: optuna.Study) -> TrialStudy:
    """Ours."""
    return TrialStudy(raw, SPACE)


def only(raw: optuna.Study) -> FrozenTrial:
    (trial,) = raw.get_trials(deepcopy=False)
    return trial


def test_what_is_proposed_lies_in_the_space(study: TrialStudy) -> None:
    for _ in range(30):
        proposal = study.ask()
        assert proposal.config in SPACE
        study.drop(proposal)


@pytest.mark.parametrize("config", SPACE.configs, ids=lambda config: config.label())
def test_what_was_enqueued_is_proposed_next(study: TrialStudy, config: object) -> None:
    assert config in SPACE.configs
    study.enqueue(SPACE.configs[SPACE.configs.index(config)])  # type: ignore[arg-type]
    assert study.ask().config == config


def test_a_completed_trial_is_told_its_speed_and_that_it_fits(raw: optuna.Study, study: TrialStudy) -> None:
    study.enqueue(ONE)
    record = study.tell(study.ask(), make_record(99, ONE, 123.0))
    trial = only(raw)
    assert trial.state is TrialState.COMPLETE
    assert trial.value == pytest.approx(123.0)
    assert trial.constraints == {CONSTRAINT: -1.0}
    assert record.number == trial.number == 0
    assert TrialRecord.from_json(trial.user_attrs[RECORD]) == record


@pytest.mark.parametrize("reason", [Reason.OUT_OF_MEMORY, Reason.NON_FINITE_LOSS, Reason.DOMINATED])
def test_what_does_not_fit_is_complete_with_a_violated_constraint(
    raw: optuna.Study, study: TrialStudy, reason: Reason
) -> None:
    study.enqueue(ONE)
    study.tell(study.ask(), make_record(0, ONE, reason=reason))
    trial = only(raw)
    assert (trial.state, trial.value, trial.constraints) == (TrialState.COMPLETE, 0.0, {CONSTRAINT: 1.0})


@pytest.mark.parametrize("reason", [Reason.CRASH, Reason.TIMEOUT, Reason.ERROR, Reason.INTERRUPTED])
def test_a_bug_is_told_as_failed_and_says_nothing_of_memory(
    raw: optuna.Study, study: TrialStudy, reason: Reason
) -> None:
    study.enqueue(ONE)
    study.tell(study.ask(), make_record(0, ONE, reason=reason))
    assert (only(raw).state, only(raw).constraints) == (TrialState.FAIL, {})
    assert study.known(ONE) is None, "a failed trial may be run again"


def test_a_configuration_is_known_by_its_first_record_that_did_not_fail(study: TrialStudy) -> None:
    assert study.known(ONE) is None
    for speed in (None, 10.0, 20.0):
        study.enqueue(ONE)
        reason = Reason.CRASH if speed is None else None
        study.tell(study.ask(), make_record(0, ONE, speed, reason=reason))
    known = study.known(ONE)
    assert known is not None
    assert known.number == 1


@pytest.mark.parametrize(("speed", "value", "constraint"), [(10.0, 10.0, -1.0), (None, 0.0, 1.0)])
def test_a_repeat_is_answered_with_what_is_known_and_makes_no_record(
    raw: optuna.Study, study: TrialStudy, speed: float | None, value: float, constraint: float
) -> None:
    reason = Reason.OUT_OF_MEMORY if speed is None else None
    study.enqueue(ONE)
    study.tell(study.ask(), make_record(0, ONE, speed, reason=reason))
    study.enqueue(ONE)
    study.drop(study.ask())
    _, repeat = raw.get_trials(deepcopy=False)
    assert (repeat.state, repeat.constraints) == (TrialState.COMPLETE, {CONSTRAINT: constraint})
    assert repeat.value == pytest.approx(value)
    assert len(study.records) == 1


def test_a_proposal_of_which_nothing_is_known_is_dropped_as_infeasible(
    raw: optuna.Study, study: TrialStudy
) -> None:
    study.drop(replace(study.ask(), config=None))
    assert (only(raw).value, only(raw).constraints) == (0.0, {CONSTRAINT: 1.0})


def test_a_run_that_nobody_proposed_is_added(raw: optuna.Study, study: TrialStudy) -> None:
    added = [
        study.add(make_record(7, ONE, 10.0, role=Role.PLAYOFF)),
        study.add(make_record(7, ONE, reason=Reason.OUT_OF_MEMORY, role=Role.CONFIRMATION)),
        study.add(make_record(7, ONE, reason=Reason.CRASH, role=Role.PLAYOFF)),
        study.add(make_record(7, make_config(4, 8, optim="sgd"), 5.0, role=Role.HAND_RECIPE)),
    ]
    assert [record.number for record in added] == [0, 1, 2, 3]
    assert study.records == tuple(added)
    trials = raw.get_trials(deepcopy=False)
    assert [t.state.name for t in trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert [t.constraints for t in trials] == [{CONSTRAINT: -1.0}, {CONSTRAINT: 1.0}, {}, {CONSTRAINT: -1.0}]
    assert trials[0].params == SPACE.params_of(ONE)
    assert trials[3].params == {}, "outside the space there is nothing to learn for a sampler"


def test_asking_goes_on_after_a_run_outside_the_space() -> None:
    raw = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=2)
    )
    study = TrialStudy(raw, SPACE)
    study.add(make_record(0, make_config(4, 8, optim="sgd"), 5.0, role=Role.HAND_RECIPE))
    for _ in range(6):
        proposal = study.ask()
        assert proposal.config is not None
        study.tell(proposal, make_record(0, proposal.config, 10.0))


def _cut_after(attribute: str, trial: int, path: Path) -> None:
    """Leave of the journal what was written up to the line that sets `attribute` of `trial`."""
    kept = b""
    for line in journal_bytes().splitlines(keepends=True):
        kept += line
        entry = json.loads(line)
        written = {**entry.get("user_attr", {}), **entry.get("system_attr", {})}
        if entry.get("trial_id") == trial and attribute in written:
            break
    else:
        raise AssertionError(f"trial {trial} never had {attribute}")
    path.write_bytes(kept)


@pytest.mark.parametrize(
    ("number", "state", "value", "constraints"),
    [
        (0, TrialState.COMPLETE, 100.0, {CONSTRAINT: -1.0}),
        (1, TrialState.COMPLETE, 0.0, {CONSTRAINT: 1.0}),
        (2, TrialState.COMPLETE, 0.0, {CONSTRAINT: 1.0}),
        (3, TrialState.FAIL, None, {}),
    ],
)
def test_a_kill_between_record_and_tell_loses_nothing(
    tmp_path: Path, number: int, state: TrialState, value: float | None, constraints: dict[str, float]
) -> None:
    path = tmp_path / "study.log"
    _cut_after(RECORD, number, path)
    raw = opened(path)
    assert raw.get_trials(deepcopy=False)[-1].state is TrialState.RUNNING
    study = TrialStudy(raw, SPACE)
    trial = raw.get_trials(deepcopy=False)[number]
    assert (trial.state, trial.constraints) == (state, constraints)
    assert trial.value == (None if value is None else pytest.approx(value))
    assert [record.number for record in study.records] == list(range(number + 1))


def test_a_kill_before_the_record_loses_that_trial_only(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    _cut_after(f"constraints:{CONSTRAINT}", 1, path)
    raw = opened(path)
    study = TrialStudy(raw, SPACE)
    assert [record.number for record in study.records] == [0]
    assert raw.get_trials(deepcopy=False)[1].state is TrialState.FAIL
    assert study.known(SPACE.configs[1]) is None


def test_what_an_earlier_process_had_enqueued_does_not_come_before_our_own(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    opened_trials(path).enqueue(SPACE.configs[3])
    raw = opened(path)
    study = TrialStudy(raw, SPACE)
    assert [trial.state for trial in raw.get_trials(deepcopy=False)] == [TrialState.FAIL]
    study.enqueue(ONE)
    assert study.ask().config == ONE
    assert study.records == ()


def test_configurations_with_and_without_an_extra_are_told_apart() -> None:
    eager = ONE.but(extra=(("attn_implementation", "eager"),))
    space = Space(configs=(ONE, eager))
    study = TrialStudy(opened(None), space)
    for config in (ONE, eager, ONE):
        study.enqueue(config)
        proposal = study.ask()
        assert proposal.config == config
        study.tell(proposal, make_record(0, config, 10.0))
        study.add(make_record(0, config, 11.0, role=Role.PLAYOFF))
    asked = set()
    for _ in range(20):
        proposal = study.ask()
        asked.add(proposal.config)
        study.drop(proposal)
    assert asked == {ONE, eager}


def test_a_study_over_other_choices_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    path.write_bytes(journal_bytes())
    opened_trials(path)
    before = path.read_bytes()
    narrow = build_space(
        effective_batch=8,
        capabilities=Capabilities(device_kind="cpu", precisions=(Precision.FP32,), optims=("adamw_torch",)),
    )
    with refused(
        "^the study searched another optim: adamw_torch, adafactor there, adamw_torch here$",
        hint="--study",
        kind=StudyError,
    ):
        TrialStudy(opened(path), narrow)
    assert path.read_bytes() == before


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            trial_records(st.sampled_from(SPACE.configs), roles=(Role.SEARCH,)),
        ),
        max_size=5,
    )
)
def test_whatever_was_stored_is_there_after_a_restart(steps: list[tuple[bool, TrialRecord]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "study.log"
        study = opened_trials(path)
        for proposed, record in steps:
            if proposed:
                study.enqueue(record.config)
                study.tell(study.ask(), record)
            else:
                study.add(record)
        assert [numberless(r) for r in study.records] == [numberless(r) for _, r in steps]
        assert opened_trials(path).records == study.records
        assert {r.outcome for r in study.records} <= set(Outcome)


@pytest.mark.parametrize(
    ("reason", "seconds", "kept"),
    [
        (Reason.ERROR, 4.0, False),
        (Reason.CRASH, 4.0, False),
        (Reason.TIMEOUT, 30.0, False),
        (Reason.TIMEOUT, 100.0, True),
        (Reason.UNSUPPORTED, 4.0, True),
        (Reason.OUT_OF_MEMORY, 4.0, True),
        (Reason.INTERRUPTED, 4.0, True),
        (None, 4.0, True),
    ],
)
def test_a_later_search_forgets_failures_whose_cause_may_be_gone(
    reason: Reason | None, seconds: float, kept: bool, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    speed = 100.0 if reason is None else None
    TrialStudy(opened(path), SPACE).add(make_record(0, ONE, speed, reason=reason, seconds=seconds))
    again = TrialStudy(opened(path), SPACE)
    assert len(again.records) == 1
    assert again.forget_failures(trial_timeout_seconds=100.0) == ([] if kept else [0])
    assert len(again.records) == kept
    assert again.earlier_seconds > 0
    assert len(TrialStudy(opened(path), SPACE).records) == 1, "the file keeps it"


def test_the_time_of_earlier_processes_is_wall_time_and_holds_their_start(tmp_path: Path) -> None:
    """30 s until there is a study, 5 s to the first trial's end, 2 s to the second's: their own seconds are less, and what came after is lost."""
    path, now = tmp_path / "study.journal", 100.0
    study = TrialStudy(opened(path), SPACE, spent_seconds=30.0, clock=lambda: now)
    now += 5.0
    study.enqueue(ONE)
    study.tell(study.ask(), make_record(0, ONE, 100.0, seconds=4.0))
    now += 2.0
    study.add(make_record(0, ONE, 100.0, role=Role.PLAYOFF, seconds=1.5))
    now += 60.0
    again = TrialStudy(opened(path), SPACE, spent_seconds=3.0, clock=lambda: now)
    assert again.earlier_seconds == 37.0
    again.add(make_record(0, ONE, 100.0, role=Role.PLAYOFF))
    assert TrialStudy(opened(path), SPACE).earlier_seconds == 40.0


def test_a_file_of_before_counts_its_trials_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.journal"
    monkeypatch.setattr(TrialStudy, "_attributes", lambda self, record: {RECORD: record.to_json()})
    TrialStudy(opened(path), SPACE).add(make_record(0, ONE, 100.0, seconds=4.0))
    assert TrialStudy(opened(path), SPACE).earlier_seconds == 4.0


def test_a_run_that_no_sampler_proposed_has_a_duration_too() -> None:
    raw = opened(None)
    TrialStudy(raw, SPACE).add(make_record(0, ONE, 100.0, role=Role.PLAYOFF, seconds=4.0))
    (trial,) = raw.get_trials()
    assert trial.duration is not None
    assert trial.duration.total_seconds() == 4.0
