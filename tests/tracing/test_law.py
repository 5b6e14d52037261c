"""Traces of real steps at two batches make a law that further traces obey exactly."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.memory.events import Kind, Moment, Trace
from autofit.memory.law import MemoryLaw
from autofit.memory.replay import replay
from autofit.memory.roofline import CostLaw
from autofit.problem.config import Precision
from autofit.tracing.record import trace_step
from tests.tracing.child import in_child
from tests.tracing.subjects import ARCHITECTURES, make_subject, settings_for

LENGTH = 128
CASES: dict[str, dict[str, Any]] = {
    "bert": {"arguments": {"optim": "adamw_torch_fused"}, "precision": Precision.BF16, "accumulation": 2},
    "gpt2": {
        "arguments": {"optim": "adafactor", "activation_checkpointing": True},
        "precision": Precision.FP16,
    },
    "falcon": {
        "arguments": {"optim": "adamw_torch_fused", "gradient_checkpointing": True},
        "precision": Precision.BF16,
    },
    "llama": {"arguments": {"optim": "adamw_bnb_8bit"}, "precision": Precision.FP32},
    "t5": {"arguments": {"optim": "sgd", "label_smoothing_factor": 0.1}, "precision": Precision.BF16},
    "vit": {"arguments": {"optim": "adamw_torch"}, "precision": Precision.PURE_BF16},
}


def traced(name: str, batch: int, *, smooth: bool = True) -> Trace:
    settings = settings_for(batch=batch, length=LENGTH, smooth=smooth, **CASES[name])
    return trace_step(make_subject(ARCHITECTURES[name], batch=batch, length=LENGTH, device="cuda"), settings)


@pytest.mark.parametrize("name", list(CASES))
def test_every_allocation_is_affine_in_the_batch(name: str) -> None:
    low, high = in_child(traced, name, 2), in_child(traced, name, 4)
    law = MemoryLaw.fit(low, high, single=in_child(traced, name, 1))
    for batch in (3, 7, 64):
        law.check(in_child(traced, name, batch))
    CostLaw.fit(low, high)


def test_a_law_never_promises_less_than_an_exact_trace() -> None:
    low, high, exact = (
        in_child(traced, "bert", 2),
        in_child(traced, "bert", 4),
        in_child(traced, "bert", 40, smooth=False),
    )
    told = MemoryLaw.fit(low, high).predict(40).peak_allocated_bytes
    real = replay(exact.events, exact.sizes).peak_allocated_bytes
    assert real <= told <= 1.005 * real


def test_a_trace_names_what_its_storages_hold() -> None:
    trace = in_child(traced, "bert", 2)
    held = {kind: sum(n for n, k in zip(trace.sizes, trace.kinds) if k is kind) for kind in Kind}
    weights = 4 * trace.facts.n_params
    assert held[Kind.WEIGHTS] == weights
    assert held[Kind.OPTIMIZER_STATE] == pytest.approx(2 * weights, rel=0.02)
    assert held[Kind.GRADIENTS] == 2 * weights  # made anew in each of the two steps
    assert held[Kind.INPUTS] == 2 * 2 * (2 * LENGTH * 8 * 2 + 2 * 8)
    assert held[Kind.AUTOCAST_COPIES] > 0


def test_the_phases_of_every_step_are_marked_in_order() -> None:
    trace = in_child(traced, "bert", 2)
    micro = [Moment.FORWARD, Moment.BACKWARD]
    step = [Moment.INPUT, *micro, *micro, Moment.CLIP, Moment.UPDATE, Moment.ZERO]
    assert [m.moment for m in trace.marks] == [Moment.MODEL, *step, *step, Moment.END]
    assert [m.micro_step for m in trace.marks if m.moment is Moment.FORWARD] == [0, 1, 0, 1]


def test_the_work_of_one_micro_step_and_one_update_is_recorded() -> None:
    trace = in_child(traced, "bert", 2)
    moments = {op.moment for op in trace.ops}
    assert moments == {Moment.FORWARD, Moment.BACKWARD, Moment.CLIP, Moment.UPDATE}
    products = [op for op in trace.ops if op.operator == "aten.addmm.default" and op.moment is Moment.FORWARD]
    feed_forward = 2 * 2 * LENGTH * 64 * 128
    assert {op.dtype for op in products} == {"bf16"}
    assert sum(op.flops == feed_forward for op in products) == 4  # up and down, two layers
    updates = [op for op in trace.ops if op.operator == "aten._fused_adamw_.default"]
    assert [op.nbytes >= 4 * 4 * trace.facts.n_params * 0.5 for op in updates].count(True) >= 1
