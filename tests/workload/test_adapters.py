"""Adapters on small models: what is trained, gradients that arrive under checkpointing, and what peft refuses in one line."""

from __future__ import annotations

import copy
import importlib.util
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from autofit.problem.adaptation import adaptation_of
from autofit.problem.config import Precision
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.workload import models
from autofit.workload.adapters import adapter_type, config_words, trained_in_full
from autofit.workload.batches import make_batch
from autofit.workload.construct import in_dtype
from autofit.workload.knobs import checkpointing_active, weight_dtype
from autofit.workload.objects import LiveObjects
from tests.refusals import refused
from tests.workload import tiny

peft = pytest.importorskip("peft", reason="peft is not installed")
TASKS = {"llama": "causal-lm", "gpt2": "causal-lm", "bert": "sequence-classification", "t5": "seq2seq-lm", "vit": "image-classification"}


def resolved(kind: str, **said: Any) -> models.ResolvedModel:
    workload = Workload(model=f"tiny {kind}", task=TASKS[kind], seq_len=None if kind == "vit" else 8, adaptation=adaptation_of(**said))
    return models.resolve_with(workload, LiveObjects(config=tiny.config(kind)))


def names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("kind", "said", "trained"),
    [
        ("llama", {"adapter": "lora", "rank": 4}, "lora_"),
        ("llama", {"adapter": "dora"}, "lora_"),
        ("gpt2", {"adapter": "ia3"}, "ia3_"),
        ("t5", {"adapter": "lora", "target": ["all-linear"]}, "lora_"),
    ],
)
def test_only_the_adapter_is_trained_and_facts_count_it_without_memory(kind: str, said: dict[str, Any], trained: str) -> None:
    found = resolved(kind, **said)
    facts, model = models.facts(found), models.build(found, device="cpu")
    assert all(trained in name for name in names(model))
    assert facts["n_trainable_params"] == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert facts["n_params"] == sum(p.numel() for p in model.parameters())
    assert facts["weights_bytes"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert facts["adapter"] == adapter_type(model)
    assert facts["class"] == type(model.get_base_model()).__name__


@pytest.mark.parametrize(("kind", "head"), [("bert", "classifier"), ("vit", "classifier")])
def test_a_new_head_is_trained_beside_the_adapter(kind: str, head: str) -> None:
    model = models.build(resolved(kind, adapter="lora", target=["all-linear"]), device="cpu")
    assert any(head in name and "lora_" not in name for name in names(model))


def test_digests_tell_models_with_and_without_adapters_apart() -> None:
    digests = [resolved("llama", **said).digest for said in ({}, {"adapter": "lora"}, {"adapter": "lora", "rank": 4})]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [("llama", {"adapter": "lora"}), ("gpt2", {"adapter": "ia3"}), ("bert", {"adapter": "dora"}), ("vit", {"adapter": "lora", "target": ["all-linear"]})],
)
def test_gradients_arrive_at_the_adapter_under_checkpointing(kind: str, said: dict[str, Any], reentrant: bool) -> None:
    """Switched on as `Trainer.train` does it; frozen embeddings must not cut the graph."""
    found = resolved(kind, **said)
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = models.build(found, device="cpu")
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.02)  # zero at first, and then nothing arrives at lora_A
        if checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        assert checkpointing_active(model) is checkpointing
        if kind == "vit" and checkpointing and reentrant:
            model.get_base_model().vit.embeddings.register_forward_hook(lambda _m, _i, out: out.requires_grad_())
        batch = make_batch(found, 2)
        model.eval()(**batch).loss.backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(g is not None and g.abs().max() > 0 for g in trained.values()), "a gradient did not arrive"
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        grads.append(trained)
    assert all(torch.allclose(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-7) for name in grads[0])


