"""A card that somebody else has filled: which call fails first as room shrinks, and with which words.

One forked child holds all of the card but some room; another initialises CUDA, makes a tensor, multiplies, convolves, and stops at the first
failure. On a CPU nobody holds anything, and every call succeeds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from autofit.processes.failure import describe_exception
from autofit.units import MIB
from benchmarks.evidence.inside.attempt import in_child, judged, raised_by
from benchmarks.evidence.inside.context import steps
from benchmarks.evidence.inside.counters import counters, reserved_share
from benchmarks.evidence.inside.line import Report, serve

PIECES = (1024 * MIB, 64 * MIB, 2 * MIB)  #: taken in this order until the room is left


def main(order: Mapping[str, Any], report: Report) -> None:
    """Try every room in `order["rooms"]` (bytes)."""
    device = order["device"]
    for room in order["rooms"]:
        with filled(room, device) as held:
            status = in_child(partial(_try_out, room, held, device, report), order["seconds"])
        if status != 0:
            report(room_bytes=room, held=held, died=status)


@contextlib.contextmanager
def filled(room: int, device: str) -> Iterator[str]:
    """The card but for `room` bytes is held by another process; what that process says of it."""
    ready, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            _hold(room, device, tell)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        yield os.read(ready, 64).decode()
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _hold(room: int, device: str, tell: int) -> None:
    """Take the card but for `room` bytes, say how much is free, and wait to be killed."""
    free = -1
    try:
        if device != "cpu":
            kept = []
            for piece in PIECES:
                while torch.cuda.mem_get_info()[0] - room > piece:
                    kept.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
            free = torch.cuda.mem_get_info()[0]
    finally:
        os.write(tell, f"free {free}".encode())
    while True:
        signal.pause()


def _try_out(room: int, held: str, device: str, report: Report) -> None:
    kind = "cpu" if device == "cpu" else "cuda"
    for name, act in steps(kind).items():
        error = raised_by(act)
        if error is not None:
            described = describe_exception(error, reserved_fraction=reserved_share())
            finding = judged(described, limit_set=True, device=device)
            report(room_bytes=room, held=held, failed_at=name, **finding)
            return
    report(room_bytes=room, held=held, failed_at=None, after=counters())


if __name__ == "__main__":
    serve(main)
