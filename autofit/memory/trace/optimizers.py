"""The Trainer's own optimizers, by the Trainer's own names and parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autofit.memory.trace.request import TraceUnavailable

_FORBIDDEN_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
_PAGED = "paged"


def create(model: nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """The optimizer that `Trainer.create_optimizer` makes for this model.

    Raises:
        TraceUnavailable: an optimizer whose memory a trace cannot see (paged to the host, fused into backward), or
            whose package is missing.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if _PAGED in name:
        raise TraceUnavailable(f"optimizer {name} keeps its state in memory that is paged to the host")
    try:
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError, TypeError) as error:
        raise TraceUnavailable(f"optimizer {name} cannot be made here: {error}") from error
    if not isinstance(cls, type) or "optimizer_dict" in keywords or "model" in keywords:
        raise TraceUnavailable(f"optimizer {name} is not a plain torch optimizer")
    keywords = dict(keywords)
    groups = keywords.pop("params", None) or parameter_groups(model, arguments)
    optimizer: torch.optim.Optimizer = cls(groups, **keywords)
    if "bitsandbytes" in str(cls):
        _prepare_bitsandbytes(model, optimizer, keywords)
    return optimizer


def parameter_groups(model: nn.Module, arguments: TrainingArguments) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, as the Trainer makes them (an empty one included)."""
    decayed = Trainer.get_decay_parameter_names(_NoTrainer(), model)  # type: ignore[arg-type]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": arguments.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


class _NoTrainer:
    """`get_decay_parameter_names` is a method that uses nothing of its object."""


def _prepare_bitsandbytes(model: nn.Module, optimizer: Any, keywords: dict[str, Any]) -> None:
    """Register what the Trainer registers (32-bit states for embeddings) and stub the kernels: they allocate nothing.

    A fake tensor has no address to hand to a compiled kernel. The states, quantisation maps and block maxima are made by
    bitsandbytes' own Python code (`init_state`), so their sizes are the library's.
    """
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    if keywords.get("optim_bits") == 8:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.update_step = _update_nothing


def _update_nothing(_group: Any, parameter: Any, _group_index: int, _index: int) -> None:
    """What is left of `update_step` without the kernel: it asks for a contiguous gradient."""
    parameter.grad = parameter.grad.contiguous()
