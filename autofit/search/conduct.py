"""Carrying out trials: each is announced, run under what is left of the budget, stored, and looked at for reasons to end the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autofit.problem.config import TrialConfig
from autofit.problem.terms import Terms
from autofit.search import ending
from autofit.search.budget import Budget
from autofit.study.study import Proposal, TrialStudy
from autofit.trials.observer import Observer
from autofit.trials.runner import Runner, TrialRequest
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord, given_up

STEPS_AT_FULL_LENGTH = 10  #: for which there must be time: two or three that may be longer than others, and more while memory comes to rest
FAILURES_ALIKE = 3  #: trials that fail in the same way, with none that completed, before the search gives up


class Conductor:
    """Runs trials and stores what became of them.

    Args:
        terms: memory limit and seed of every trial.
        study: where records go.
        runner: what runs them.
        observer: told when a trial begins and ends.
        budget: what is left of trials and time.
        predicted_bytes: of a configuration, for its record; None when not predictable.
    """

    def __init__(
        self,
        *,
        terms: Terms,
        study: TrialStudy,
        runner: Runner,
        observer: Observer,
        budget: Budget,
        predicted_bytes: Callable[[TrialConfig], int | None],
    ) -> None:
        self._terms, self._study, self._runner = terms, study, runner
        self._observer, self._budget, self._predicted_bytes = observer, budget, predicted_bytes

    @property
    def records(self) -> Sequence[TrialRecord]:
        """What the search itself rests on; trials that were run on its winner afterwards are not among them."""
        return [r for r in self._study.records if not r.after_search]

    def check_budget(self, share: float) -> None:
        """Raise OutOfBudget when no further trial may begin in this share of the time."""
        self._budget.check(share, self.records)

    def carry_out(self, proposal: Proposal, role: Role, why: str | None) -> None:
        """Run what the study proposed, and tell it.

        Raises:
            KeyboardInterrupt: the trial was ended from outside; it is told as such.
            OutOfBudget: it was cut off because the time is spent.
            SearchFailed: trials fail alike.
        """
        assert proposal.config is not None
        try:
            record = self._run(proposal.config, role, why)
        except KeyboardInterrupt:
            failure = Failure(reason=Reason.INTERRUPTED, message="interrupted")
            ended = TrialRecord(number=0, config=proposal.config, role=role, outcome=Outcome.FAILED, failure=failure)
            self._study.tell(proposal, ended)
            raise
        self._observer.trial_ended(self._study.tell(proposal, record))
        self._look_at(record)

    def add(self, config: TrialConfig, role: Role, why: str, **request: Any) -> TrialRecord:
        """Run a trial that no sampler proposed; `request` are further fields of `TrialRequest`. Raises as `carry_out` does."""
        record = self._study.add(self._run(config, role, why, **request))
        self._observer.trial_ended(record)
        self._look_at(record)
        return record

    def skip(self, proposal: Proposal, failure: Failure) -> None:
        """Answer what the study proposed without a run."""
        assert proposal.config is not None
        record = TrialRecord(
            number=0,
            config=proposal.config,
            outcome=Outcome.SKIPPED,
            failure=failure,
            predicted_bytes=self._predicted_bytes(proposal.config),
            why=proposal.why,
        )
        self._observer.trial_ended(self._study.tell(proposal, record))

    def reject(self, config: TrialConfig, failure: Failure, why: str) -> None:
        """Store that a configuration which ran must not win after all."""
        record = TrialRecord(
            number=0, config=config, role=Role.CONFIRMATION, outcome=Outcome.INFEASIBLE, failure=failure, why=why
        )
        self._observer.trial_ended(self._study.add(record))

    def _run(self, config: TrialConfig, role: Role, why: str | None, **request: Any) -> TrialRecord:
        self._observer.trial_started(config, role, why)
        result = self._runner.run(
            TrialRequest(
                config=config,
                memory_limit_bytes=self._terms.memory_limit_bytes,
                timeout_seconds=self._budget.trial_timeout_seconds(needed=self._needed_seconds(config) if request.get("full_length") else 0.0),
                seed=self._terms.seed,
                **request,
            )
        )
        failure = cut_off(result.failure) if self._budget.out_of_time(1.0) else result.failure
        return TrialRecord(
            number=0,
            config=config,
            role=role,
            outcome=result.outcome,
            measurement=result.measurement,
            failure=failure,
            seconds=result.seconds,
            predicted_bytes=self._predicted_bytes(config),
            why=why,
        )

    def _needed_seconds(self, config: TrialConfig) -> float:
        """What a run at full accumulation may take, by the slowest that was seen of it: a bound for trials knows nothing of the accumulation."""
        speeds = [r.samples_per_second for r in self._study.records if r.config == config]
        known = [speed for speed in speeds if speed]
        return STEPS_AT_FULL_LENGTH * config.effective_batch() / min(known) if known else 0.0

    def _look_at(self, record: TrialRecord) -> None:
        """End the search where a trial was ended from outside, or where all fail."""
        if record.interrupted:
            self.check_budget(1.0)
            raise KeyboardInterrupt
        failed = ending.all_failed(self.records)
        if len({r.config for r in failed}) >= FAILURES_ALIKE and ending.alike(failed):
            raise ending.search_failed(failed)


def never_confirmed(records: Sequence[TrialRecord]) -> bool:
    """Whether several winners failed again and again where they were confirmed, and none passed: the next would too."""
    runs = [r for r in records if r.role is Role.CONFIRMATION]
    passed = any(r.outcome is Outcome.COMPLETED for r in runs)
    return not passed and len({r.config for r in runs if r.config in given_up(runs)}) >= FAILURES_ALIKE


def cut_off(failure: Failure | None) -> Failure | None:
    """A time-out when the search's own time is over is not the trial's fault: a later search on the same study may try it again."""
    if failure is None or failure.reason is not Reason.TIMEOUT:
        return failure
    return replace(failure, reason=Reason.INTERRUPTED, message="cut off: the time budget is spent")
