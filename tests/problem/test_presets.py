from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources

import pytest
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from autofit.errors import UserError
from autofit.problem import presets

# Parameters of the class in the second column, as published with (or counted from) the checkpoint on the hub.
PUBLISHED = {
    "bert-tiny": ("BertModel", 4_385_920),
    "bert-base-uncased": ("BertModel", 109_482_240),
    "bert-base-cased": ("BertModel", 108_310_272),
    "bert-large-uncased": ("BertModel", 335_141_888),
    "distilbert-base-uncased": ("DistilBertModel", 66_362_880),
    "roberta-base": ("RobertaModel", 124_645_632),
    "roberta-large": ("RobertaModel", 355_359_744),
    "xlm-roberta-base": ("XLMRobertaModel", 278_043_648),
    "xlm-roberta-large": ("XLMRobertaModel", 559_890_432),
    "deberta-v3-base": ("DebertaV2Model", 183_831_552),
    "albert-base-v2": ("AlbertModel", 11_683_584),
    "electra-small-discriminator": ("ElectraForPreTraining", 13_549_057),
    "electra-base-discriminator": ("ElectraModel", 108_891_648),
    "distilgpt2": ("GPT2LMHeadModel", 81_912_576),
    "gpt2": ("GPT2LMHeadModel", 124_439_808),
    "gpt2-medium": ("GPT2LMHeadModel", 354_823_168),
    "gpt2-large": ("GPT2LMHeadModel", 774_030_080),
    "gpt2-xl": ("GPT2LMHeadModel", 1_557_611_200),
    "t5-small": ("T5ForConditionalGeneration", 60_506_624),
    "t5-base": ("T5ForConditionalGeneration", 222_903_552),
    "t5-large": ("T5ForConditionalGeneration", 737_668_096),
    "t5-3b": ("T5ForConditionalGeneration", 2_851_598_336),
    # 247.6 million where the output embedding is a parameter of its own; transformers 5 ties it.
    "flan-t5-base": ("T5EncoderModel", 109_628_544),
    "bart-base": ("BartModel", 139_420_416),
    "bart-large": ("BartModel", 406_291_456),
    "llama-3.2-1b": ("LlamaForCausalLM", 1_235_814_400),
    "llama-3.2-3b": ("LlamaForCausalLM", 3_212_749_824),
    "llama-3.1-8b": ("LlamaForCausalLM", 8_030_261_248),
    "tinyllama-1.1b": ("LlamaForCausalLM", 1_100_048_384),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", 494_032_768),
    "qwen2.5-1.5b": ("Qwen2ForCausalLM", 1_543_714_304),
    "qwen2.5-7b": ("Qwen2ForCausalLM", 7_615_616_512),
    "qwen3-0.6b": ("Qwen3ForCausalLM", 596_049_920),
    "mistral-7b": ("MistralForCausalLM", 7_241_732_096),
    "gemma-2b": ("GemmaForCausalLM", 2_506_172_416),
    "opt-125m": ("OPTForCausalLM", 125_239_296),
    "opt-1.3b": ("OPTForCausalLM", 1_315_758_080),
    "pythia-160m": ("GPTNeoXForCausalLM", 162_322_944),
    "vit-base-patch16-224": ("ViTForImageClassification", 86_567_656),
    "vit-large-patch16-224": ("ViTForImageClassification", 304_326_632),
    "wav2vec2-base": ("Wav2Vec2Model", 94_371_712),
}


def _config(name: str) -> PretrainedConfig:
    values = presets.load(name)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def test_every_preset_has_a_published_parameter_count() -> None:
    assert set(PUBLISHED) == set(presets.names())
    assert len(presets.names()) >= 24


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    class_name, count = PUBLISHED[name]
    with torch.device("meta"):
        model = getattr(transformers, class_name)(_config(name))
    assert sum(p.numel() for p in model.parameters()) == count


def test_every_bundled_file_is_listed_and_every_listed_preset_is_bundled() -> None:
    folder = resources.files("autofit.problem").joinpath("preset_configs")
    bundled = {entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")}
    assert bundled == set(presets.names())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_survives_the_round_trip_through_its_config_class(name: str) -> None:
    config = _config(name)
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    ours, theirs = config.to_dict(), again.to_dict()
    ours.pop("transformers_version"), theirs.pop("transformers_version")
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("google-bert/bert-large-uncased", "bert-large-uncased"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("META-LLAMA/llama-3.2-1b", "llama-3.2-1b"),
        ("openai-community/gpt2", "gpt2"),
        ("GPT2", "gpt2"),
        ("prajjwal1/bert-tiny", "bert-tiny"),
        ("distilbert", "distilbert-base-uncased"),
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
    ],
)
def test_hub_names_find_their_preset_in_any_case(name: str, preset: str) -> None:
    assert presets.canonical(name) == preset
    assert presets.load(name) == presets.load(preset)


def test_no_two_presets_share_a_name() -> None:
    spoken = [alias.lower() for names in presets.HUB_NAMES.values() for alias in names]
    spoken += [name for name in presets.HUB_NAMES if name not in spoken]
    assert len(spoken) == len(set(spoken))


def test_an_unknown_name_is_answered_with_the_nearest_presets() -> None:
    assert presets.canonical("bert-large-uncasd") is None
    with pytest.raises(UserError, match="bert-large-uncasd") as caught:
        presets.load("bert-large-uncasd")
    assert caught.value.hint is not None
    assert "bert-large-uncased" in caught.value.hint


def test_a_name_like_no_preset_is_answered_with_examples() -> None:
    assert presets.nearest("zzzzzz") == ()
    assert "bert-base-uncased" in presets.suggestion("zzzzzz")


def test_the_list_of_presets_and_tasks_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from autofit.problem import presets, task;"
        "presets.load('gpt2'); task.parse_task('ner');"
        "print(sorted({'torch', 'transformers', 'optuna', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
