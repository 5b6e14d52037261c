from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from autofit.errors import UserError
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.workload import models
from autofit.workload.batches import make_batch
from autofit.workload.objects import LiveObjects
from tests.workload import tiny


def _live(**objects: Any) -> models.ResolvedModel:
    return models.resolve_with(Workload(model="mine", seq_len=16), LiveObjects(**objects))


def _head() -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_config(tiny.config("bert"))


def test_a_preset_becomes_a_model_for_its_default_task() -> None:
    resolved = models.resolve(Workload(model="bert-tiny"))
    assert (resolved.source, resolved.task, resolved.seq_len) == ("preset", Task.SEQUENCE_CLASSIFICATION, 512)
    model = models.build(resolved, device="cpu")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.training


def test_the_task_asked_for_decides_the_class() -> None:
    resolved = models.resolve(Workload(model="prajjwal1/bert-tiny", task="fill-mask", seq_len=32))
    assert models.model_class(resolved).__name__ == "BertForMaskedLM"
    assert resolved.seq_len == 32


@pytest.mark.parametrize("published_dtype", ["bfloat16", "float16", None])
def test_weights_have_the_dtype_asked_for_and_never_that_of_the_config(published_dtype: str | None) -> None:
    resolved = tiny.resolved("llama", dtype=published_dtype)
    for asked in ("float32", "bfloat16"):
        model = models.build(resolved, device="cpu", weight_dtype=asked)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, asked)}
    assert torch.get_default_dtype() is torch.float32


def test_building_leaves_the_resolved_config_as_it_was() -> None:
    resolved = tiny.resolved("llama", "sequence-classification")
    assert resolved.config is not None
    before = resolved.config.to_dict()
    models.build(resolved, device="meta", weight_dtype="bfloat16", attn_implementation="eager")
    assert resolved.config.to_dict() == before


def test_training_needs_no_cache_and_decoders_that_classify_a_padding_token() -> None:
    model = models.build(tiny.resolved("llama", "sequence-classification", 8), device="cpu")
    assert model.config.use_cache is False
    assert model.config.pad_token_id == 299
    assert models.build(tiny.resolved("bert"), device="meta").config.pad_token_id == 0


def test_special_initialisation_is_kept() -> None:
    model = models.build(models.resolve(Workload(model="bert-tiny")), device="cpu")
    embeddings = model.bert.embeddings
    assert embeddings.LayerNorm.weight.eq(1).all()
    assert embeddings.LayerNorm.bias.eq(0).all()
    assert embeddings.word_embeddings.weight[0].eq(0).all()  # the padding row
    assert embeddings.word_embeddings.weight[1:].std().item() == pytest.approx(0.02, rel=0.05)
    assert model.bert.encoder.layer[0].attention.self.query.bias.eq(0).all()


class _Draws(TorchDispatchMode):
    """Counts the random numbers that are really drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_large_model_is_built_with_few_random_numbers_and_computes() -> None:
    resolved = models.resolve(Workload(model="bert-large-uncased", seq_len=16))
    with _Draws() as draws:
        model = models.build(resolved, device="cpu")
    # Without the fast way each of 335 million weights is drawn twice: by torch's layer, then by transformers.
    assert draws.count < 0.1 * sum(p.numel() for p in model.parameters())
    assert torch.isfinite(model(**make_batch(resolved, 1)).loss)


def test_the_attention_asked_for_is_used() -> None:
    resolved = tiny.resolved("bert")
    assert models.build(resolved, device="meta").config._attn_implementation == "sdpa"
    eager = models.build(resolved, device="meta", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_an_attention_that_is_not_available_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="tiny bert"):
        models.build(tiny.resolved("bert"), device="cpu", attn_implementation="no_such_attention")


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 65}, {"num_attention_heads": 0}, {"hidden_act": "no_such_activation"}]
)
def test_a_config_that_its_class_refuses_is_one_line_for_the_user(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    values = {"model_type": "bert", **tiny.CONFIGS["bert"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as caught:
        models.build(models.resolve(Workload(model=str(tmp_path))), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_running_out_of_memory_while_building_is_not_called_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = tiny.resolved("bert")
    real = models._construct

    def poor(*args: Any) -> Any:
        if args[-1] == "cpu":
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
            )
        return real(*args)

    monkeypatch.setattr(models, "_construct", poor)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        models.build(resolved, device="cpu")


def test_equal_configs_have_equal_digests_wherever_they_come_from(tmp_path: Path) -> None:
    resolved = tiny.resolved("bert", dtype="bfloat16")
    assert resolved.config is not None
    resolved.config.save_pretrained(tmp_path)
    local = models.resolve(Workload(model=str(tmp_path)))
    assert (local.source, local.digest) == ("local", resolved.digest)
    assert tiny.resolved("bert", hidden_size=128).digest != resolved.digest


@pytest.mark.parametrize("change", [{"attn_implementation": "eager"}, {"num_attention_heads": 2, "num_key_value_heads": 2}], ids=str)
@pytest.mark.parametrize("live", [False, True])
def test_what_no_shape_of_a_parameter_shows_is_part_of_the_digest(live: bool, change: dict[str, Any]) -> None:
    def digest(**changes: Any) -> str:
        config = tiny.config("llama", **{"num_key_value_heads": 4, **changes})
        objects = LiveObjects(model=_causal(config)) if live else LiveObjects(config=config)
        return models.resolve_with(Workload(model="<mine>"), objects).digest

    assert digest() == digest() != digest(**change)


def test_a_config_with_objects_of_the_users_own_has_a_digest_that_is_the_same_in_every_process() -> None:
    code = """
