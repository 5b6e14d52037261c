"""Quantised models with random weights: the layers that `from_pretrained` makes, the bytes that were planned, and steps that train on the CPU."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from autofit.problem.adaptation import Quantization, adaptation_of
from autofit.problem.config import Precision
from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile
from autofit.workload import models, quantised
from autofit.workload.batches import make_batch
from autofit.workload.knobs import weight_dtype
from autofit.workload.objects import LiveObjects, load_objects
from tests.refusals import refused
from tests.workload import tiny

peft = pytest.importorskip("peft", reason="peft is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
on_cpu = pytest.mark.skipif(
    "cpu" not in (quantised.supported_devices() or ()), reason="this bitsandbytes runs no quantised layers on a CPU"
)
LAYERS = {"4bit": bnb.nn.Linear4bit, "8bit": bnb.nn.Linear8bitLt}
TASKS = {"llama": "causal-lm", "gpt2": "causal-lm", "bert": "sequence-classification", "t5": "seq2seq-lm"}


def resolved(kind: str, quantize: str, *, adapter: str = "lora") -> models.ResolvedModel:
    adaptation = adaptation_of(adapter=adapter, rank=None if adapter == "ia3" else 4, target=["all-linear"], quantize=quantize)
    workload = Workload(model=f"tiny {kind}", task=TASKS[kind], seq_len=8, adaptation=adaptation)
    return models.resolve_with(workload, LiveObjects(config=tiny.config(kind)))


def real_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that a model's weights are made of."""
    total = 0
    for p in model.parameters():
        state = getattr(p, "quant_state", None)
        tables = [] if state is None else [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        tables += [p.SCB] if getattr(p, "SCB", None) is not None else []
        total += sum(t.numel() * t.element_size() for t in (p, *tables))
    return total


@on_cpu
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", TASKS)
def test_planned_bytes_are_those_of_the_built_model(kind: str, quantize: str) -> None:
    found = resolved(kind, quantize)
    facts, model = models.facts(found), models.build(found, device="cpu")
    assert facts["weights_bytes"] == quantised.stored_bytes(model) == real_bytes(model)
    assert facts["n_params"] == sum(quantised.count(p) for p in model.parameters())
    assert facts["n_quantised"] == quantised.quantised_values(model) > 0
    assert facts["quantization"] == quantize == quantised.quantization_of(model)
    assert any(isinstance(module, LAYERS[quantize]) for module in model.modules())


@on_cpu
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_dtypes_and_shapes_are_those_that_from_pretrained_makes(kind: str, quantize: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny.config(kind)).save_pretrained(tmp_path)
    how: dict[str, Any] = {"load_in_8bit": True}
    if quantize == "4bit":
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**how), device_map="cpu")
    loaded = peft.prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    expected = peft.get_peft_model(loaded, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = models.build(resolved(kind, quantize), device="cpu")

    def described(module: nn.Module) -> dict[str, Any]:
        return {n: (type(p).__name__, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()}

    assert described(model) == described(expected)
    layers = [m for m in model.modules() if isinstance(m, LAYERS[quantize])]
    others = [m for m in expected.modules() if isinstance(m, LAYERS[quantize])]
    for mine, theirs in zip(layers, others, strict=True):
        if quantize == "4bit":
            assert mine.compute_dtype == theirs.compute_dtype
            assert vars(mine.weight).keys() == vars(theirs.weight).keys() - {"_is_hf_initialized"}  # a mark of loading
            assert (mine.weight.quant_type, mine.weight.compress_statistics) == (theirs.weight.quant_type, theirs.weight.compress_statistics)
        else:
            assert mine.state.threshold == theirs.state.threshold
            assert mine.state.has_fp16_weights == theirs.state.has_fp16_weights


@on_cpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(("quantize", "adapter"), [("4bit", "lora"), ("4bit", "dora"), ("4bit", "ia3"), ("8bit", "lora"), ("8bit", "ia3")])
def test_steps_train_the_adapter_and_nothing_else(quantize: str, adapter: str, autocast: torch.dtype | None) -> None:
    found = resolved("llama", quantize, adapter=adapter)
    model = models.build(found, device="cpu")
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.03)
    model.activation_checkpointing_enable()
    batch = make_batch(found, 2)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name]), name


