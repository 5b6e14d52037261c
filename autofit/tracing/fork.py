"""Several traces at a time: forked copies of a process that has imported the libraries and done nothing else.

A copy costs milliseconds where a new process costs seconds of imports. Copies run single-threaded: a thread pool that was started
before the fork does not exist in them, and whoever waits for it waits for ever. A copy that dies takes only its own items with
it, which makes a crash in a patched library a reason instead of the end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from autofit.errors import AutofitError
from autofit.memory.request import TraceUnavailable
from autofit.processes.lifeline import die_with_parent

A = TypeVar("A")
R = TypeVar("R")
Outcome = Any  # a result, or the AutofitError that took its place


def outcomes(function: Callable[[A], R], items: Sequence[A], *, workers: int) -> list[R | AutofitError]:
    """`function` of each item, in order; an `AutofitError` is a result. Anything else that is raised is raised here.

    Args:
        function: pure; its results must pickle.
        items: what to do.
        workers: processes at a time; 1 = in this one.
    """
    if workers <= 1 or len(items) <= 1:
        return [_outcome(function, item) for item in items]
    shares = [list(range(first, len(items), workers)) for first in range(min(workers, len(items)))]
    children = [_start(function, [items[i] for i in share]) for share in shares]
    found: list[Any] = [None] * len(items)
    # All pipes at a time: a copy whose results nobody reads stands still as soon as they fill its pipe.
    with ThreadPoolExecutor(len(children)) as readers:
        reading = [readers.submit(_collect, *child, len(share)) for share, child in zip(shares, children)]
        for share, read in zip(shares, reading):
            for i, outcome in zip(share, read.result()):
                found[i] = outcome
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AutofitError):
            raise outcome
    return found


def _outcome(function: Callable[[A], R], item: A) -> R | AutofitError:
    try:
        return function(item)
    except AutofitError as error:
        return error


def _start(function: Callable[[A], R], items: list[A]) -> tuple[int, int]:
    """Fork a copy that works through `items`; returns its process id and the reading end of its pipe."""
    parent = os.getpid()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python warns of threads; the copy does not use them
        pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        die_with_parent(parent)
        with os.fdopen(writing, "wb") as pipe:
            _work(function, items, pipe)
        status = 0
    finally:
        os._exit(status)


def _work(function: Callable[[A], R], items: list[A], pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    for item in items:
        try:
            outcome: Outcome = _outcome(function, item)
        except Exception:  # crosses a process border: the text is kept, and raised on the other side
            outcome = RuntimeError(traceback.format_exc())
        pickle.dump(outcome, pipe, protocol=pickle.HIGHEST_PROTOCOL)
        pipe.flush()


def _collect(pid: int, reading: int, count: int) -> list[Outcome]:
    """Everything that a copy answers; items that it did not live to answer are `TraceUnavailable`."""
    found: list[Outcome] = []
    with os.fdopen(reading, "rb") as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while len(found) < count:
            found.append(pickle.load(pipe))
    _, status = os.waitpid(pid, 0)
    how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "itself"
    return found + [TraceUnavailable(f"the process that traced was ended by {how}")] * (count - len(found))
