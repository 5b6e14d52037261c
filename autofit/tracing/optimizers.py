"""The Trainer's own optimizers, by the Trainer's own names and parameter groups."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autofit.memory.request import TraceUnavailable


def create(model: Any, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """The optimizer that `Trainer.create_optimizer` makes for this model.

    Raises:
        TraceUnavailable: an optimizer whose memory a trace cannot see (fused into backward), or whose package is missing.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    try:
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError, TypeError) as error:
        raise TraceUnavailable(f"optimizer {name} cannot be made here: {error}") from error
    if not isinstance(cls, type) or "optimizer_dict" in keywords or "model" in keywords:
        raise TraceUnavailable(f"optimizer {name} is not a plain torch optimizer")
    keywords = dict(keywords)
    groups = keywords.pop("params", None) or parameter_groups(model, arguments)
    optimizer: torch.optim.Optimizer = cls(groups, **keywords)
    if "bitsandbytes" in str(cls) and keywords.get("optim_bits") == 8:
        _keep_embeddings_in_32_bit(model)
    without_kernels(optimizer)
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


def _keep_embeddings_in_32_bit(model: nn.Module) -> None:
    """Register the exceptions that the Trainer registers."""
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def without_kernels(optimizer: Any) -> Any:
    """Leave out the compiled kernels of bitsandbytes: a fake tensor has no address for them, and they allocate nothing.

    States, quantisation maps and block maxima are made by its Python code (`init_state`), so their sizes are its own.
    What they page lies outside of PyTorch's allocator, in memory that the driver moves between card and host: here it is the host's.
    Other optimizers are returned as they are.
    """
    if type(optimizer).__module__.startswith("bitsandbytes"):
        optimizer.update_step = _update_nothing
        if optimizer.is_paged:
            optimizer.init_state = functools.partial(_paged_on_the_host, optimizer.init_state)
            optimizer.prefetch_state = _nothing
    return optimizer


def _paged_on_the_host(init_state: Callable[..., None], *args: Any) -> None:
    """`init_state` with the library's calls for paged memory led away."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    kept = functional.get_paged, functional.fill
    functional.get_paged, functional.fill = _host_buffer, _nothing
    try:
        init_state(*args)
    finally:
        functional.get_paged, functional.fill = kept


def _host_buffer(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _nothing(*_args: Any) -> None:
    """What computes or moves, and allocates nothing."""


def _update_nothing(_group: Any, parameter: Any, _group_index: int, _index: int) -> None:
    """What is left of `update_step` without the kernel: it asks for a contiguous gradient."""
    parameter.grad = parameter.grad.contiguous()
