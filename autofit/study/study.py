"""The Optuna study that one coordinator owns: ask, tell, and what was told, as records.

Out of memory is told as COMPLETE with value 0 and a violated constraint: told as FAIL, samplers ignore it and walk into the wall
again. Only bugs, crashes and interruptions are FAIL. Each record is written to the journal before the trial is told, so that a
process killed between the two loses nothing.

A failure is final for the search that met it. A later one on the same file forgets those whose cause may be gone: a bug that was mended, a crash
that was another process's fault, a time-out that was shorter than today's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from autofit.errors import StudyError
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.trials.trial import Outcome, Reason, TrialRecord

RECORD = "record"
WHY = "why"
PASSED = "passed_seconds"  #: user attribute of a trial: wall time since the one before it, or since its process began
CONSTRAINT = "memory"
INFEASIBLE_VALUE = 0.0
MENDABLE = frozenset({Reason.ERROR, Reason.CRASH, Reason.UNREADABLE_ANSWER})  #: failures whose cause may be gone in a later search
LONGER = 1.25  #: a time limit that is this much longer is worth another try


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A trial that was asked for: its number, its configuration (None: the combination is not in the space), and why."""

    trial: optuna.Trial
    config: TrialConfig | None
    why: str | None = None


class TrialStudy:
    """Ask and tell over a space.

    Args:
        study: from `journal.open_study`.
        space: what may be proposed.
        spent_seconds: since this process began its search.
        clock: monotonic seconds (tests replace it).

    Raises:
        StudyError: the study was made over other choices.
    """

    def __init__(
        self, study: optuna.Study, space: Space, *, spent_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._study, self._space = study, space
        self._clock, self._last = clock, clock() - spent_seconds
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(choices=tuple(values)) for name, values in space.choices().items()
        }
        self._records: list[TrialRecord] = []
        self.earlier_seconds = 0.0  #: wall time of earlier processes, up to the last trial that each ended
        self._check_space()
        self._recover()

    @property
    def records(self) -> Sequence[TrialRecord]:
        """Every record that counts, in order of trial number."""
        return tuple(self._records)

    @property
    def sampler(self) -> optuna.samplers.BaseSampler:
        """The study's sampler."""
        return self._study.sampler

    def enqueue(self, config: TrialConfig) -> None:
        """Have the next `ask` propose `config` (which must be in the space)."""
        self._study.enqueue_trial(self._space.params_of(config))

    def ask(self) -> Proposal:
        """Return the sampler's next proposal."""
        trial = self._study.ask(self._distributions)
        why = self._study.get_trials(deepcopy=False)[trial.number].user_attrs.get(WHY)
        return Proposal(trial=trial, config=self._space.config_of(trial.params), why=why)

    def tell(self, proposal: Proposal, record: TrialRecord) -> TrialRecord:
        """Store what became of a proposal."""
        record = replace(record, number=proposal.trial.number)
        # The constraint comes before the record, so that a record found after a kill has its constraint too.
        for name, value in _constraints(record).items():
            proposal.trial.set_constraint(name, value)
        for name, value in self._attributes(record).items():
            proposal.trial.set_user_attr(name, value)
        self._tell(proposal.trial.number, record)
        self._records.append(record)
        return record

    def drop(self, proposal: Proposal) -> None:
        """End a proposal that leads to nothing new (a repeat, a combination outside the space): Optuna is told what is known of it."""
        known = self.known(proposal.config) if proposal.config is not None else None
        feasible = known is not None and known.outcome is Outcome.COMPLETED
        proposal.trial.set_constraint(CONSTRAINT, -1.0 if feasible else 1.0)
        value = known.samples_per_second if known is not None and feasible else INFEASIBLE_VALUE
        self._study.tell(proposal.trial.number, value)

    def add(self, record: TrialRecord) -> TrialRecord:
        """Store a run that no sampler proposed (a play-off round, the confirmation, a baseline outside the space)."""
        record = replace(record, number=len(self._study.get_trials(deepcopy=False)))
        inside = record.config in self._space
        failed = record.outcome is Outcome.FAILED
        frozen = create_trial(
            state=TrialState.FAIL if failed else TrialState.COMPLETE,
            value=None if failed else record.samples_per_second or INFEASIBLE_VALUE,
            params=self._space.params_of(record.config) if inside else {},
            distributions=self._distributions if inside else {},
            user_attrs=self._attributes(record),
            constraints=_constraints(record),
        )
        assert frozen.datetime_complete is not None
        frozen.datetime_start = frozen.datetime_complete - timedelta(seconds=record.seconds)
        self._study.add_trial(frozen)
        self._records.append(record)
        return record

    def known(self, config: TrialConfig) -> TrialRecord | None:
        """The first record of a configuration that ran or was skipped for good; None when it may still run."""
        return next(
            (r for r in self._records if r.config == config and r.outcome is not Outcome.FAILED), None
        )

    def _attributes(self, record: TrialRecord) -> dict[str, Any]:
        """What a trial keeps of its record; the record is the last, because one that is there counts as told."""
        passed, self._last = self._clock() - self._last, self._clock()
        return {PASSED: passed, RECORD: record.to_json()}

    def _tell(self, number: int, record: TrialRecord) -> None:
        if record.outcome is Outcome.FAILED:
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, record.samples_per_second or INFEASIBLE_VALUE)

    def _check_space(self) -> None:
        """Refuse a study of other choices: Optuna cannot mix them."""
        for trial in self._study.get_trials(deepcopy=False):
            for name, found in trial.distributions.items():
                own = self._distributions.get(name)
                if own is not None and found != own:
                    raise StudyError(
                        f"the study searched another {name.replace('_', ' ')}: "
                        f"{_listed(found)} there, {_listed(own)} here",
                        hint="search the same space, or give another path to --study",
                    )

    def _recover(self) -> None:
        """Take in what an earlier process left: finished records, and trials that were running or waiting when it died."""
        trials = self._study.get_trials(deepcopy=False)
        for _ in range(sum(trial.state is TrialState.WAITING for trial in trials)):
            # It would be proposed in the place of what this process enqueues.
            self._study.tell(self._study.ask().number, state=TrialState.FAIL)
        for trial in trials:
            record = _record_of(trial)
            if trial.state is TrialState.RUNNING:
                if record is not None:
                    self._tell(trial.number, record)
                else:
                    self._study.tell(trial.number, state=TrialState.FAIL)
            if record is not None:
                self.earlier_seconds += trial.user_attrs.get(PASSED, record.seconds)
                self._records.append(replace(record, number=trial.number))

    def forget_failures(self, *, trial_timeout_seconds: float) -> list[int]:
        """Leave out failures so far whose cause may be gone; they stay in the file.

        Args:
            trial_timeout_seconds: the longest that a trial may take now.

        Returns:
            The trials' numbers, for a sampler that reads the study itself.
        """
        forgotten = [r.number for r in self._records if _mended(r, trial_timeout_seconds)]
        self._records = [r for r in self._records if r.number not in forgotten]
        return forgotten


def _listed(distribution: BaseDistribution) -> str:
    return ", ".join(map(str, getattr(distribution, "choices", ())))


def _constraints(record: TrialRecord) -> dict[str, float]:
    """Optuna's constraints of a trial: violated above 0; none for a trial that says nothing of memory."""
    if record.outcome is Outcome.FAILED:
        return {}
    return {CONSTRAINT: -1.0 if record.outcome is Outcome.COMPLETED else 1.0}


def _mended(record: TrialRecord, trial_timeout_seconds: float) -> bool:
    """Whether an earlier search's failure says nothing about this one."""
    if record.failure is None or record.outcome is not Outcome.FAILED:
        return False
    if record.failure.reason is Reason.TIMEOUT:
        return LONGER * record.seconds <= trial_timeout_seconds
    return record.failure.reason in MENDABLE


def _record_of(trial: FrozenTrial) -> TrialRecord | None:
    raw = trial.user_attrs.get(RECORD)
    return TrialRecord.from_json(raw) if raw is not None else None