@on_cpu
def test_dora_on_8_bit_layers_still_fails_in_its_second_step_as_its_refusal_says() -> None:
    found = resolved("llama", "8bit", adapter="dora")
    model, batch = models.build(found, device="cpu"), make_batch(found, 2)
    model(**batch).loss.backward()
    with pytest.raises(AttributeError, match="unsqueeze"):
        model(**batch).loss.backward()


@on_cpu
def test_what_is_not_quantised_follows_the_precision_so_that_fp32_is_not_bf16() -> None:
    model = models.build(resolved("llama", "4bit"), device="cpu")
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name.endswith(("layers.1.self_attn.q_proj.base_layer", "layers.1.self_attn.q_proj.lora_A.default", "lm_head")):
            module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name.rpartition(".")[2], out.dtype))
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids)
    plain = dict(seen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert plain["default"] == plain["lm_head"] == torch.float32
    assert seen["default"] == seen["lm_head"] == torch.bfloat16
    assert weight_dtype(model) == "float32"


@on_cpu
def test_a_head_that_is_trained_in_full_is_not_quantised() -> None:
    model = models.build(resolved("bert", "4bit"), device="cpu")
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert trained
    assert all("classifier" in name for name in trained)


def sent_over(model: nn.Module) -> Any:
    """As it arrives in a child."""
    with ObjectFile({"model": model}) as file:
        return load_objects(file.path).model


@on_cpu
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_live_quantised_model_needs_an_adapter_and_moves_with_one(quantize: str) -> None:
    base = models.build(resolved("llama", quantize), device="cpu").unload()
    workload = Workload(model="<live>")
    with refused(f"quantised to {quantize} and has no adapter", hint="peft_config"):
        models.resolve_with(workload, LiveObjects(model=base))
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM")
    models.resolve_with(workload, LiveObjects(model=base, extra={"trainer_arguments": {"peft_config": config}}))
    sent = Workload(model="<live>", task="causal-lm", seq_len=8, adaptation=adaptation_of(peft_config=config))
    arrived = sent_over(base)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():  # not in `eval`, in which bitsandbytes repacks 4-bit weights for good on some CPUs
        assert torch.equal(arrived.train()(input_ids=ids).logits, base.train()(input_ids=ids).logits)
    found = models.resolve_with(sent, LiveObjects(model=sent_over(base)))
    facts = models.facts(found)
    assert (facts["quantization"], facts["adapter"], facts["n_trainable_params"]) == (quantize, "LORA", 2 * 2 * (2 * 64 + 64 + 32))
    model = models.build(found, device="cpu", weight_dtype=models.dtype_to_build(found, Precision.BF16))
    model(**make_batch(found, 2)).loss.backward()
    assert sum(p.numel() for p in model.parameters() if p.grad is not None) == 2 * 2 * (2 * 64 + 64 + 32)


def test_4_bit_layers_multiply_in_the_half_precision_that_is_asked_for() -> None:
    assert quantised.compute_dtype(Precision.FP16) is torch.float16
    assert {quantised.compute_dtype(p) for p in Precision if p is not Precision.FP16} == {torch.bfloat16}


def test_packed_bytes_by_hand() -> None:
    # 64 x 64 in 4 bit: 2048 bytes of values, 64 of scales, 4 for their block, two code tables, one mean
    assert quantised.packed_bytes(4096, 64, Quantization.FOUR_BIT) == 2048 + 64 + 4 + 4 * 16 + 4 * 256 + 4
    assert quantised.packed_bytes(4096, 64, Quantization.EIGHT_BIT) == 4096 + 4 * 64


def test_a_missing_bitsandbytes_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved("llama", "4bit")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else real(name, *a))
    with refused("need bitsandbytes, which is not installed", hint="pip install bitsandbytes"):
        models.facts(found)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
