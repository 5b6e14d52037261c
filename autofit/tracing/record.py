"""From a subject to a `Trace`: the fake device, the patches and the loop, put together."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from autofit.memory.events import Facts, Trace
from autofit.memory.request import TraceUnavailable
from autofit.memory.trace_builder import TraceBuilder
from autofit.tracing import fake_device, kernels, patches
from autofit.tracing.engine import EngineRules, calibrate
from autofit.tracing.loop import TrainingLoop
from autofit.tracing.settings import StepSettings, StepSubject
from autofit.tracing.tracer import OperatorRefused, ScalarReader, StorageTracer

Runner = Callable[[StepSubject, StepSettings, StorageTracer], None]
EMPTIED_NOTE = "torch_empty_cache_steps: the cache is not emptied in the trace, what the allocator holds at its peak can be some percent more"
_UNSUPPORTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def prepare(device_type: str) -> None:
    """Make this process able to trace. Idempotent; child processes only.

    Raises:
        TraceUnavailable: the self-test of the fake device failed, or this is not a platform it is known on.
    """
    fake_device.require_platform()
    if device_type != "cuda":
        return
    reason = fake_device.self_test()
    if reason is not None:
        raise TraceUnavailable(reason)
    fake_device.install()
    kernels.register_missing_kernels()


@contextlib.contextmanager
def named_failures() -> Iterator[None]:
    """Turn what the fake mode cannot do into a `TraceUnavailable` that names the operator."""
    try:
        yield
    except OperatorRefused as error:
        raise TraceUnavailable(str(error)) from error
    except _UNSUPPORTED as error:
        operator = (
            next((str(a) for a in error.args if "aten" in str(a)), None) or str(error) or type(error).__name__
        )
        what = operator.strip().splitlines()[0].partition(". ")[0]  # after the first sentence come all backends there are
        raise TraceUnavailable(f"an operator has no fake kernel: {what} ({type(error).__name__})") from error


def build_model(mode: FakeTensorMode, device_type: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Run `make` so that every parameter is born on the fake device, without initialising weights."""
    with named_failures(), mode, ScalarReader(0), torch.device(device_type):
        model = make()
    return model


def run_loop(subject: StepSubject, settings: StepSettings, tracer: StorageTracer) -> None:
    """The default way to train: our own loop."""
    TrainingLoop(subject, settings, tracer).run()


def trace_step(
    make_subject: Callable[[FakeTensorMode], StepSubject], settings: StepSettings, run: Runner = run_loop
) -> Trace:
    """Trace `settings.steps` optimizer steps.

    Args:
        make_subject: builds model and batches under the given mode, see `build_model`.
        settings: how to train.
        run: trains, inside the fake mode and the tracer.

    Raises:
        TraceUnavailable: this cannot be traced, and why.
    """
    prepare(settings.device_type)
    # A fallback would run the operator on real tensors of the same size, on the device.
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    builder = TraceBuilder()
    with mode:
        engine = EngineRules(calibrate(settings.device_type))
    card = kernels.Card(capability=settings.capability, smooth=settings.smooth)
    tracer = StorageTracer(
        builder,
        device_type=settings.device_type,
        card=card if settings.device_type == "cuda" else None,
        padded=settings.padded,
        engine=engine,
    )
    with named_failures(), warnings.catch_warnings(), patches.applied(settings.capability) as routes:
        warnings.simplefilter("ignore")  # the libraries' advice on a run that is none
        subject = make_subject(mode)
        with mode, tracer, _no_collector():
            run(subject, settings, tracer)
        if settings.arguments.get("torch_empty_cache_steps"):
            tracer.notes.add(EMPTIED_NOTE)
        facts = facts_of(subject.model, settings, routes, tracer)
        trace = builder.build(facts)
        tracer.close()
    return trace


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Cycles must die by the loop's own hand, or the trace depends on the collector's mood. Where a library calls it, it looks at what is new:
    through the user's data and all that is imported it would take longer than the trace."""
    collecting, thaws = gc.isenabled(), not gc.get_freeze_count()  # a fork server's copies come frozen: what they free must not stay
    gc.disable()
    if thaws:
        gc.freeze()
    try:
        yield
    finally:
        if thaws:
            gc.unfreeze()
        if collecting:
            gc.enable()


def facts_of(model: nn.Module, settings: StepSettings, routes: Counter[str], tracer: StorageTracer) -> Facts:
    """What was traced, in the words of the trace format."""
    return Facts(
        batch=settings.batch,
        seq_len=settings.seq_len,
        accumulation=settings.accumulation,
        steps=settings.steps,
        n_params=sum(p.numel() for p in model.parameters()),
        sdpa=dict(routes),
        notes=tuple(sorted(tracer.notes)),
    )
