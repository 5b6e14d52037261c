"""Small configs of many architectures, for tests that run a real forward and backward."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from autofit.problem.spec import Workload
from autofit.workload import models
from autofit.workload.objects import LiveObjects

_ENCODER = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "bos_token_id": 298,
    "eos_token_id": 299,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16}
_SPEECH = {
    **_ENCODER,
    "vocab_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "conv_dim": [32] * 7,
    "num_conv_pos_embedding_groups": 4,
    "num_conv_pos_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": {**_ENCODER, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {"vocab_size": 300, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    "deberta-v2": {
        **_ENCODER,
        "relative_attention": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "longformer": {**_ENCODER, "attention_window": 16, "max_position_embeddings": 130, "sep_token_id": 2},
    "gpt2": {
        "vocab_size": 300,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 299,
        "eos_token_id": 299,
    },
    "llama": _DECODER,
    "qwen2": _DECODER,
    "opt": {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
    },
    "t5": {
        "vocab_size": 300,
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "vocab_size": 300,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    },
    "vit": {**_ENCODER, "image_size": 64, "num_labels": 10},
    "deit": {**_ENCODER, "image_size": 64},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "wav2vec2": _SPEECH,
    "hubert": {**_SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
}
for _name in ("vit", "deit"):
    for _key in ("vocab_size", "bos_token_id", "eos_token_id"):
        CONFIGS[_name] = {k: v for k, v in CONFIGS[_name].items() if k != _key}


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config of about 100 thousand parameters."""
    return AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})


def resolved(
    model_type: str, task: str | None = None, seq_len: int | None = None, **changes: Any
) -> models.ResolvedModel:
    """The small config of `model_type`, resolved as a user's config object would be."""
    workload = Workload(model=f"tiny {model_type}", task=task, seq_len=seq_len)
    return models.resolve_with(workload, LiveObjects(config=config(model_type, **changes)))