def test_16_bit_weights_leave_the_adapter_in_float32() -> None:
    named = models.build(resolved("llama", adapter="lora"), device="cpu", weight_dtype="bfloat16")
    assert {p.dtype for p in named.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in named.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert weight_dtype(named) == "bfloat16"


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], bias="all", trainable_token_indices=[1]),
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        peft.VeraConfig(target_modules=["q_proj"]),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_a_live_adapted_model_in_16_bit_is_one_that_was_loaded_in_16_bit_and_adapted(config: Any) -> None:
    def adapted(dtype: torch.dtype) -> Any:
        return peft.get_peft_model(AutoModelForCausalLM.from_config(tiny.config("llama", attention_bias=True), dtype=dtype), copy.deepcopy(config))

    def dtypes(model: Any) -> dict[str, torch.dtype]:
        return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}

    live = adapted(torch.float32)
    parameters = dict(live.named_parameters())
    assert dtypes(in_dtype(live, torch.bfloat16)) == dtypes(adapted(torch.bfloat16))
    assert all(p is parameters[name] for name, p in live.named_parameters()), "the user's optimizer knows these"


def test_a_live_model_keeps_the_dtypes_of_its_parts() -> None:
    model = AutoModelForCausalLM.from_config(tiny.config("llama"), dtype=torch.bfloat16)
    model.model.norm.to(torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    found = models.resolve_with(Workload(model="<live>"), LiveObjects(model=adapted))
    before = {name: p.dtype for name, p in adapted.named_parameters()}
    dtype = models.dtype_to_build(found, Precision.BF16)
    built = models.build(found, device="cpu", weight_dtype=dtype)
    assert {name: p.dtype for name, p in built.named_parameters()} == before
    assert models.facts(found)["weights_dtype"] == "bfloat16"


def test_an_adapter_may_be_put_on_a_live_model_but_not_on_an_adapter() -> None:
    plain = AutoModelForCausalLM.from_config(tiny.config("llama"))
    workload = Workload(model="<live>", adaptation=adaptation_of(peft_config=peft.LoraConfig(r=2, task_type="CAUSAL_LM")))
    model = models.build(models.resolve_with(workload, LiveObjects(model=plain)), device="cpu")
    assert adapter_type(model) == "LORA"
    again = models.resolve_with(workload, LiveObjects(model=model))
    with refused("has an adapter already", hint="leave the adapter out"):
        models.build(again, device="cpu")


def test_facts_of_a_live_model_under_an_adapter_are_those_of_a_built_one_and_leave_it_as_it_is() -> None:
    config = tiny.config("llama")
    workload = Workload(model="<live>", adaptation=adaptation_of(peft_config=peft.LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"])))
    live = AutoModelForCausalLM.from_config(config)
    live.model.embed_tokens.requires_grad_(False)
    names_before, frozen = names(live), [p.requires_grad for p in live.parameters()]
    found = models.facts(models.resolve_with(workload, LiveObjects(model=live)))
    built = models.facts(models.resolve_with(workload, LiveObjects(config=config)))
    told = ("n_params", "n_trainable_params", "adapter", "adapter_config", "weights_bytes")
    assert {name: found[name] for name in told} == {name: built[name] for name in told}
    assert (names(live), [p.requires_grad for p in live.parameters()]) == (names_before, frozen)


class Locked(torch.nn.Module):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = torch.nn.Linear(8, 8), threading.Lock()


def test_a_model_that_cannot_be_copied_is_looked_at_and_put_in_16_bit() -> None:
    config = peft.LoraConfig(r=2, target_modules=["linear"])
    workload = Workload(model="<live>", adaptation=adaptation_of(peft_config=config))
    assert models.facts(models.resolve_with(workload, LiveObjects(model_init=Locked)))["n_trainable_params"] == 32
    model = in_dtype(peft.get_peft_model(Locked(), config), torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("how", ["model", "model_init"])
def test_a_look_at_an_adapter_does_not_compute_with_the_weights(how: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    weight, before = model.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    given: dict[str, Any] = {"model": model} if how == "model" else {"model_init": lambda: model}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
    read: list[torch.device] = []
    for name in ("svd", "qr", "norm"):
        original = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda t, *a, original=original, **k: (read.append(t.device), original(t, *a, **k))[1])
    workload = Workload(model="<live>", adaptation=adaptation_of(peft_config=config))
    assert models.facts(models.resolve_with(workload, LiveObjects(**given)))["adapter"] == "LORA"
    assert {device.type for device in read} <= {"meta"}
    assert torch.equal(weight, before)


@pytest.mark.parametrize("how", ["model", "model_init"])
def test_an_adapter_that_reads_the_weights_is_looked_at_on_them(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = peft.get_peft_model

    def reads(model: Any, config: Any) -> Any:
        float(next(model.parameters()).sum())
        return original(model, config)

    monkeypatch.setattr(peft, "get_peft_model", reads)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    given: dict[str, Any] = {how: model if how == "model" else lambda: torch.nn.Sequential(torch.nn.Linear(8, 8).cpu())}
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights="olora")
    workload = Workload(model="<live>", adaptation=adaptation_of(peft_config=config))
    if how == "model_init":
        monkeypatch.setattr(models, "sketch", lambda objects: objects.model_init())
    assert models.facts(models.resolve_with(workload, LiveObjects(**given)))["n_trainable_params"] == 32
    assert torch.equal(model[0].weight, before), "OLoRA takes what it moves into the adapter out of the weights"


def test_a_live_model_is_not_quantised_here() -> None:
    workload = Workload(model="<live>", adaptation=adaptation_of(adapter="lora", quantize="4bit"))
    with refused("models that autofit builds", hint="BitsAndBytesConfig"):
        models.resolve_with(workload, LiveObjects(model=AutoModelForCausalLM.from_config(tiny.config("llama"))))


@pytest.mark.parametrize("said", [{"adapter": "lora", "target": ["nonsense"]}, {"adapter": "ia3", "target": ["nonsense"]}])
def test_unknown_target_modules_are_refused_with_those_that_there_are(said: dict[str, Any]) -> None:
    with refused("nonsense", hint="c_attn, c_fc, c_proj"):
        models.facts(resolved("gpt2", **said))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (peft.LoraConfig(inference_mode=True), "leaves nothing to train"),
        (peft.LoraConfig(target_modules="(("), "peft refuses the adapter: missing \\)"),
    ],
)
def test_a_peft_config_that_cannot_train_is_refused(config: Any, said: str) -> None:
    with refused(said):
        models.facts(resolved("gpt2", peft_config=config))


def test_a_config_without_a_kind_of_adapter_is_none() -> None:
    with refused("must be a PeftConfig, got PeftConfig"):
        adaptation_of(peft_config=peft.PeftConfig())


def test_the_head_that_peft_trains_in_full_is_not_quantised() -> None:
    model = models.build(resolved("bert"), device="meta")
    said = adaptation_of(peft_config=peft.LoraConfig(task_type="SEQ_CLS"), quantize="4bit")
    assert said is not None
    assert trained_in_full(model, said, Task.SEQUENCE_CLASSIFICATION) == ["classifier"]


def test_a_config_that_has_no_defaults_is_written_down_whole() -> None:
    words = config_words(peft.AdaLoraConfig(total_step=10, target_modules=["query"]))
    assert words["class"] == "AdaLoraConfig"
    assert words["options"]["total_step"] == 10
    assert words["options"]["target_modules"] == ["query"]
    assert "beta1" not in words["options"]


def test_an_architecture_that_peft_does_not_know_asks_for_targets() -> None:
    with refused("target_modules", hint="all-linear"):
        models.facts(resolved("vit", adapter="lora"))


def test_a_missing_peft_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved("llama", adapter="lora")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else real(name, *a))
    with refused("need peft, which is not installed", hint="pip install peft"):
        models.facts(found)


def test_what_a_user_has_to_write_down_is_what_differs_from_pefts_defaults() -> None:
    config = peft.LoraConfig(r=4, target_modules=["v", "q"], use_dora=True)
    assert config_words(config) == {"class": "LoraConfig", "options": {"r": 4, "target_modules": ["q", "v"], "use_dora": True}}


def test_frozen_parts_are_part_of_a_live_models_digest() -> None:
    model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    before = models.resolve_with(Workload(model="<live>"), LiveObjects(model=model)).digest
    model.get_input_embeddings().requires_grad_(False)
    assert models.resolve_with(Workload(model="<live>"), LiveObjects(model=model)).digest != before
