"""Who watches a search."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from autofit.config import TrialConfig
from autofit.trial import Role, TrialRecord


class Observer(Protocol):
    """Who watches a search; the command line shows it, the library ignores it."""

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
    """An observer that shows what is left of the time budget."""

    def spent(self, seconds: float) -> None:
        """Seconds of it that went before the first trial."""
        ...


class Silent:
    """An observer that shows nothing."""

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """Ignore."""

    def trial_ended(self, record: TrialRecord) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""
