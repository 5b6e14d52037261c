"""Who watches a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from autofit.problem.config import TrialConfig
from autofit.trials.trial import Role, TrialRecord


class Observer(Protocol):
    """Who watches a search; the command line shows it, the library only where it is asked to."""

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """A trial begins."""
        ...

    def trial_ended(self, record: TrialRecord) -> None:
        """A trial has its record."""
        ...

    def note(self, message: str) -> None:
        """Something worth a line."""
        ...


@runtime_checkable
class Timekeeper(Protocol):
    """An observer that shows what is left of the budget, and the best so far."""

    def spent(self, seconds: float) -> None:
        """Seconds of the time budget that went before the first trial."""
        ...

    def earlier(self, records: Sequence[TrialRecord]) -> None:
        """Trials of the study that is gone on with."""
        ...


class Silent:
    """An observer that shows nothing."""

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """Ignore."""

    def trial_ended(self, record: TrialRecord) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""
