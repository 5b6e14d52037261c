"""Traces of models of which only a part is trained: the peak of real CPU steps, and gradients and optimizer state for nothing but the trained part."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.memory.events import Kind, Trace
from autofit.memory.request import TraceRequest, TraceUnavailable
from autofit.problem.adaptation import adaptation_of
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.tracing.record import trace_step
from autofit.tracing.run import trace as trace_request
from autofit.tracing.settings import StepSubject
from autofit.tracing.subject import replace_tensors
from tests.tracing.child import in_child
from tests.tracing.subjects import (
    ARCHITECTURES,
    Architecture,
    model_bytes,
    real_peak,
    settings_for,
    traced_peak,
)

peft = pytest.importorskip("peft", reason="peft is not installed")
BATCH, LENGTH, TOLERANCE = 8, 64, 0.001
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "dora": {"peft_type": "LORA", "r": 4, "use_dora": True},
    "ia3": {"peft_type": "IA3"},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"arguments": {"optim": "adamw_torch"}},
    "checkpointing accumulation": {
        "arguments": {"optim": "adamw_torch", "activation_checkpointing": True},
        "accumulation": 2,
    },
    "bf16": {"arguments": {"optim": "adamw_torch_fused"}, "precision": Precision.BF16},
}


@dataclass(frozen=True, kw_only=True)
class Adapted(Architecture):
    """A small model of which a part is trained: an adapter, or all but the frozen names."""

    adapter: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        model = super().model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        if not self.adapter:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: nn.Module = peft.get_peft_model(model, peft.PeftConfig.from_peft_type(task_type="CAUSAL_LM", **self.adapter))
        return adapted


def _adapted(name: str, **options: Any) -> Adapted:
    base = ARCHITECTURES[name]
    return Adapted(config=base.config, head=base.head, options=base.options, labels=base.labels, inputs=base.inputs, **options)


def _fake_subject(architecture: Architecture) -> Callable[[FakeTensorMode], StepSubject]:
    """As `tracing.subject` makes it: the adapter is put on without memory, because peft moves its layers."""

    def make(mode: FakeTensorMode) -> StepSubject:
        with torch.device("meta"):
            model = architecture.model()
        with mode:
            replace_tensors(model, "cpu")
        return StepSubject(model=model, make_batch=functools.partial(architecture.batch, BATCH, LENGTH))

    return make


def _bytes(trace: Trace, kind: Kind) -> int:
    """Most bytes of one kind that live at once."""
    level = most = 0
    for event in trace.events:
        index = event if event >= 0 else ~event
        if trace.kinds[index] is kind:
            level += trace.sizes[index] if event >= 0 else -trace.sizes[index]
            most = max(most, level)
    return most


def _compare(architecture: Architecture, how: str) -> None:
    settings = settings_for(batch=BATCH, length=LENGTH, device_type="cpu", costs=False, **CONFIGURATIONS[how])
    trace = trace_step(_fake_subject(architecture), settings)
    expected = real_peak(architecture, settings, batch=BATCH, length=LENGTH)
    told, loaded = traced_peak(trace), model_bytes(trace)
    assert abs(told - expected) <= TOLERANCE * (expected + loaded), f"traced {told}, real {expected}"
    trained = [p for p in architecture.model().parameters() if p.requires_grad]
    assert _bytes(trace, Kind.GRADIENTS) == sum(4 * p.numel() for p in trained)
    # two moments per trained value, and a counter of steps per tensor
    assert _bytes(trace, Kind.OPTIMIZER_STATE) == sum(8 * p.numel() + 4 for p in trained)


@pytest.mark.parametrize(("adapter", "how"), [("lora", "bf16"), ("dora", "plain"), ("ia3", "checkpointing accumulation")])
def test_an_adapter_has_the_peak_of_real_steps_and_state_for_itself_alone(adapter: str, how: str) -> None:
    _compare(_adapted("llama", adapter=ADAPTERS[adapter]), how)


@pytest.mark.slow
@pytest.mark.parametrize("how", CONFIGURATIONS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_adapter_and_configuration_has_the_peak_of_real_steps(adapter: str, how: str) -> None:
    _compare(_adapted("gpt2", adapter=ADAPTERS[adapter]), how)  # its embeddings and its head are tied


@pytest.mark.parametrize("how", ["plain", "bf16"])
def test_frozen_parts_have_neither_gradients_nor_state(how: str) -> None:
    _compare(_adapted("bert", frozen=("embeddings", "layer.0")), how)


def _request(**adaptation: Any) -> TraceRequest:
    workload = Workload(model="gpt2-mini-of-no-hub", task="causal-lm", seq_len=32, adaptation=adaptation_of(**adaptation))
    return TraceRequest(workload=workload, config=TrialConfig(per_device_train_batch_size=2), batch=2, device_type="cpu")


def _named(request: TraceRequest, name: str) -> TraceRequest:
    return TraceRequest.from_json({**request.to_json(), "workload": {**request.workload.to_json(), "model": name}})


def test_a_named_model_is_traced_under_its_adapter() -> None:
    plain = trace_request(_named(TraceRequest.from_json({**_request(adapter="lora").to_json(), "workload": {"model": "gpt2", "seq_len": 32}}), "gpt2"), costs=False)
    adapted = trace_request(_named(_request(adapter="lora", rank=8), "gpt2"), costs=False)
    assert adapted.facts.n_params == plain.facts.n_params + 12 * 8 * (768 + 3 * 768)
    assert _bytes(adapted, Kind.GRADIENTS) == 4 * 12 * 8 * (768 + 3 * 768)


@pytest.mark.parametrize("said", [{"adapter": "lora"}, {"adapter": "ia3"}, {"adapter": "dora"}])
def test_quantised_models_are_traced_under_lora_on_a_card_only_and_say_why(said: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    request = _named(_request(**said, quantize="4bit"), "gpt2")  # on a CPU
    with pytest.raises(TraceUnavailable, match="bitsandbytes"):
        trace_request(request, costs=False)
    if said["adapter"] != "lora":
        with pytest.raises(TraceUnavailable, match="bitsandbytes"):
            in_child(trace_request, replace(request, device_type="cuda"), costs=False)


def test_the_adapter_decides_the_class_of_a_law() -> None:
    keys = {_request(**kw).class_key() for kw in ({"adapter": "lora"}, {"adapter": "lora", "rank": 4}, {"adapter": "ia3"})}
    assert len(keys) == 3
