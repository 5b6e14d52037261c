"""What is said of adapters and quantised weights: what contradicts itself is refused, files of before still load, and identities tell adapters apart."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.problem.adaptation import (
    DEFAULT_RANK,
    Adaptation,
    AdapterKind,
    Quantization,
    adaptation_of,
    peft_config_json,
    refuse_on_device,
)
from autofit.problem.capabilities import Capabilities, precision_problem
from autofit.problem.config import Precision
from autofit.problem.numerics import precision_change
from autofit.problem.spec import Workload
from tests.refusals import refused


class Kind(Enum):
    LORA = "LORA"


@dataclass
class Config:
    """Looks like a `PeftConfig`."""

    peft_type: Kind = Kind.LORA
    r: int = 4
    target_modules: set[str] = field(default_factory=lambda: {"v", "q"})
    use_dora: bool = False

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


@st.composite
def adaptations(draw: st.DrawFn) -> Adaptation:
    kind = draw(st.sampled_from(AdapterKind))
    return Adaptation(
        adapter=kind,
        rank=None if kind is AdapterKind.IA3 else draw(st.one_of(st.none(), st.integers(1, 256))),
        target=draw(st.one_of(st.none(), st.tuples(st.text(min_size=1), st.text(min_size=1)))),
        quantization=draw(st.one_of(st.none(), st.sampled_from(Quantization))),
    )


@given(adaptations())
def test_json_round_trips_alone_and_in_a_workload(adaptation: Adaptation) -> None:
    assert Adaptation.from_json(json.loads(json.dumps(adaptation.to_json()))) == adaptation
    workload = Workload(model="gpt2", adaptation=adaptation)
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


def test_a_workload_of_before_adapters_loads_and_keeps_its_identity() -> None:
    before = {"model": "gpt2", "task": None, "seq_len": 8, "trust_remote_code": False, "attn_implementation": None, "objects_path": None}
    workload = Workload.from_json(before)
    assert workload.adaptation is None
    assert workload.identity() == Workload(model="gpt2", seq_len=8).identity()
    assert "adaptation" not in json.dumps(before)


def test_identities_tell_adapters_ranks_and_storage_apart() -> None:
    said = [None, {"adapter": "lora"}, {"adapter": "lora", "rank": 4}, {"adapter": "dora"}, {"adapter": "lora", "quantize": "4bit"}]
    workloads = [Workload(model="gpt2", adaptation=None if s is None else adaptation_of(**s)) for s in said]
    assert len({w.identity() for w in workloads}) == len(said)


def test_nothing_said_is_no_adaptation_and_a_rank_has_a_default() -> None:
    assert adaptation_of() is None
    lora = adaptation_of(adapter="lora")
    assert lora is not None
    assert lora.rank == DEFAULT_RANK
    assert lora.label() == "lora of rank 16"
    quantised = adaptation_of(adapter="ia3", target=["all-linear"], quantize="8bit")
    assert quantised is not None
    assert quantised.label() == "ia3 on all-linear, base quantised to 8bit"


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ({"quantize": "4bit"}, "quantised to 4bit cannot be trained by itself", "--adapter lora"),
        ({"rank": 4}, "without an adapter", "--adapter"),
        ({"target": ["q"]}, "without an adapter", "--adapter"),
        ({"adapter": "qlora"}, "unknown adapter 'qlora'", "lora, dora, ia3"),
        ({"adapter": "lora", "quantize": "2bit"}, "unknown quantize '2bit'", "4bit, 8bit"),
        ({"adapter": "ia3", "rank": 4}, "IA3 has no rank", "lora"),
        ({"adapter": "lora", "rank": 0}, "between 1 and", None),
        ({"adapter": "lora", "peft_config": Config()}, "both given", "leave the other out"),
        ({"peft_config": 3}, "must be a PeftConfig, got int", "LoraConfig"),
        ({"peft_config": Config}, "must be a PeftConfig, got Config", "LoraConfig"),
    ],
)
def test_contradictions_are_refused(said: dict[str, Any], message: str, hint: str | None) -> None:
    with refused(message, hint=hint):
        adaptation_of(**said)


def test_a_peft_config_is_kept_as_canonical_json() -> None:
    assert json.loads(peft_config_json(Config())) == {"peft_type": "LORA", "r": 4, "target_modules": ["q", "v"], "use_dora": False}
    assert peft_config_json(Config(target_modules={"q", "v"})) == peft_config_json(Config(target_modules={"v", "q"}))
    with refused("it holds a object", hint="plain values"):
        peft_config_json(Config(r=object()))  # type: ignore[arg-type]


def test_a_device_that_cannot_is_refused_before_a_trial() -> None:
    four = adaptation_of(adapter="lora", quantize="4bit")
    refuse_on_device(four, "cpu", ["cpu", "cuda"])
    refuse_on_device(four, "cpu", None)
    refuse_on_device(None, "cpu", [])
    with refused("runs quantised layers on cuda, not on cpu", hint="--quantize"):
        refuse_on_device(four, "cpu", ["cuda"])
    for said in ({"adapter": "dora"}, {"peft_config": Config(use_dora=True)}):
        eight = adaptation_of(**said, quantize="8bit")  # type: ignore[arg-type]
        with refused("DoRA on 8-bit layers fails on a CPU", hint="4bit"):
            refuse_on_device(eight, "cpu", ["cpu", "cuda"])
        refuse_on_device(eight, "cuda", ["cpu", "cuda"])


def _caps(**facts: Any) -> Capabilities:
    everything = tuple(Precision)
    return Capabilities(**{"device_kind": "cuda", "precisions": everything, "optims": (), **facts})


def test_a_quantised_base_loses_pure_bf16_and_nothing_that_has_an_effect() -> None:
    removed = {p for p in Precision if precision_problem(p, _caps(quantization="4bit", adapter="LORA"))}
    assert removed == {Precision.PURE_BF16}
    assert "prepare_model_for_kbit_training" in str(precision_problem(Precision.PURE_BF16, _caps(quantization="4bit")))


def test_4_bit_layers_are_not_made_to_emulate_bf16() -> None:
    old_card = _caps(quantization="4bit", precisions=(Precision.FP32, Precision.FP16))
    assert precision_problem(Precision.FP16, old_card) is None
    assert "not native" in str(precision_problem(Precision.FP32, old_card))
    assert precision_problem(Precision.FP32, _caps(quantization="8bit", precisions=(Precision.FP32,))) is None


def test_16_bit_weights_under_an_adapter_are_another_change_than_trained_ones() -> None:
    assert "small updates are lost" in str(precision_change(Precision.PURE_BF16, None))
    assert "adapter and its updates stay in float32" in str(precision_change(Precision.PURE_BF16, None, adapter=True))
    assert precision_change(Precision.PURE_BF16, "bfloat16", adapter=True) is None
