"""The child that answers "how much memory": many configurations of a model in one process, one import of the libraries.

Request:  `{"requests": [TraceRequest, ...], "batches": [1, 2, 4]}`; `batches` may be left out. `batch` of a request is used only where
          no law can be made. `workers` processes trace at a time (1 when left out).
Answer:   `{"answers": [{"key", "law", "costs", "trace", "reason", "seconds"}, ...]}`, in the order of the requests. `law` is a
          `MemoryLaw` and `costs` a `CostLaw` as JSON; where the traces do not make a law, `trace` is the one at the request's own
          batch; where nothing can be traced both are None and `reason` says why, for the closed formula to answer instead.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from autofit.memory.law import MemoryLaw, NotAffine
from autofit.memory.roofline import CostLaw
from autofit.memory.trace.request import TraceRequest, TraceUnavailable

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
    batches = tuple(payload.get("batches") or BATCHES)
    requests = {r.class_key(): r for r in map(TraceRequest.from_json, payload["requests"])}
    workers = min(int(payload.get("workers") or 1), len(requests))
    if workers > 1:
        # Forked from a process that has done nothing but import: no thread pool, no patched device is inherited.
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            found = pool.starmap(answer, [(request, batches) for request in requests.values()], chunksize=1)
    else:
        found = []
        for request in requests.values():
            if channel is not None:
                channel.enter(f"trace {request.config.label()}")
            found.append(answer(request, batches))
    answers = {key: {"key": key, **one} for key, one in zip(requests, found)}
    keys = [TraceRequest.from_json(data).class_key() for data in payload["requests"]]
    return {"answers": [answers[key] for key in keys]}


def answer(request: TraceRequest, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Law, cost law, or the reason why there is none, of one class of configurations.

    Args:
        request: its class; its `batch` matters only where the traces make no law.
        batches: to trace: two of at least 2 for the law, and 1 for itself.
    """
    begin = time.monotonic()
    found: dict[str, Any] = {"law": None, "costs": None, "trace": None, "reason": None}
    try:
        found |= _law(request, batches)
    except TraceUnavailable as error:
        found["reason"] = error.message
    return {**found, "seconds": time.monotonic() - begin}


def _law(request: TraceRequest, batches: Sequence[int]) -> dict[str, Any]:
    from autofit.memory.trace.run import trace

    try:
        low, high = (
            trace(replace(request, batch=b), smooth=True) for b in sorted(b for b in batches if b > 1)[:2]
        )
        single = trace(replace(request, batch=1), costs=False) if 1 in batches else None
        law = MemoryLaw.fit(low, high, single=single)
        return {"law": law.to_json(), "costs": CostLaw.fit(low, high).to_json()}
    except NotAffine as error:
        return {"trace": trace(request).to_json(), "reason": f"no law in the batch: {error}"}
