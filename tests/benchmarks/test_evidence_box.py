"""Time boxes: shares, grace, and the timer that enforces them."""

from __future__ import annotations

import signal
import time

import pytest

from benchmarks.evidence.box import Box, BoxExpired, Stopped, box_seconds, grace_seconds, hard_stop, stoppable


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_box_counts_down_and_never_below_zero() -> None:
    clock = Clock()
    box = Box(10.0, clock)
    assert box.left == 10.0
    clock.now += 4.0
    assert box.holds(5.0)
    assert not box.holds(6.0)
    clock.now += 20.0
    assert box.left == 0.0
    assert not box.holds()


def test_a_trial_may_take_what_is_left_within_bounds() -> None:
    clock = Clock()
    box = Box(60.0, clock)
    assert box.timeout(20.0) == 20.0
    assert box.timeout(90.0) == 60.0
    clock.now += 59.0
    assert box.timeout(20.0) == 5.0


def test_a_share_is_a_box_of_its_own_that_ends_within_this_one() -> None:
    clock = Clock()
    inner = Box(60.0, clock).share(0.5)
    clock.now += 31.0
    assert not inner.holds()


def test_what_a_stage_leaves_goes_to_those_that_follow() -> None:
    assert box_seconds(100.0, [1.0, 3.0]) == 25.0
    assert box_seconds(95.0, [3.0]) == 95.0
    assert box_seconds(-5.0, [3.0, 1.0]) == 0.0


def test_grace_is_bounded_and_never_goes_beyond_the_end_of_the_run() -> None:
    assert grace_seconds(100.0, 1000.0) == 25.0
    assert grace_seconds(1000.0, 9000.0) == 45.0
    assert grace_seconds(100.0, 103.0) == 3.0
    assert grace_seconds(100.0, 100.0) == 1.0


def test_a_stage_that_does_not_come_back_is_ended() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(BoxExpired), hard_stop(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_no_handler_of_exceptions_takes_an_expired_box_for_a_failed_point() -> None:
    assert not issubclass(BoxExpired, Exception)
    assert not issubclass(Stopped, Exception)


def test_a_signal_to_end_is_raised_by_its_name_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"), stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
