"""Doing something that is expected to fail, and saying exactly how it failed."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from autofit.processes.failure import Evidence, ExceptionReport, classify_exception


def in_child(act: Callable[[], None], seconds: float) -> int | None:
    """Exit status of a forked child that runs `act` (negative = signal); None when it took longer than `seconds`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()  # for the log: the parent sees only the status
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def raised_by(act: Callable[[], None]) -> BaseException | None:
    """What `act` raised, whatever it is: this is what is studied here."""
    try:
        act()
    except BaseException as error:
        return error
    return None


def judged(described: ExceptionReport, *, limit_set: bool, device: str) -> dict[str, Any]:
    """The exception's types and text, and what autofit makes of it."""
    first = described.links[0]
    evidence = Evidence(limit_set=limit_set, device_kind=device.partition(":")[0])
    failure = classify_exception(described, evidence)
    return {
        "error": {
            "types": list(first.types),
            "message": first.message,
            "chain": [link.types[0] for link in described.links],
        },
        "traceback_end": described.traceback[-1500:],
        "judged": {
            "reason": str(failure.reason),
            "requested_bytes": failure.requested_bytes,
            "message": failure.message,
        },
    }
