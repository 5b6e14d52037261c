"""What `--tune` can widen the space by for this model on this machine, and why not the rest. All of it JSON."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_flash_attn_2_available

from autofit.workload.construct import without_adapters

EVERY = (2, 4)


def extras_facts(model: nn.Module, own: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return knob -> `{"problem": reason or None}`, with `values` and `default` where there is more than on and off.

    Args:
        model: as it is trained; on `meta` as well.
        own: keywords of the user's own TrainingArguments: what they set is kept in every trial, and not searched.
    """
    inner, own = without_adapters(model), own or {}
    options = own.get("activation_checkpointing_kwargs") or own.get("gradient_checkpointing_kwargs") or {}
    found = {
        "attn": attention(inner),
        "compile": {"problem": _set_already("torch_compile", own) or compile_problem()},
        "liger": {"problem": _set_already("use_liger_kernel", own) or liger_problem(inner)},
        "every_n_layers": every_n_layers(inner),
        "offload": {"problem": offload_problem(inner)},
    }
    for knob in ("every_n_layers", "offload"):
        if options.get(knob):
            found[knob]["problem"] = f"your own arguments set {knob} already: it is kept in every trial"
    return found


def attention(model: nn.Module) -> dict[str, Any]:
    """Implementations beside the model's own that its class has, and that work here."""
    if not isinstance(model, PreTrainedModel):
        return {"problem": f"{type(model).__name__} is no transformers model"}
    cls, card = type(model), torch.cuda.is_available()
    default = getattr(model.config, "_attn_implementation", None)
    missing = {
        "eager": None,
        "sdpa": None if getattr(cls, "_supports_sdpa", False) else f"{cls.__name__} does not have it",
        "flash_attention_2": _flash_problem(cls, card),
        "flex_attention": _flex_problem(cls, card),
    }
    values = [name for name, reason in missing.items() if reason is None]
    others = [name for name in values if name != default]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items() if reason is not None)
    alone = f"{cls.__name__} has no attention implementation beside {default!r} here ({reasons})"
    return {"problem": None if others else alone, "values": values, "default": default}


def _flash_problem(cls: type, card: bool) -> str | None:
    if not (getattr(cls, "_supports_flash_attn", False) or getattr(cls, "_supports_flash_attn_2", False)):
        return f"{cls.__name__} does not have it"
    if not card:
        return "needs a CUDA device"
    return None if is_flash_attn_2_available() else "flash_attn is not installed"


def _flex_problem(cls: type, card: bool) -> str | None:
    if not getattr(cls, "_supports_flex_attn", False):
        return f"{cls.__name__} does not have it"
    return None if card else "its backward needs a CUDA device"


def compile_problem() -> str | None:
    """Why torch.compile cannot build code here; None when it can."""
    compilers: tuple[str | None, ...] = (os.environ.get("CXX"), "g++", "clang++")
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if torch.version.hip is None and torch.cuda.get_device_capability() < (7, 0):
            return "triton needs a card of compute capability 7.0 or newer"
        compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if any(name and shutil.which(name.split()[0]) for name in compilers):
        return None
    return f"there is no {'C' if torch.cuda.is_available() else 'C++'} compiler ({', '.join(filter(None, compilers[1:]))})"


def liger_problem(model: nn.Module) -> str | None:
    """Why Liger's kernels cannot be used for `model`; None when they can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    if not torch.cuda.is_available():
        return "its kernels need a CUDA device"
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except Exception as error:  # any failure of a foreign package's import is a fact to report
        return f"liger_kernel is not importable ({type(error).__name__})"
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return None if kind in MODEL_TYPE_TO_APPLY_LIGER_FN else f"it has no kernels for {kind or type(model).__name__}"


def every_n_layers(model: nn.Module) -> dict[str, Any]:
    """Which `n` make sense for the model's layers."""
    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    values = [n for n in EVERY if n <= layers]
    problem = _checkpointing_problem(model, "every_n_layers")
    if problem is None and not values:
        problem = f"{type(model).__name__} has {layers} layer{'s' if layers != 1 else ''} that can be checkpointed one by one"
    return {"problem": problem, "values": values}


def offload_problem(model: nn.Module) -> str | None:
    """Why checkpoints cannot be kept on the host; None when they can."""
    if not torch.cuda.is_available():
        return "it moves activations from a card to the host, and there is no CUDA device"
    return _checkpointing_problem(model, "offload")


def _checkpointing_problem(model: nn.Module, option: str) -> str | None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"{type(model).__name__} does not implement gradient checkpointing"
    enable = getattr(model, "activation_checkpointing_enable", None)
    known = enable is not None and option in inspect.signature(enable).parameters
    return None if known else f"the installed transformers does not know the option {option}"


def _set_already(name: str, own: Mapping[str, Any]) -> str | None:
    return f"your own arguments set {name} already: it is kept in every trial" if own.get(name) else None
