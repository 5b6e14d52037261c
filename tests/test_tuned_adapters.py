"""Adapters, frozen parts and quantised bases tuned in real trials: what is trained is exactly what was asked, and answers say how to build it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, BertForSequenceClassification

from autofit.forecasts.estimation import estimate
from autofit.problem.adaptation import Quantization
from autofit.results.export import export
from autofit.results.result import TuneResult, load
from autofit.search.tuning import tune
from autofit.trials.trial import Outcome
from tests.cli.runs import autofit
from tests.one_search import ONE, TINY
from tests.refusals import refused
from tests.workload import tiny

pytestmark = pytest.mark.usefixtures("one_server")

peft = pytest.importorskip("peft", reason="peft is not installed")
LORA = 2 * 4 * (2 * 64 + 64 + 32)  #: values in rank 4 on queries and values of the tiny llama


def seen(result: TuneResult) -> list[dict[str, Any]]:
    """What the trials really had, all of which must have completed."""
    assert all(r.outcome is Outcome.COMPLETED for r in result.trials), [r.failure for r in result.trials]
    return [dict(r.measurement.facts["seen"]) for r in result.trials if r.measurement is not None]


def lora() -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM")


def adapted() -> Any:
    return peft.get_peft_model(AutoModelForCausalLM.from_config(tiny.config("llama")), lora())


@pytest.mark.slow
def test_a_live_peft_model_is_tuned_with_checkpointing_and_left_as_it_was() -> None:
    model = adapted()
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    result = tune(model, task="causal-lm", seq_len=16, **{**ONE, "checkpointing": True})
    facts = seen(result)
    assert {f["trained_parameters"] for f in facts} == {LORA}
    assert {f["gradient_checkpointing"] for f in facts} == {False, True}  # the plain baseline is without
    assert result.best.config.gradient_checkpointing
    assert result.model["adapter"] == "LORA"
    assert all(p.equal(before[name][0]) and p.requires_grad is before[name][1] for name, p in model.named_parameters())
    assert "get_peft_model" not in export(result, "python")  # the user's own code does that


@pytest.mark.slow
def test_a_function_may_build_the_adapter_and_parts_may_be_frozen() -> None:
    facts = seen(tune(model_init=adapted, task="causal-lm", seq_len=16, **ONE))
    assert {f["trained_parameters"] for f in facts} == {LORA}
    model = BertForSequenceClassification(TINY)
    model.bert.embeddings.requires_grad_(False)
    facts = seen(tune(model, seq_len=16, **ONE))
    assert {f["trained_parameters"] for f in facts} == {sum(p.numel() for p in model.parameters() if p.requires_grad)}


@pytest.mark.slow
@pytest.mark.parametrize("quantize", list(Quantization))
def test_a_config_is_tuned_under_an_adapter_on_a_quantised_base(quantize: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    result = tune(tiny.config("llama"), peft_config=lora(), quantize=quantize, seq_len=16, **{**ONE, "checkpointing": True})
    assert {f["trained_parameters"] for f in seen(result)} == {LORA}
    assert {f["weight_dtype"] for f in seen(result)} == {"float32"}
    result.save(tmp_path / "best.json")
    loaded = load(tmp_path / "best.json")
    assert loaded.spec.workload.adaptation == result.spec.workload.adaptation
    assert loaded.model["quantization"] == quantize
    assert loaded.model["adapter_config"] == {"class": "LoraConfig", "options": {"r": 4, "task_type": "CAUSAL_LM"}}


@pytest.mark.slow
def test_the_command_line_tunes_an_adapter_and_says_how_to_build_it(tmp_path: Path) -> None:
    options = "--seq-len 16 --effective-batch 2 --batch-size 2 --precision fp32 --optim adamw_torch_fused --checkpointing off --device cpu"
    ran = autofit("search", "--model", "bert-tiny", "--adapter", "lora", "--quantize", "4bit", *options.split(), cwd=tmp_path)
    assert ran.status == 0, ran.stderr
    assert "lora of rank 16, base quantised to 4bit" in " ".join(ran.stdout.split())
    answer = export(load(tmp_path / "best.json"), "python")
    assert "BitsAndBytesConfig(load_in_4bit=True" in answer
    assert "prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)" in answer
    assert "get_peft_model(model, LoraConfig(r=16, task_type='SEQ_CLS'))" in answer
    compile(answer, "answer", "exec")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("search --model gpt2 --effective-batch 2 --quantize 4bit", "cannot be trained by itself"),
        ("estimate --model gpt2 --quantize 8bit", "cannot be trained by itself"),
        ("search --model gpt2 --effective-batch 2 --adapter-rank 4", "without an adapter"),
        ("search --effective-batch 2 --adapter lora -- python train.py", "--adapter and a script were both given"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(arguments: str, message: str, tmp_path: Path) -> None:
    ran = autofit(*arguments.split(), cwd=tmp_path)
    assert ran.status == 2
    error, hint = ran.stderr.strip().splitlines()
    assert message in error
    assert hint.startswith("hint:")


@pytest.mark.slow
def test_pure_bf16_has_nothing_to_do_on_a_quantised_base() -> None:
    with refused("pure_bf16 cannot be used: what is not quantised is kept in float32"):
        tune(tiny.config("llama"), peft_config=lora(), quantize="4bit", seq_len=16, **{**ONE, "precision": "pure_bf16"})


@pytest.mark.slow
def test_an_estimate_is_traced_for_an_adapter_and_by_formula_for_a_quantised_base(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    plain = estimate("bert-tiny", batch_size=2, seq_len=16)
    traced = estimate("bert-tiny", batch_size=2, seq_len=16, peft_config=config)
    formula = estimate("bert-tiny", batch_size=2, seq_len=16, peft_config=config, quantize="4bit")
    assert (traced.confidence, formula.confidence) == ("traced", "formula")
    assert any("bitsandbytes" in warning for warning in formula.warnings)
    state = [e.anatomy["parts"]["optimizer_state"]["bytes"] for e in (plain, traced)]
    assert state[1] < state[0] / 4
    weights = [e.anatomy["parts"]["weights"]["bytes"] for e in (traced, formula)]
    assert weights[1] < weights[0]
    assert json.loads(json.dumps(formula.to_json()))["confidence"] == "formula"
