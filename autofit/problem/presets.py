"""Bundled configs of popular architectures: their published values, so that no network is needed.

Each `presets/NAME.json` holds what `AutoConfig.for_model` takes. No weights: speed and memory do not depend on
them. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from autofit.errors import UserError

#: preset -> the names it has on the hub
HUB_NAMES: Mapping[str, tuple[str, ...]] = {
    "bert-tiny": ("prajjwal1/bert-tiny", "google/bert_uncased_L-2_H-128_A-2"),
    "bert-base-uncased": ("google-bert/bert-base-uncased",),
    "bert-base-cased": ("google-bert/bert-base-cased",),
    "bert-large-uncased": ("google-bert/bert-large-uncased",),
    "distilbert-base-uncased": ("distilbert/distilbert-base-uncased", "distilbert"),
    "distilgpt2": ("distilbert/distilgpt2",),
    "roberta-base": ("FacebookAI/roberta-base",),
    "roberta-large": ("FacebookAI/roberta-large",),
    "xlm-roberta-base": ("FacebookAI/xlm-roberta-base",),
    "xlm-roberta-large": ("FacebookAI/xlm-roberta-large",),
    "deberta-v3-base": ("microsoft/deberta-v3-base",),
    "albert-base-v2": ("albert/albert-base-v2",),
    "electra-small-discriminator": ("google/electra-small-discriminator", "electra-small"),
    "electra-base-discriminator": ("google/electra-base-discriminator", "electra-base"),
    "gpt2": ("openai-community/gpt2",),
    "gpt2-medium": ("openai-community/gpt2-medium",),
    "gpt2-large": ("openai-community/gpt2-large",),
    "gpt2-xl": ("openai-community/gpt2-xl",),
    "t5-small": ("google-t5/t5-small",),
    "t5-base": ("google-t5/t5-base",),
    "t5-large": ("google-t5/t5-large",),
    "t5-3b": ("google-t5/t5-3b",),
    "flan-t5-base": ("google/flan-t5-base",),
    "bart-base": ("facebook/bart-base",),
    "bart-large": ("facebook/bart-large",),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "unsloth/Llama-3.2-1B"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "unsloth/Llama-3.2-3B"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama/TinyLlama_v1.1", "tinyllama"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B",),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
    "gemma-2b": ("google/gemma-2b",),
    "opt-125m": ("facebook/opt-125m",),
    "opt-1.3b": ("facebook/opt-1.3b",),
    "pythia-160m": ("EleutherAI/pythia-160m",),
    "vit-base-patch16-224": ("google/vit-base-patch16-224", "vit-base"),
    "vit-large-patch16-224": ("google/vit-large-patch16-224", "vit-large"),
    "wav2vec2-base": ("facebook/wav2vec2-base",),
}
_BY_ALIAS = {alias.lower(): preset for preset, aliases in HUB_NAMES.items() for alias in (preset, *aliases)}


def names() -> tuple[str, ...]:
    """The presets' own names, sorted."""
    return tuple(sorted(HUB_NAMES))


def canonical(name: str) -> str | None:
    """The preset that `name` means (own name or hub name with organisation, in any case), or None."""
    return _BY_ALIAS.get(name.strip().lower())


def load(name: str) -> dict[str, Any]:
    """The config values of a preset: `model_type` and what its config class takes.

    Raises:
        UserError: no such preset; the hint has the nearest names.
    """
    preset = canonical(name)
    if preset is None:
        raise UserError(f"no bundled preset is called {name!r}", hint=suggestion(name))
    text = resources.files("autofit.problem").joinpath("preset_configs", f"{preset}.json").read_text("utf-8")
    values: dict[str, Any] = json.loads(text)
    return values


def nearest(name: str, count: int = 3) -> tuple[str, ...]:
    """Presets whose name resembles `name`, best first; empty when none does."""
    plain = name.strip().lower()
    candidates = difflib.get_close_matches(plain, list(_BY_ALIAS), n=2 * count, cutoff=0.6)
    candidates += difflib.get_close_matches(plain.rpartition("/")[2], list(HUB_NAMES), n=count, cutoff=0.6)
    found = dict.fromkeys(_BY_ALIAS[candidate] for candidate in candidates)
    return tuple(found)[:count]


def suggestion(name: str) -> str:
    """One line that leads from an unknown name to a preset."""
    near = nearest(name)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return (
        f"give a path, a hub name, or one of {len(HUB_NAMES)} bundled presets, "
        "e.g. bert-base-uncased, gpt2, t5-base, llama-3.2-1b"
    )
