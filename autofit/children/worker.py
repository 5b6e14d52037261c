"""The child's side: read one request, say that it started, do it, answer once.

Runs in a process forked from the fork server or spawned afresh (`python -m autofit.children.worker REQUEST ANSWER LOG`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from autofit.errors import ScriptError, UserError
from autofit.processes.channel import Channel
from autofit.processes.failure import describe_exception
from autofit.processes.lifeline import die_with_parent
from autofit.processes.protocol import Event, Kind, decode_request
from autofit.processes.temporary import own_directory

PARALLEL_ELEMENTS = 1 << 18  #: above the size from which torch uses its thread pool


Handler = Callable[[dict[str, Any], Channel], dict[str, Any]]


def run(request_fd: int, answer_fd: int, log_fd: int) -> None:
    """Serve one request; everything that goes wrong in it becomes the answer."""
    _redirect_output(log_fd)
    _prefer_to_be_killed()
    own_directory()
    with os.fdopen(request_fd, "rb") as source:
        kind, payload = decode_request(source.read())
    with os.fdopen(answer_fd, "wb") as pipe:
        channel = Channel(pipe)
        try:
            if (
                kind is Kind.ESTIMATE
            ):  # computes nothing, forks workers of its own, and must not hold memory of the card it is asked about
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            else:
                _prove_threads_work()
            channel.send(Event.STARTED)
            answer: dict[str, Any] = {"payload": _handler(kind)(payload, channel)}
        except BaseException as error:
            _lift_limits()
            report = describe_exception(error, phase=channel.phase, reserved_fraction=_reserved_fraction())
            answer = {"error": report.to_json()}
            if isinstance(error, UserError):
                answer["user_error"] = {"message": error.message, "hint": error.hint}
            if isinstance(error, ScriptError):
                answer["user_error"]["traceback"] = error.traceback
        _lift_limits()
        channel.send(Event.ANSWER, **answer)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _handler(kind: Kind) -> Handler:
    if kind is Kind.TRIAL:
        from autofit.workload.trial import answer_trial

        return answer_trial
    if kind is Kind.DESCRIBE:
        from autofit.workload.describe import answer_describe

        return answer_describe
    if kind is Kind.CHECK:
        from autofit.workload.check import answer_check

        return answer_check
    from autofit.tracing.estimate_worker import answer_estimate

    return answer_estimate


def _redirect_output(log_fd: int) -> None:
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _prefer_to_be_killed() -> None:
    """When the machine runs out of memory, let the kernel take the trial and not its parent or a bystander."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as handle:
        handle.write("1000")


def _prove_threads_work() -> None:
    import torch

    torch.ones(PARALLEL_ELEMENTS).add_(1.0)


def _reserved_fraction() -> float | None:
    """Share of the allocator's limit that it holds (CUDA); None without a card in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    limit = total * torch.cuda.get_per_process_memory_fraction()
    return float(torch.cuda.max_memory_reserved() / limit) if limit else None


def _lift_limits() -> None:
    """Raise the soft limits that a trial lowered: an answer must not die of the trial's own limit."""
    import resource

    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        _, hard = resource.getrlimit(limit)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (hard, hard))


def main() -> None:
    """Entry of a spawned worker: `python -c 'from autofit.children.worker import main; main()' REQUEST ANSWER LOG PARENT`."""
    request, answer, log, parent = (int(a) for a in sys.argv[-4:])
    die_with_parent(parent)
    status = 1
    try:
        run(request, answer, log)
        status = 0
    finally:
        os._exit(status)
