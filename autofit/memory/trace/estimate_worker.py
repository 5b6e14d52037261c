"""The child that answers "how much memory": many configurations of a model after one import of the libraries.

Request:  `{"requests": [TraceRequest, ...], "batches": [1, 2, 4], "workers": 1}`; the last two may be left out. `batch` of a request is
          used only where no law can be made.
Answer:   `{"answers": [{"key", "law", "costs", "trace", "reason"}, ...]}`, in the order of the requests. `law` is a `MemoryLaw` and `costs`
          a `CostLaw` as JSON; where the traces do not make a law, `trace` is the one at the request's own batch; where nothing
          can be traced all three are None. `reason` says why there is no law, for the closed formula to answer instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from autofit.errors import AutofitError, UserError
from autofit.memory.events import Trace
from autofit.memory.law import MemoryLaw, NotAffine
from autofit.memory.roofline import CostLaw
from autofit.memory.trace.fork import outcomes
from autofit.memory.trace.request import TraceRequest

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
    requests = [TraceRequest.from_json(data) for data in payload["requests"]]
    batches = payload.get("batches") or BATCHES
    return {"answers": answer(requests, batches, workers=payload.get("workers") or 1)}


def answer(
    requests: Sequence[TraceRequest], batches: Sequence[int] = BATCHES, *, workers: int = 1
) -> list[dict[str, Any]]:
    """Laws, or the reasons why there are none, of the classes of `requests`.

    Args:
        requests: those that share a class share the answer.
        batches: to trace: two of at least 2 for the law, and 1 for itself.
        workers: processes that trace at a time.
    """
    classes = {request.class_key(): request for request in requests}
    single, pair = 1 in batches, tuple(sorted(b for b in batches if b > 1)[:2])
    tasks = [
        (replace(request, batch=b), b > 1)
        for request in classes.values()
        for b in (*pair, *((1,) if single else ()))
    ]
    if workers > 1:
        workers = _workers_after_preparing(tasks[0][0], workers)
    traces = iter(outcomes(_trace, tasks, workers=workers))
    answers = {}
    for key, request in classes.items():
        found = [next(traces) for _ in range(len(pair) + single)]
        answers[key] = {"key": key, **_law(request, found)}
    return [answers[request.class_key()] for request in requests]


def _workers_after_preparing(request: TraceRequest, workers: int) -> int:
    """Import, test and resolve once, before the copies are made; backward must not run before they are (see PyTorch's notes on fork).

    Returns:
        How many copies may be made: none in a process that has traced already.
    """
    from autofit.memory.trace import fake_device, run, subject

    del run  # imported for what it imports
    if fake_device.self_test() is not None or fake_device.is_installed():
        return 1
    subject.resolve(request.workload)
    return workers


def _trace(task: tuple[TraceRequest, bool]) -> Trace:
    from autofit.memory.trace.run import trace

    request, for_law = task
    return trace(request, smooth=for_law, costs=for_law)


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
        trace = _trace((request, False))
        return nothing | {"trace": trace.to_json(), "reason": f"no law in the batch: {error}"}
