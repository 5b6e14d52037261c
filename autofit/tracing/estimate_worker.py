"""The child that answers "how much memory": many configurations of a model after one import of the libraries.

Request:  `{"requests": [TraceRequest, ...], "batches": [1, 2, 4], "workers": 1, "patience_seconds": None}`; all but the first may be left
          out. `batch` of a request is used only where no law can be made; after `patience_seconds` no further trace begins.
Answer:   `{"answers": [{"key", "law", "costs", "trace", "reason"}, ...]}`, in the order of the requests. `law` is a `MemoryLaw` and `costs`
          a `CostLaw` as JSON; where the traces do not make a law, `trace` is the one at the request's own batch; where nothing
          can be traced all three are None. `reason` says why there is no law, for the closed formula to answer instead.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autofit.errors import AutofitError, UserError
from autofit.memory.events import Trace
from autofit.memory.law import MemoryLaw, NotAffine
from autofit.memory.request import OUT_OF_PATIENCE, TraceRequest, TraceUnavailable
from autofit.memory.roofline import CostLaw
from autofit.tracing.fork import outcomes
from autofit.tracing.shared import Task, traces_of

BATCHES = (1, 2, 4)


class Reporter(Protocol):
    """What hears of progress: a worker's channel."""

    def enter(self, phase: str, *, send: bool = True) -> None:
        """`phase` begins."""


def answer_estimate(payload: Mapping[str, Any], channel: Reporter | None = None) -> dict[str, Any]:
    """Answer one request document; see the module.

    Raises:
        UserError: a request that is impossible, or a model that cannot be built.
    """
    if channel is not None:
        channel.enter("trace")
    return {
        "answers": answer(
            [TraceRequest.from_json(data) for data in payload["requests"]],
            payload.get("batches") or BATCHES,
            workers=payload.get("workers") or 1,
            patience_seconds=payload.get("patience_seconds"),
        )
    }


def answer(
    requests: Sequence[TraceRequest],
    batches: Sequence[int] = BATCHES,
    *,
    workers: int = 1,
    patience_seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Laws, or the reasons why there are none, of the classes of `requests`.

    Args:
        requests: those that share a class share the answer.
        batches: to trace: two of at least 2 for the law, and 1 for itself.
        workers: processes that trace at a time.
        patience_seconds: no trace begins after this time; None = no limit.
    """
    classes = {request.class_key(): request for request in requests}
    pair = tuple(sorted(b for b in batches if b > 1)[:2])
    wanted = (*pair, 1) if 1 in batches else pair
    watch = None if patience_seconds is None else _Patience(time.monotonic(), patience_seconds)

    def run(tasks: Sequence[Task]) -> list[Trace | AutofitError]:
        copies = _workers_after_preparing(tasks[0].request, workers) if workers > 1 else 1
        return outcomes(functools.partial(_trace, watch=watch), tasks, workers=copies)

    answers = {
        key: {"key": key, **_law(classes[key], found)} for key, found in traces_of(classes, wanted, run)
    }
    return [answers[request.class_key()] for request in requests]


@dataclass(frozen=True, slots=True)
class _Patience:
    """When to stop; `begin` is a time of `time.monotonic`, which all processes of a machine share."""

    begin: float
    seconds: float

    def require(self) -> None:
        """Raise `TraceUnavailable` when the time is over."""
        if time.monotonic() - self.begin > self.seconds:
            raise TraceUnavailable(f"{OUT_OF_PATIENCE} {self.seconds:.0f} s")


def _workers_after_preparing(request: TraceRequest, workers: int) -> int:
    """Import, test and resolve once, before the copies are made; backward must not run before they are (see PyTorch's notes on fork).

    Returns:
        How many copies may be made: none in a process that has traced already.
    """
    from autofit.tracing import fake_device, run, subject

    del run  # imported for what it imports
    if fake_device.self_test() is not None or fake_device.is_installed():
        return 1
    subject.resolve(request.workload)
    return workers


def _trace(task: Task, *, watch: _Patience | None = None) -> Trace:
    from autofit.tracing.run import trace
    from autofit.workload.sources import first_line

    if watch is not None:
        watch.require()
    try:
        return trace(task.request, smooth=task.smooth, costs=task.costs)
    except (AutofitError, MemoryError):
        raise
    except Exception as error:  # models and collators run their own code, which may want a device or real numbers: a reason, like any other
        raise TraceUnavailable(f"{type(error).__name__}: {first_line(error)}") from error


def _law(request: TraceRequest, found: Sequence[Trace | AutofitError]) -> dict[str, Any]:
    """The law through the traces of one class, at the two batches and at 1."""
    nothing: dict[str, Any] = {"law": None, "costs": None, "trace": None, "reason": None}
    for outcome in found:
        if isinstance(outcome, UserError):
            raise outcome
    refused = next((outcome for outcome in found if isinstance(outcome, AutofitError)), None)
    if refused is not None:
        return nothing | {"reason": refused.message}
    low, high, *single = [trace for trace in found if isinstance(trace, Trace)]
    try:
        law = MemoryLaw.fit(low, high, single=single[0] if single else None)
        return nothing | {"law": law.to_json(), "costs": CostLaw.fit(low, high).to_json()}
    except NotAffine as error:
        trace = _trace(Task(request=request, smooth=False, costs=False))
        return nothing | {"trace": trace.to_json(), "reason": f"no law in the batch: {error}"}
