"""What a replay says of the steps after a trace, against traces that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.memory.allocator import OutOfDeviceMemory
from autofit.memory.events import Facts, Kind, Moment, Trace
from autofit.memory.law import MemoryLaw
from autofit.memory.repetition import Repetition, repetition_of
from autofit.memory.replay import MOST_REPEATS, min_capacity, replay, survives
from autofit.memory.trace_builder import TraceBuilder
from autofit.problem.config import Precision
from autofit.tracing.record import trace_step
from tests.tracing.child import in_child
from tests.tracing.subjects import ARCHITECTURES, make_subject, settings_for

MIB = 1 << 20
LARGE = st.lists(st.integers(MIB + 1, 40 * MIB), min_size=1, max_size=5)


def trained(
    steps: int, *, batches: Sequence[int], saved: Sequence[int], scratch: Sequence[int], states: Sequence[int] = (), end: bool = True
) -> Trace:
    """A training whose batches, and the first of what a forward saves, are dropped in the step after."""
    builder, kept, state = TraceBuilder(), list[int](), list[int]()
    weights = [builder.alloc(5 * MIB, "parameter", Kind.WEIGHTS)]
    for step in range(steps):
        builder.mark(Moment.INPUT, step=step)
        fetched = [builder.alloc(n, "aten._to_copy.default", Kind.INPUTS) for n in batches]
        builder.mark(Moment.FORWARD, step=step)
        for number in kept:
            builder.free(number)
        activations = [builder.alloc(n, "aten.mm.default") for n in saved]
        builder.mark(Moment.BACKWARD, step=step)
        gradient = builder.alloc(5 * MIB, "aten.mm.default", Kind.GRADIENTS)
        for number in activations[1:]:
            builder.free(number)
        builder.mark(Moment.UPDATE, step=step)
        state = state or [builder.alloc(n, "aten.zeros_like.default", Kind.OPTIMIZER_STATE) for n in states]
        for number in [builder.alloc(n, "aten.sqrt.default") for n in scratch]:
            builder.free(number)
        builder.mark(Moment.ZERO, step=step)
        builder.free(gradient)
        kept = [*fetched, *activations[:1]]
    if end:
        builder.mark(Moment.END, step=steps)
    for number in (*kept, *state, *weights):
        builder.free(number)
    return builder.build(Facts(batch=2, steps=steps))


def peaks(trace: Trace, capacity_bytes: int | None, *, expandable: bool) -> tuple[int, int] | None:
    """Of `trace` and the steps after it, where its last step can be repeated; None = out of memory."""
    try:
        seen = replay(
            trace.events, trace.sizes, capacity_bytes=capacity_bytes, expandable=expandable, again=repetition_of(trace)
        )
    except OutOfDeviceMemory:
        return None
    return seen.peak_allocated_bytes, seen.peak_reserved_bytes


@given(batches=LARGE, saved=LARGE, scratch=LARGE, states=LARGE, expandable=st.booleans(), part=st.floats(0, 1))
def test_two_steps_and_the_second_again_are_many_steps(
    batches: list[int], saved: list[int], scratch: list[int], states: list[int], expandable: bool, part: float
) -> None:
    how: dict[str, Any] = {"batches": batches, "saved": saved, "scratch": scratch, "states": states}
    two, many = trained(2, **how), trained(2 + MOST_REPEATS, **how, end=False)
    free = peaks(many, None, expandable=expandable)
    assert free is not None
    assert peaks(two, None, expandable=expandable) == free
    capacity = int(free[0] + part * (free[1] - free[0]))
    assert peaks(two, capacity, expandable=expandable) == peaks(many, capacity, expandable=expandable)


def growing() -> Trace:
    """Steps of which the third needs a segment that two did not."""
    return trained(2, batches=[2 * MIB], saved=[2 * MIB], scratch=[5 * MIB, 10 * MIB], states=[1])


def test_what_a_later_step_takes_is_predicted() -> None:
    trace = growing()
    two = replay(trace.events, trace.sizes)
    told = MemoryLaw.fit(trace, replace(trace, facts=replace(trace.facts, batch=4))).predict(2)
    assert told.peak_reserved_bytes > two.peak_reserved_bytes
    assert told.peak_allocated_bytes == two.peak_allocated_bytes


def test_what_the_step_before_left_dies_in_the_step_and_is_followed() -> None:
    found = repetition_of(trained(2, batches=[1, 2], saved=[3, 4], scratch=[5]))
    assert found is not None
    carried = dict(found.carried)
    assert len(carried) == 3  # two batches and an activation
    assert all(old < new for old, new in carried.items())


def test_a_trace_whose_end_is_not_marked_is_replayed_as_it_is() -> None:
    assert repetition_of(trained(2, batches=[1], saved=[2], scratch=[3], end=False)) is None
    assert repetition_of(trained(1, batches=[1], saved=[2], scratch=[3])) is None


def test_a_step_that_leaves_more_than_it_found_is_not_repeated() -> None:
    builder = TraceBuilder()
    for step in range(2):
        builder.mark(Moment.FORWARD, step=step)
        builder.alloc(7, "aten.mm.default")
    builder.mark(Moment.END, step=2)
    assert repetition_of(builder.build(Facts(batch=2))) is None


def test_a_step_that_leaves_nothing_is_repeated_as_it_is() -> None:
    builder = TraceBuilder()
    for step in range(2):
        builder.mark(Moment.FORWARD, step=step)
        builder.free(builder.alloc(7, "aten.mm.default"))
    builder.mark(Moment.END, step=2)
    assert repetition_of(builder.build(Facts(batch=2))) == Repetition(begin=2, end=4)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"arguments": {"optim": "adamw_torch_fused"}, "accumulation": 2}),
    "bert, fp16": ("bert", {"arguments": {"optim": "adafactor"}, "precision": Precision.FP16}),
    "t5, checkpointing, 8 bit": (
        "t5",
        {"arguments": {"optim": "adamw_bnb_8bit", "activation_checkpointing": True}, "precision": Precision.BF16},
    ),
}


def traced(name: str, how: dict[str, Any], steps: int) -> Trace:
    settings = replace(settings_for(batch=4, length=64, **how), steps=steps)
    return trace_step(make_subject(ARCHITECTURES[name], batch=4, length=64, device="cuda"), settings)


@pytest.mark.parametrize(("name", "how"), CASES.values(), ids=list(CASES))
def test_the_second_step_of_a_model_stands_for_those_after_it(name: str, how: dict[str, Any]) -> None:
    two, five = in_child(traced, name, how, 2), in_child(traced, name, how, 5)
    step = repetition_of(two)
    assert step is not None
    assert step.carried
    told, seen = replay(two.events, two.sizes, again=step), replay(five.events, five.sizes)
    assert told.peak_allocated_bytes == seen.peak_allocated_bytes
    assert told.peak_reserved_bytes == seen.peak_reserved_bytes


def test_what_survives_two_steps_and_thrashes_after_does_not_fit() -> None:
    trace = trained(2, batches=[12 * MIB], saved=[2 * MIB, 17 * MIB, 19 * MIB], scratch=[27 * MIB], states=[1])
    step, capacity = repetition_of(trace), 107 * MIB
    seen = replay(trace.events, trace.sizes, capacity_bytes=capacity, again=step)
    assert seen.thrashes
    assert seen.retries >= 2
    assert survives(trace.events, trace.sizes, capacity, again=step) is None
    assert survives(trace.events, trace.sizes, capacity) is not None
    least = min_capacity(trace.events, trace.sizes, again=step)
    assert min_capacity(trace.events, trace.sizes) < capacity < least <= 108 * MIB
