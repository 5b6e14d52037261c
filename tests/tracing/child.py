"""Runs functions of the test modules in one child process: tracing on fake `cuda` tensors changes the process that does it."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
TIMEOUT_SECONDS = 240.0


@functools.cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def in_fresh_child(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As `in_child`, in a process that has done nothing before."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(function, *args, **kwargs).result(timeout=TIMEOUT_SECONDS)


def in_child(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`function(*args, **kwargs)`, computed in the child; it and its result must pickle."""
    return _child().submit(function, *args, **kwargs).result(timeout=TIMEOUT_SECONDS)
