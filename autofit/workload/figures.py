"""Numbers that describe a model to the parent: of its config, and of how its weights are stored."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from autofit.problem.adaptation import Adaptation
from autofit.problem.task import Task
from autofit.workload import adapters, quantised
from autofit.workload.tasks import max_positions


def config_figures(config: PretrainedConfig | None) -> dict[str, Any]:
    """`hidden_size`, `num_layers`, `num_heads`, `vocab_size`, `tie_word_embeddings` and `max_positions`; None where the config does not say."""
    text = None if config is None else config.get_text_config()
    names = {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    found: dict[str, Any] = {ours: getattr(text, theirs, None) for ours, theirs in names.items()}
    found["max_positions"] = None if config is None else max_positions(config)
    return found


def stored_figures(model: Any, adaptation: Adaptation | None, task: Task | None) -> dict[str, Any]:
    """`quantization`, `weights_bytes` and `n_quantised` (parameters in quantised layers) of a model as it will be built.

    Args:
        model: on `meta` where autofit builds it: there it is plain, and its bytes are planned.
        adaptation: what is asked for; None = the model is what it is.
        task: decides which head is trained in full.
    """
    if adaptation is None or adaptation.quantization is None:
        return {
            "quantization": quantised.quantization_of(model),
            "weights_bytes": quantised.stored_bytes(model),
            "n_quantised": quantised.quantised_values(model),
        }
    kept = adapters.trained_in_full(quantised.without_adapters(model), adaptation, task)
    quantised.require()
    base: Any = quantised.without_adapters(model)
    skipped = quantised.skipped_modules(base, kept)
    planned, values = quantised.planned_bytes(model, adaptation.quantization, kept)
    return {
        "quantization": adaptation.quantization,
        "weights_bytes": planned,
        "n_quantised": values,
        "quantises_on": quantised.supported_devices(),
        "kept_modules": kept,
        "not_quantised": [name for name in skipped if "modules_to_save" not in name],
    }


def adapter_figures(model: Any, adaptation: Adaptation | None, task: Task | None) -> dict[str, Any]:
    """`adapter`, peft's name of what is trained on the model, and `adapter_config` where autofit puts it on: what a user has to write down."""
    found: dict[str, Any] = {"adapter": adapters.adapter_type(model)}
    if adaptation is not None:
        config = adapters.peft_config_of(adaptation, quantised.without_adapters(model), task)
        found["adapter_config"] = adapters.config_words(config)
    return found
