"""Steps of one trace with the updates of another: equal to the trace of both together, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.memory.events import Facts, Kind, Moment, Stairs, Trace
from autofit.memory.law import compare_structure
from autofit.memory.replay import replay
from autofit.memory.trace_builder import TraceBuilder
from autofit.memory.updates import NotSeparable, with_updates
from tests.memory.traces import SIZES

STEPS = 2


@dataclass(frozen=True)
class Optimizer:
    """Bytes that an update takes and keeps."""

    states: Sequence[int] = (512, 70_000)
    scratch: Sequence[int] = (1 << 21,)
    drops_the_flag: bool = False
    drops_a_gradient: bool = False
    keeps_until_forward: bool = False
    note: str = "of the optimizer"


@dataclass(frozen=True)
class Model:
    """Bytes of the rest."""

    weights: Sequence[int] = (4096, 1 << 20)
    activations: Sequence[int] = (1000, 3 << 20)
    norms: Sequence[int] = (512,)
    accumulation: int = 1
    notes: tuple[str, ...] = field(default=("of the model",))


def traced(model: Model, optimizer: Optimizer) -> Trace:
    """Two steps of a training, as the tracer would write them."""
    builder = TraceBuilder()
    builder.mark(Moment.MODEL)
    for size in model.weights:
        builder.alloc(size, "parameter", Kind.WEIGHTS)
    kept: list[int] = []
    states: list[int] = []
    for step in range(STEPS):
        gradients: list[int] = []
        for micro_step in range(model.accumulation):
            builder.mark(Moment.FORWARD, step=step, micro_step=micro_step)
            builder.forget_ops()
            for number in kept:
                builder.free(number)
            kept.clear()
            saved = [builder.alloc(n, "aten.mm.default", stairs=Stairs(grain=3, most=n + 5, later=n + 50, least=1)) for n in model.activations]
            builder.op("aten.mm.default", dtype="fp32", flops=8, nbytes=8)
            builder.mark(Moment.BACKWARD, step=step, micro_step=micro_step)
            gradients = gradients or [builder.alloc(n, "aten.mm.default", Kind.GRADIENTS) for n in model.weights]
            for number in saved:
                builder.free(number)
        builder.mark(Moment.CLIP, step=step)
        norms = [builder.alloc(n, "aten.norm.default") for n in model.norms]
        flag = builder.alloc(4, "aten.isinf.default")
        builder.op("aten.norm.default", dtype="fp32", flops=0, nbytes=4)
        builder.mark(Moment.UPDATE, step=step)
        if not states:
            states = [builder.alloc(n, "aten.zeros_like.default", Kind.OPTIMIZER_STATE) for n in optimizer.states]
        for size in optimizer.scratch:
            builder.free(builder.alloc(size, "aten.sqrt.default", Kind.WORKSPACE, stairs=Stairs(grain=1, most=size, later=1 << 40, least=0)))
            builder.op("aten.sqrt.default", dtype="fp32", flops=0, nbytes=size)
        if optimizer.drops_the_flag:
            builder.free(flag)
        if optimizer.drops_a_gradient:
            builder.free(gradients.pop())
        if optimizer.keeps_until_forward and step == 0:
            kept.append(builder.alloc(999, "aten.sum.default"))
        builder.mark(Moment.ZERO, step=step)
        builder.op("aten.zero_.default", dtype="fp32", flops=0, nbytes=1)
        for number in (*gradients, *norms, *(() if optimizer.drops_the_flag else (flag,))):
            builder.free(number)
    for number in states:
        builder.free(number)
    return builder.build(
        Facts(
            batch=2,
            accumulation=model.accumulation,
            steps=STEPS,
            n_params=sum(model.weights),
            notes=tuple(sorted({*model.notes, optimizer.note})),
        )
    )


BYTES = st.lists(SIZES, max_size=4)


@given(BYTES, st.sampled_from((1, 2)), st.builds(Optimizer, states=BYTES, scratch=BYTES), st.booleans())
def test_steps_with_other_updates_are_the_trace_of_both(
    activations: list[int], accumulation: int, optimizer: Optimizer, scaled: bool
) -> None:
    adam = Optimizer(states=(7, 7), drops_the_flag=scaled, note=optimizer.note)
    other = replace(optimizer, drops_the_flag=scaled)
    model = Model(activations=activations, accumulation=accumulation)
    made = with_updates(traced(model, adam), traced(Model(notes=model.notes), other))
    assert made == traced(model, other)


def test_the_answer_is_of_the_steps_and_names_what_makes_either_uncertain() -> None:
    step = traced(Model(activations=(5,), notes=("attention",)), Optimizer(note="first"))
    made = with_updates(step, traced(Model(notes=("other attention",)), Optimizer(note="second")))
    assert made.facts == replace(step.facts, notes=("attention", "first", "other attention", "second"))
    compare_structure(made, step)


def test_a_trace_without_work_stays_without() -> None:
    bare = replace(traced(Model(), Optimizer()), ops=())
    assert with_updates(bare, traced(Model(), Optimizer(scratch=(9, 9)))).ops == ()


def test_what_an_update_takes_is_in_the_peak() -> None:
    small, large = Optimizer(scratch=()), Optimizer(scratch=(1 << 28,))
    made = with_updates(traced(Model(), small), traced(Model(), large))
    assert replay(made.events, made.sizes).peak_allocated_bytes > 1 << 28


@pytest.mark.parametrize(
    ("model", "optimizer", "reason"),
    [
        (Model(weights=(4096,)), Optimizer(), "the models are not the same"),
        (Model(norms=(512, 512)), Optimizer(), "gradients are not clipped in the same way"),
        (Model(norms=(1024,)), Optimizer(), "gradients are not clipped in the same way"),
        (Model(), Optimizer(drops_the_flag=True), "do not end the lives of the same storages"),
        (Model(), Optimizer(drops_a_gradient=True), "an update ends the life of what aten.mm.default made"),
        (
            Model(),
            Optimizer(keeps_until_forward=True),
            "what aten.sum.default made in an update dies outside of one",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_updates_that_do_not_come_apart_are_refused(model: Model, optimizer: Optimizer, reason: str) -> None:
    plain, odd = traced(Model(), Optimizer()), traced(model, optimizer)
    for step, updates in ((plain, odd), (odd, plain)):
        with pytest.raises(NotSeparable, match=reason):
            with_updates(step, updates)


def test_a_trace_without_marked_updates_is_refused() -> None:
    trace = traced(Model(), Optimizer())
    unmarked = replace(trace, marks=tuple(m for m in trace.marks if m.moment is not Moment.UPDATE))
    with pytest.raises(NotSeparable, match="0 updates are marked in 2 steps"):
        with_updates(unmarked, trace)
