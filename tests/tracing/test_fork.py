"""Work shared among forked copies: order, errors, crashes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from autofit.errors import UserError
from autofit.memory.request import TraceUnavailable
from autofit.tracing.fork import outcomes


def _square(number: int) -> int:
    if number == 3:
        raise TraceUnavailable("three cannot be traced")
    if number == 4:
        raise UserError("four is wrong", hint="take five")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 6:
        raise ZeroDivisionError("a bug")
    return number * number


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_results_come_in_order_whoever_made_them(workers: int) -> None:
    assert outcomes(_square, [1, 2, 7, 8, 9], workers=workers) == [1, 4, 49, 64, 81]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refusal_is_a_result(workers: int) -> None:
    first, refused, wrong = outcomes(_square, [1, 3, 4], workers=workers)
    assert first == 1
    assert isinstance(refused, TraceUnavailable)
    assert refused.message == "three cannot be traced"
    assert isinstance(wrong, UserError)
    assert (wrong.message, wrong.hint) == ("four is wrong", "take five")


def test_a_copy_that_is_killed_takes_only_its_own_items_along() -> None:
    ok, killed, also, lost = outcomes(_square, [1, 5, 2, 9], workers=2)
    assert (ok, also) == (1, 4)
    for outcome in (killed, lost):
        assert isinstance(outcome, TraceUnavailable)
        assert outcome.message == "the process that traced was ended by signal SIGKILL"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bug_stays_an_exception(workers: int) -> None:
    with pytest.raises((ZeroDivisionError, RuntimeError), match="a bug"):
        outcomes(_square, [1, 6], workers=workers)


def _large_with_time(number: int) -> tuple[float, float, bytes]:
    begin = time.monotonic()
    time.sleep(0.5)
    return begin, time.monotonic(), bytes(1 << 20)


def test_copies_work_at_the_same_time_however_large_their_results_are() -> None:
    """A pipe holds 64 KiB: a copy whose results are not read would wait after its first."""
    import torch  # so that copies need not

    assert torch.get_num_threads() > 0
    found = outcomes(_large_with_time, [0, 1, 2, 3], workers=2)
    spans = [outcome[:2] for outcome in found if isinstance(outcome, tuple)]
    later = (spans[2], spans[3])
    assert max(begin for begin, _ in later) < min(end for _, end in later), "both had begun their second before either ended it"