from transformers import LlamaConfig, LlamaForCausalLM
from autofit.workload.digests import module_digest
class Own: pass
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config.own = [Own(), {"a", "b", "c", "d"}, {(1, 2): 3}]
print(module_digest(LlamaForCausalLM(config)))
"""
    found = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout for seed in "12"
    }
    assert len(found) == 1


def test_facts_tell_the_parent_what_it_needs_as_json() -> None:
    facts = models.facts(models.resolve(Workload(model="gpt2")))
    assert facts["n_params"] == facts["n_trainable_params"] == 124_439_808
    assert {k: facts[k] for k in ("hidden_size", "num_layers", "num_heads", "vocab_size")} == {
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "vocab_size": 50257,
    }
    assert facts["max_positions"] == 1024
    assert facts["supports_gradient_checkpointing"]
    assert facts["supports_sdpa"]
    assert facts["tie_word_embeddings"]
    assert facts["class"] == "GPT2LMHeadModel"
    assert facts["config"]["model_type"] == "gpt2"
    assert json.loads(json.dumps(facts)) == facts


def test_facts_of_a_large_model_cost_no_memory() -> None:
    facts = models.facts(models.resolve(Workload(model="meta-llama/Llama-3.1-8B")))
    assert facts["n_params"] == 8_030_261_248


def test_a_config_object_builds_like_a_name() -> None:
    resolved = tiny.resolved("gpt2", seq_len=16)
    assert (resolved.source, resolved.task) == ("object", Task.CAUSAL_LM)
    assert type(models.build(resolved, device="cpu")).__name__ == "GPT2LMHeadModel"


def test_a_live_model_keeps_its_weights_and_names_its_task() -> None:
    model = _head()
    weight = model.classifier.weight.detach().clone()
    resolved = _live(model=model)
    assert (resolved.task, resolved.source) == (Task.SEQUENCE_CLASSIFICATION, "object")
    built = models.build(resolved, device="cpu")
    assert torch.equal(built.classifier.weight, weight)
    assert models.facts(resolved)["n_params"] == sum(p.numel() for p in model.parameters())


def test_a_live_model_in_pure_bf16_keeps_derived_buffers_exact() -> None:
    config = tiny.config("llama")
    built = models.build(_live(model_init=lambda: _causal(config)), device="cpu", weight_dtype="bfloat16")
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
    assert built.model.rotary_emb.inv_freq.dtype is torch.float32


def _causal(config: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def test_a_function_that_builds_the_model_is_called_for_every_build() -> None:
    resolved = _live(model_init=_head)
    assert resolved.task is Task.SEQUENCE_CLASSIFICATION
    assert models.facts(resolved)["class"] == "BertForSequenceClassification"
    first, second = (models.build(resolved, device="cpu") for _ in range(2))
    assert first is not second
    assert torch.isfinite(first(**make_batch(resolved, 2)).loss)


def test_a_function_that_raises_is_the_users_mistake() -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no such layer\nsecond line")

    with pytest.raises(UserError, match=r"RuntimeError: no such layer$"):
        _live(model_init=broken)


def test_a_function_that_returns_no_module_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="returned a int"):
        _live(model_init=lambda: 3)


def test_a_function_that_needs_real_tensors_is_called_on_the_cpu() -> None:
    def reads() -> nn.Module:
        layer = nn.Linear(2, 2)
        float(layer.weight.sum())
        return layer

    resolved = _live(model_init=reads)
    assert models.facts(resolved)["n_params"] == 6
    assert models.facts(resolved)["config"] is None


def test_a_plain_module_has_no_task_but_can_be_built() -> None:
    resolved = _live(model=nn.Linear(3, 1))
    assert (resolved.task, resolved.config, resolved.seq_len) == (None, None, 16)
    assert isinstance(models.build(resolved, device="cpu"), nn.Linear)


def test_live_objects_travel_by_file_beside_a_named_model(tmp_path: Path) -> None:
    path = tmp_path / "objects.pkl"
    path.write_bytes(cloudpickle.dumps({"train_dataset": [1, 2, 3]}))
    resolved = models.resolve(Workload(model="bert-tiny", objects_path=str(path)))
    assert resolved.source == "preset"
    assert resolved.objects is not None
    assert resolved.objects.train_dataset == [1, 2, 3]
