"""Constructing a model: fast on the CPU, with mistakes told apart from missing memory; live models made ready."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from autofit.errors import UserError
from autofit.problem.task import Task
from autofit.workload.adapters import is_adapted, kept_in_float32
from autofit.workload.initialise import FastRandom
from autofit.workload.objects import LiveObjects
from autofit.workload.quantised import without_adapters as without_adapters
from autofit.workload.sources import first_line


def blamed(make: Callable[[str], Any], device: str, what: str) -> Any:
    """Call `make(device)`; when it fails, try on `meta`: what fails there too, alike, is the user's mistake."""
    try:
        return make(device)
    except (MemoryError, UserError):
        raise
    except Exception as error:
        if device != "meta":
            try:
                make("meta")
            except Exception as again:
                if (type(again), str(again)) != (type(error), str(error)):
                    raise error from None
            else:
                raise
        message = f"{what}: {type(error).__name__}: {first_line(error)}"
        raise UserError(message) from error


@contextlib.contextmanager
def quick(device: str) -> Iterator[None]:
    """Fast random weights while building on the CPU; nothing elsewhere."""
    with FastRandom() if torch.device(device).type == "cpu" else contextlib.nullcontext():
        yield


def call_builder(objects: LiveObjects, *, device: str) -> torch.nn.Module:
    """The model that the user's function builds, where the function wants it (`meta`: without memory).

    Raises:
        UserError: the function raises, or returns something else.
    """
    make = cast("Callable[[], torch.nn.Module]", objects.model_init)

    def run(where: str) -> Any:
        # Only `meta` is imposed: elsewhere the user's function decides, as it does under the Trainer.
        place = torch.device("meta") if where == "meta" else contextlib.nullcontext()
        with place, quick("meta" if where == "meta" else "cpu"):
            return make()

    model = blamed(run, device, "the function that builds the model raised")
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"the function that builds the model returned a {type(model).__name__}, not a module")
    return model


def sketch(objects: LiveObjects) -> torch.nn.Module:
    """The model that the user's function builds, without memory if the function allows it."""
    try:
        return call_builder(objects, device="meta")
    except UserError:  # a function that moves or reads tensors cannot run on `meta`
        return call_builder(objects, device="cpu")


def as_dtype(model: torch.nn.Module, dtype: torch.dtype, *, but: Collection[str] = ()) -> torch.nn.Module:
    """Cast parameters and saved buffers, `but` some; derived buffers (rotary frequencies) stay, as in `from_pretrained`."""
    saved = set(model.state_dict(keep_vars=True)).difference(but)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and tensor.dtype != dtype and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def in_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """A live model with its weights in `dtype` (adapters as if the model had been loaded in it and then adapted); None leaves them."""
    if dtype is None:
        return model
    return as_dtype(model, dtype, but=kept_in_float32(model, dtype) if is_adapted(model) else ())


def set_attention(model: PreTrainedModel, implementation: str | None) -> None:
    """Change a live model's attention; None leaves it.

    Raises:
        UserError: the model does not take it.
    """
    if implementation is None:
        return
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        message = f"the model does not take attention {implementation!r}: {first_line(error)}"
        raise UserError(message) from error


def prepare_config(config: PretrainedConfig, task: Task | None) -> None:
    """Settings that training needs: no key-value cache, and padding for decoders that classify."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if task is Task.SEQUENCE_CLASSIFICATION and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = _substitute_padding(config)


def _substitute_padding(config: PretrainedConfig) -> int:
    """Decoders refuse batches larger than 1 without a padding token; the end-of-text token is the usual one."""
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, list | tuple) and end else end
    vocabulary = getattr(config.get_text_config(), "vocab_size", 1)
    return end if isinstance(end, int) and 0 <= end < vocabulary else 0
