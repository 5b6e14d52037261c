"""Time boxes: asked before every point, and enforced by a timer where a point does not come back."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

GRACE_SHARE, MAX_GRACE_SECONDS = (
    0.25,
    45.0,
)  #: what a stage may take beyond its box to finish a point that has begun


class BoxExpired(BaseException):
    """A stage did not come back within its box and grace. No `Exception`: nothing on the way may take it for a failed point."""


class Stopped(BaseException):
    """The run was told to end (a signal); the message is its name."""


class Box:
    """Seconds that a stage may take.

    Args:
        seconds: from now.
        clock: monotonic seconds (tests replace it).
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = seconds
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - self._clock())

    def holds(self, seconds: float = 0.0) -> bool:
        """Whether a point that takes about `seconds` still fits."""
        return self.left > seconds

    def timeout(self, most: float, *, least: float = 5.0) -> float:
        """Seconds that one trial may take: what is left, within bounds."""
        return max(least, min(most, self.left))

    def share(self, fraction: float) -> Box:
        """A box within this one."""
        return Box(self.left * fraction, self._clock)


def box_seconds(left: float, shares: Sequence[float]) -> float:
    """Seconds of the first of the stages that are still to come: what an earlier stage did not use goes to all later ones.

    Args:
        left: seconds of the whole run.
        shares: of the stages to come, this one first.
    """
    total = sum(shares)
    return max(0.0, left) * shares[0] / total if total > 0 else 0.0


def grace_seconds(box: float, total_left: float) -> float:
    """Seconds beyond the box after which a stage is ended from outside; never beyond the end of the whole run."""
    grace = min(MAX_GRACE_SECONDS, max(5.0, GRACE_SHARE * box))
    return max(1.0, min(grace, total_left - box))


@contextlib.contextmanager
def hard_stop(seconds: float) -> Iterator[None]:
    """Raise `BoxExpired` in the main thread after `seconds`, wherever it is."""

    def expired(_signal: int, _frame: object) -> None:
        raise BoxExpired

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGINT, so that children are ended and the table is printed."""

    def stop(number: int, _frame: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
