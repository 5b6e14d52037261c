"""Knobs of `--tune` in real trials: each is proved to have taken effect, and one that did not is no measurement."""

from __future__ import annotations

import io
import os
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    modeling_utils,
)

from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.processes.objects import ObjectFile
from autofit.processes.protocol import TrialOrder
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest
from autofit.trials.soundness import unsound
from autofit.trials.trial import Reason
from autofit.workload.compilation import PATIENCE, CompileWatch
from autofit.workload.effects import EffectWitness, checkpointed_every, runs_liger
from autofit.workload.extras_facts import (
    attention,
    every_n_layers,
    extras_facts,
    liger_problem,
    offload_problem,
)
from autofit.workload.trial import run_trial
from tests import training

PLAIN = TrialConfig(per_device_train_batch_size=4)


def tiny(layers: int = 4) -> BertConfig:
    """A config of its own: choosing an attention writes to it."""
    return BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64)


class Net(nn.Module):
    """What compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (torch.tanh(self.layer(x)).squeeze(-1) - labels).square().mean()}


def trial(config: TrialConfig, **objects: Any) -> Measurement:
    """A real trial, run here."""
    with ObjectFile(objects or {"model": tiny()}) as file:
        workload = Workload(model="<bert>", task="sequence-classification", seq_len=16, objects_path=file.path)
        request = TrialRequest(config=config, window_seconds=0.1)
        return run_trial(TrialOrder(request=request, workload=workload.to_json(), device="cpu"), Channel(io.BytesIO()))


def facts_of(measurement: Measurement) -> tuple[dict[str, Any], dict[str, Any]]:
    facts = measurement.facts or {}
    return facts["asked"], facts["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_asked_for_is_in_the_config_and_in_the_modules_that_ran(implementation: str) -> None:
    asked, seen = facts_of(found := trial(PLAIN.but(extra=(("attn_implementation", implementation),))))
    assert asked["attn_implementation"] == seen["attn_implementation"] == implementation
    assert unsound(found) is None


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 4])
def test_only_every_nth_layer_is_checkpointed(every: int) -> None:
    config = PLAIN.but(gradient_checkpointing=True, extra=(("every_n_layers", every),))
    asked, seen = facts_of(found := trial(config))
    assert asked["every_n_layers"] == seen["every_n_layers"] == every
    assert unsound(found) is None


@pytest.mark.slow
def test_a_compiled_trial_measures_no_compilation() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    config = PLAIN.but(extra=(("torch_compile", True),))
    found = trial(config, model=Net(), train_dataset=training.Rows())
    asked, seen = facts_of(found)
    assert asked["torch_compile"] is seen["torch_compile"] is True
    assert seen["autocast_dtype"] is None
    compiled = (found.facts or {})["compile"]
    assert compiled["graphs"] >= 1
    assert compiled["steps_left_out"] >= 1
    assert compiled["measured_steps_that_compiled"] == 0
    assert compiled["seconds"] > 10 * max(found.micro_step_seconds)
    assert unsound(found) is None


def test_attention_that_a_module_did_not_take_is_no_measurement() -> None:
    model = BertForSequenceClassification(tiny())
    config = PLAIN.but(extra=(("attn_implementation", "eager"),))
    model.set_attn_implementation("eager")
    witness = EffectWitness(_Holder(model), config)  # type: ignore[arg-type]
    model.bert.encoder.layer[1].attention.self.config = BertConfig(attn_implementation="sdpa")
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    asked, seen = witness.facts(model)
    assert seen["attn_implementation"] == "eager, sdpa"
    failure = unsound(Measurement(micro_step_seconds=(1.0,), optimizer_steps=2, facts={"asked": asked, "seen": seen}))
    assert failure is not None
    assert failure.reason is Reason.KNOB_WITHOUT_EFFECT
    witness.busy()
    assert all(not module._forward_pre_hooks for module in model.modules())


class _Arguments:
    torch_compile = False


class _Holder:
    """As much of a Trainer as a witness looks at."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.args = model, _Arguments()


