"""The budget of a search: trials and seconds, shared out over its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofit.problem.terms import Terms
from autofit.processes.process import DEFAULT_TRIAL_TIMEOUT_SECONDS
from autofit.trials.trial import Outcome, Role, TrialRecord
from autofit.units import format_seconds

PROPOSAL_SHARE, PLAYOFF_SHARE = 0.7, 0.9  #: of the time budget: what is left is for the parts that follow
AFTER_SEARCH = frozenset({Role.PLAYOFF, Role.CONFIRMATION})


class OutOfBudget(Exception):
    """Time or trials are spent; the message is the reason. Control flow of the search."""


class Budget:
    """What is left of trials and seconds. The clock starts here, at what was spent before.

    Args:
        terms: what bounds the search.
        clock: monotonic seconds.
    """

    def __init__(self, terms: Terms, clock: Callable[[], float]) -> None:
        self._terms, self._clock = terms, clock
        self._begin = clock() - terms.spent_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Since the search began."""
        return self._clock() - self._begin

    @property
    def seconds_left(self) -> float | None:
        """Of the time budget; None = it has no end."""
        timeout = self._terms.timeout_seconds
        return None if timeout is None else max(0.0, timeout - self.elapsed_seconds)

    def check(self, share: float, records: Sequence[TrialRecord]) -> None:
        """Raise OutOfBudget when this part of the search may not begin another trial.

        Args:
            share: of the time that this part and those before it may use; the number of trials binds proposals only.
            records: all trials so far.
        """
        terms = self._terms
        if self.out_of_time(share):
            part = f"the {100 * share:.0f} % for proposals of " if share == PROPOSAL_SHARE else ""
            raise OutOfBudget(f"{part}the time budget of {format_seconds(terms.timeout_seconds or 0.0)} {'are' if part else 'is'} spent")
        if share == PROPOSAL_SHARE and terms.trials is not None and _ran(records) >= terms.trials:
            raise OutOfBudget(f"the budget of {terms.trials} trials is spent")

    def last_trial(self, records: Sequence[TrialRecord]) -> bool:
        """Whether at most one more trial may run before the play-off."""
        return self._terms.trials is not None and _ran(records) >= self._terms.trials - 1

    def out_of_time(self, share: float) -> bool:
        """Whether this share of the seconds is gone."""
        timeout = self._terms.timeout_seconds
        return timeout is not None and self.elapsed_seconds >= share * timeout

    def trial_timeout_seconds(self, *, needed: float = 0.0) -> float | None:
        """The longest that a trial which begins now may take; None = the runner's own bound.

        Args:
            needed: seconds that it is known to take: no bound of a single trial cuts it off before, the end of the time budget does.
        """
        bounds = [self._terms.trial_timeout_seconds]
        if needed > (bounds[0] or DEFAULT_TRIAL_TIMEOUT_SECONDS):
            bounds = [needed]
        if self._terms.timeout_seconds is not None:
            bounds.append(max(1.0, self._terms.timeout_seconds - self.elapsed_seconds))
        known = [bound for bound in bounds if bound is not None]
        return min(known) if known else None


def _ran(records: Sequence[TrialRecord]) -> int:
    """Trials that count: those of play-off and confirmation do not, nor do skipped and interrupted ones."""
    return sum(
        r.role not in AFTER_SEARCH and r.outcome is not Outcome.SKIPPED and not r.interrupted for r in records
    )
