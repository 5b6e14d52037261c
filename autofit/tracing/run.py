"""`trace(request)`: the door to everything here."""

from __future__ import annotations

import functools

from autofit.memory.events import Trace
from autofit.memory.request import TraceRequest
from autofit.tracing import subject, trainer
from autofit.tracing.record import Runner, run_loop, trace_step


def trace(request: TraceRequest, *, smooth: bool = False, costs: bool = True) -> Trace:
    """Trace two optimizer steps of `request` on fake tensors. Child processes only.

    A Trainer of the user's own, by its class or by what it is given, is run itself; any other training goes through our loop.

    Args:
        request: what to train and how.
        smooth: make the trace fit for a law in the batch, see `kernels.Card`.
        costs: record the work of the last step.

    Raises:
        TraceUnavailable: it cannot be traced here, and why.
        UserError: the workload or the configuration is impossible.
    """
    own = subject.trainer_of(request)
    settings = subject.settings_of(request, smooth=smooth, costs=costs)
    run: Runner = run_loop if own is None else functools.partial(trainer.train, own[0], own[1])
    return trace_step(subject.subject_of(request), settings, run)
