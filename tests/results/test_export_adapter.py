"""What an answer says of adapters: lines that run, with the layers, dtypes and heads of the trials."""

from __future__ import annotations

import json
from typing import Any

from autofit.problem.adaptation import adaptation_of
from autofit.problem.config import Precision
from autofit.problem.spec import Workload
from autofit.reports.report import subject_lines
from autofit.results.export import export, model_lines, model_note
from autofit.results.export_adapter import adapter_lines, quantization_config
from autofit.results.result import TuneResult
from tests.builders import GPU, make_config, make_record, make_result

LORA = {"class": "LoraConfig", "options": {"r": 16, "task_type": "CAUSAL_LM"}}


def result_of(precision: Precision = Precision.BF16, *, source: str = "preset", facts: dict[str, Any] | None = None, **said: Any) -> TuneResult:
    workload = Workload(model="gpt2", seq_len=128, adaptation=adaptation_of(**said))
    model = {"task": "causal-lm", "source": source, "adapter_config": LORA, "adapter": "LORA", **(facts or {})}
    return make_result([make_record(0, make_config(8, precision=precision), 41.2)], device=GPU, workload=workload, model=model)


def test_an_adapter_is_put_on_the_model_that_is_loaded() -> None:
    lines = model_lines(result_of(adapter="lora"))
    assert lines == [
        'model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")',
        "model = get_peft_model(model, LoraConfig(r=16, task_type='CAUSAL_LM'))",
    ]
    snippet = export(result_of(adapter="lora"), "python")
    assert "from peft import LoraConfig, get_peft_model\n" in snippet
    assert "from transformers import AutoModelForCausalLM, TrainingArguments" in snippet
    compile(snippet, "snippet", "exec")


def test_a_quantised_base_is_loaded_and_prepared_as_in_the_trials() -> None:
    result = result_of(adapter="lora", quantize="4bit")
    first, second, _ = model_lines(result)
    assert 'bnb_4bit_compute_dtype="bfloat16"' in first
    assert 'bnb_4bit_quant_type="nf4"' in first
    assert "use_gradient_checkpointing=False" in second
    snippet = export(result, "python")
    assert "AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments" in snippet
    compile(snippet, "snippet", "exec")


def test_4_bit_layers_compute_in_the_half_precision_of_the_winner() -> None:
    assert 'compute_dtype="float16"' in str(quantization_config(result_of(Precision.FP16, adapter="lora", quantize="4bit")))
    assert quantization_config(result_of(adapter="lora", quantize="8bit")) == "BitsAndBytesConfig(load_in_8bit=True)"
    assert quantization_config(result_of(adapter="lora")) is None


def test_a_script_without_the_adapter_refuses_the_flags_instead_of_training_the_whole_model() -> None:
    result = result_of(adapter="lora")
    assert "lora" in json.loads(export(result, "json"))["adapter"].lower()
    assert "--adapter" in export(result, "cli")
    assert "adapter" not in json.loads(export(result_of(adapter="lora", source="object"), "json"))


def test_a_head_that_stays_as_it_is_is_named() -> None:
    facts = {"kept_modules": ["classifier"], "not_quantised": ["classifier"]}
    assert "llm_int8_skip_modules=['classifier']" in str(quantization_config(result_of(adapter="lora", quantize="8bit", facts=facts)))


def test_16_bit_weights_under_an_adapter_are_loaded_as_such() -> None:
    assert 'from_pretrained("openai-community/gpt2", dtype="bfloat16")' in model_lines(result_of(Precision.PURE_BF16, adapter="lora"))[0]


def test_models_of_the_users_own_making_keep_their_own_lines() -> None:
    live = result_of(source="object", facts={"adapter_config": None})
    assert model_lines(live) == adapter_lines(live) == []
    config = result_of(source="object", adapter="lora", quantize="4bit")
    assert "quantization_config=BitsAndBytesConfig(" in str(model_note(config))
    assert model_lines(config)[-1].startswith("model = get_peft_model(")


def test_the_users_own_class_of_arguments_is_imported_and_called() -> None:
    snippet = export(result_of(facts={"arguments_class": "trl.trainer.sft_config.SFTConfig"}), "python")
    assert "from trl.trainer.sft_config import SFTConfig" in snippet
    assert "args = SFTConfig(" in snippet


def test_the_report_says_what_was_trained() -> None:
    assert "lora of rank 16, base quantised to 4bit" in " ".join(subject_lines(result_of(adapter="lora", quantize="4bit"), 200))