def test_the_pattern_of_checkpointed_layers_is_read_from_the_model() -> None:
    model = BertForSequenceClassification(tiny())
    assert checkpointed_every(nn.Linear(1, 1)) is None
    assert checkpointed_every(model) == 0
    for every in (1, 2, 4):
        model.activation_checkpointing_enable(every_n_layers=every)
        assert checkpointed_every(model) == every
    model.bert.encoder.layer[1].gradient_checkpointing = True
    assert checkpointed_every(model) == 0


def test_offloading_is_counted_where_it_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Context:
        def __init__(self, **kwargs: Any) -> None: ...

        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Context)
    model = BertForSequenceClassification(tiny())
    config = PLAIN.but(gradient_checkpointing=True, extra=(("offload", True),))
    witness = EffectWitness(_Holder(model), config)  # type: ignore[arg-type]
    assert witness.facts(model)[1]["offload"] is False
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False}, offload=True)
    model.train()(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.tensor([0])).loss.backward()
    assert entered
    assert witness.facts(model)[1]["offload"] is True


def test_foreign_kernels_are_recognised_by_where_they_come_from() -> None:
    plain, patched = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__ = "liger_kernel.ops.rms_norm"
    patched.forward = forward.__get__(patched)  # type: ignore[method-assign]
    assert not runs_liger(plain)
    assert runs_liger(nn.Sequential(plain, patched))


class TestCompileWatch:
    """Steps that compile are left out, as long as patience lasts."""

    @pytest.fixture
    def graphs(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        count = [5]
        monkeypatch.setattr(CompileWatch, "_graphs", lambda self: count[0])
        return count

    def test_a_step_that_compiled_is_left_out_and_the_next_is_not(self, graphs: list[int]) -> None:
        watch = CompileWatch(active=True)
        graphs[0] += 2
        assert [watch.busy(), watch.busy(), watch.busy()] == [True, False, False]
        assert watch.graphs == 2

    def test_one_that_never_ends_is_measured_in_the_end_and_told(self, graphs: list[int]) -> None:
        watch, left_out = CompileWatch(active=True), []
        for _ in range(PATIENCE + 3):
            graphs[0] += 1
            left_out.append(watch.busy())
        assert left_out == [True] * PATIENCE + [False] * 3
        assert watch.facts()["compile"]["measured_steps_that_compiled"] == 3

    def test_without_compilation_nothing_is_looked_at(self) -> None:
        watch = CompileWatch(active=False)
        assert not watch.busy()
        assert watch.facts() == {}
        assert watch.graphs == 0


class TestFacts:
    """What the space can be widened by, and why not the rest."""

    def test_an_encoder_on_the_cpu(self) -> None:
        found = extras_facts(BertForSequenceClassification(tiny()))
        assert found["attn"] == {"problem": None, "values": ["eager", "sdpa"], "default": "sdpa"}
        assert found["every_n_layers"] == {"problem": None, "values": [2, 4]}
        assert "no CUDA device" in found["offload"]["problem"]
        assert found["liger"]["problem"] is not None

    def test_a_model_without_attention_has_nothing_to_choose(self) -> None:
        config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
        found = attention(ResNetForImageClassification(config))
        assert "no attention implementation beside" in found["problem"]

    def test_a_plain_module_has_none_of_the_librarys_knobs(self) -> None:
        module = nn.Linear(1, 1)
        assert "is no transformers model" in attention(module)["problem"]
        assert "does not implement gradient checkpointing" in every_n_layers(module)["problem"]
        assert offload_problem(module) is not None
        assert liger_problem(module) is not None

    def test_one_layer_cannot_be_checkpointed_in_part(self) -> None:
        assert "has 1 layer that can be" in every_n_layers(BertForSequenceClassification(tiny(1)))["problem"]

    def test_what_the_users_own_arguments_set_is_not_searched(self) -> None:
        own = {"torch_compile": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
        found = extras_facts(BertForSequenceClassification(tiny()), own)
        assert "your own arguments set torch_compile" in found["compile"]["problem"]
        assert "your own arguments set every_n_layers" in found["every_n_layers"]["problem"]
