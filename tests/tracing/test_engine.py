"""Sums of gradients and scatters happen in place where, and only where, a card would do them in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.memory.events import Moment
from autofit.memory.trace_builder import TraceBuilder
from autofit.tracing.engine import EngineRules, calibrate
from autofit.tracing.tracer import StorageTracer

SIZE = 4 * 1000  # bytes of the tensors below


def _bytes_born_in_backward(make: Callable[[Tensor], Tensor], *, real: bool) -> list[int]:
    """Sizes of what is allocated in the backward of `make(x)`: by the profiler for real tensors, by the tracer for fake ones."""
    if real:
        loss = make(torch.ones(1000, requires_grad=True))
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            loss.backward()
        events = profile.profiler.kineto_results.events()
        born = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() >= SIZE]
        return sorted(born)
    builder = TraceBuilder()
    with FakeTensorMode() as mode:
        rules = EngineRules(calibrate("cpu"))
        tracer = StorageTracer(builder, device_type="cpu", engine=rules)
        with mode, tracer:
            loss = make(torch.ones(1000, requires_grad=True))
            before = len(builder._sizes)
            tracer.mark(Moment.BACKWARD)
            loss.backward()
        born = [n for n in builder._sizes[before:] if n >= SIZE]
        tracer.close()
    return sorted(born)


def _agree(make: Callable[[Tensor], Tensor]) -> None:
    assert _bytes_born_in_backward(make, real=False) == _bytes_born_in_backward(make, real=True)


def test_three_branches_are_summed_into_the_first() -> None:
    def branches(x: Tensor) -> Tensor:
        h = x * 2
        return (torch.sin(h) + torch.cos(h) + torch.exp(h)).sum()

    _agree(branches)


def test_a_gradient_that_is_still_used_elsewhere_is_not_overwritten() -> None:
    def residual(x: Tensor) -> Tensor:
        h = x * 2
        return (h + torch.tanh(torch.sin(h) * 3)).mul(2).sum()

    _agree(residual)


def test_a_gather_scatters_into_its_zeros() -> None:
    def gather(x: Tensor) -> Tensor:
        return (x * 2).view(10, 100).gather(1, torch.zeros(10, 3, dtype=torch.long)).sum()

    _agree(gather)


def test_indexing_accumulates_into_its_zeros() -> None:
    def pick(x: Tensor) -> Tensor:
        rows = torch.zeros(10, dtype=torch.long)
        return (x * 2).view(10, 100)[rows, rows].sum()

    _agree(pick)


def test_without_a_calibration_every_sum_is_out_of_place() -> None:
    rules = EngineRules(None)
    a = torch.ones(3)
    with torch.no_grad():
        assert rules.in_place(torch.ops.aten.add.Tensor, (a, a)) is None
