"""The real Trainer under the fake mode, against our own loop."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import Trainer

from autofit.memory.events import Trace
from autofit.memory.replay import replay
from autofit.memory.request import TraceUnavailable
from autofit.problem.config import Precision
from autofit.tracing import trainer
from autofit.tracing.record import trace_step
from tests.tracing.child import in_child
from tests.tracing.subjects import ARCHITECTURES, make_subject, settings_for

BATCH, LENGTH = 4, 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("bert", {"arguments": {"optim": "adamw_torch"}}),
    "bf16, two micro-steps": (
        "gpt2",
        {"arguments": {"optim": "adamw_torch_fused"}, "precision": Precision.BF16, "accumulation": 2},
    ),
    "fp16, checkpointing": (
        "llama",
        {"arguments": {"optim": "adafactor", "activation_checkpointing": True}, "precision": Precision.FP16},
    ),
    "label smoothing, 8 bit, no clipping": (
        "t5",
        {"arguments": {"optim": "adamw_bnb_8bit", "label_smoothing_factor": 0.1, "max_grad_norm": 0.0}},
    ),
}
_FLAGS = {Precision.BF16: {"bf16": True}, Precision.FP16: {"fp16": True}}


class HoardingTrainer(Trainer):
    """A user's Trainer that keeps the logits of the last micro-step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        self.kept = outputs["logits"]
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def traced(name: str, how: dict[str, Any], cls: type[Trainer] | None) -> Trace:
    options = dict(how)
    flags = _FLAGS.get(options.get("precision", Precision.FP32), {})
    options["arguments"] = {**options["arguments"], **flags}
    settings = settings_for(batch=BATCH, length=LENGTH, **options)
    make = make_subject(ARCHITECTURES[name], batch=BATCH, length=LENGTH, device="cuda")
    if cls is None:
        return trace_step(make, settings)
    return trace_step(make, settings, functools.partial(trainer.train, cls, {}))


def _births(trace: Trace) -> Counter[tuple[str, str, int]]:
    return Counter(
        (str(trace.mark_at(i).moment), trace.operator(event), trace.sizes[event])
        for i, event in enumerate(trace.events)
        if event >= 0
    )


@pytest.mark.parametrize(("name", "how"), CASES.values(), ids=list(CASES))
def test_the_plain_trainer_makes_the_same_storages_as_our_loop(name: str, how: dict[str, Any]) -> None:
    ours, theirs = in_child(traced, name, how, None), in_child(traced, name, how, Trainer)
    assert _births(ours) == _births(theirs)
    a, b = (replay(t.events, t.sizes) for t in (ours, theirs))
    assert a.peak_allocated_bytes == pytest.approx(b.peak_allocated_bytes, abs=64 * 1024)
    assert a.peak_reserved_bytes == b.peak_reserved_bytes
    assert [op.operator for op in ours.ops] == [op.operator for op in theirs.ops]


def test_what_a_users_trainer_keeps_is_seen() -> None:
    how: dict[str, Any] = {"arguments": {"optim": "sgd"}, "accumulation": 2}
    plain, own = in_child(traced, "gpt2", how, Trainer), in_child(traced, "gpt2", how, HoardingTrainer)
    logits = BATCH * LENGTH * 512 * 4
    gap = (
        replay(own.events, own.sizes).peak_allocated_bytes
        - replay(plain.events, plain.sizes).peak_allocated_bytes
    )
    assert gap >= 0.9 * logits


def _refused(name: str, value: Any) -> str:
    try:
        traced("bert", {"arguments": {"optim": "sgd", name: value}}, Trainer)
    except TraceUnavailable as error:
        return error.message
    return ""


@pytest.mark.parametrize(("name", "value"), [("torch_compile", True), ("use_liger_kernel", True)])
def test_what_a_trace_cannot_show_is_refused_by_name(name: str, value: Any) -> None:
    assert in_child(_refused, name, value).startswith(f"{name}: ")


@pytest.mark.parametrize("cls", [None, Trainer], ids=["loop", "trainer"])
def test_an_emptied_cache_is_said_not_to_be_in_the_trace(cls: type[Trainer] | None) -> None:
    plain, emptied = (in_child(traced, "bert", {"arguments": {"optim": "sgd", **more}}, cls) for more in ({}, {"torch_empty_cache_steps": 1}))
    assert plain.facts.notes == ()
    assert any("torch_empty_cache_steps" in note for note in emptied.facts.notes)


def test_nothing_is_left_in_accelerates_state() -> None:
    how: dict[str, Any] = {"arguments": {"optim": "sgd"}}
    assert in_child(_device_after, how) == "cpu"


def _device_after(how: dict[str, Any]) -> str:
    from accelerate import PartialState

    traced("bert", how, Trainer)
    device: torch.device = PartialState(cpu=True).device
    PartialState._reset_state()
    return device.type
