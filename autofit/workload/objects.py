"""Live objects that travelled by file: a model, a config, a dataset, a collator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from transformers import PretrainedConfig

from autofit.errors import UserError
from autofit.workload.sources import first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObjects:
    """What a user handed over as objects; at most one of model, model_init and config is set.

    Attributes:
        model: a module, unpickled here: training it touches nobody else's.
        model_init: builds the model, called without arguments.
        config: builds like a name.
        train_dataset, data_collator: replace the synthetic ones.
        extra: all other entries, as they came.
    """

    model: torch.nn.Module | None = None
    model_init: Callable[[], torch.nn.Module] | None = None
    config: PretrainedConfig | None = None
    train_dataset: Any = None
    data_collator: Any = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_live(self) -> bool:
        """Whether the model itself was handed over (or a function that builds it), not just its config."""
        return self.model is not None or self.model_init is not None


def load_objects(path: str) -> LiveObjects:
    """Return the objects in a cloudpickle file that holds a dict.

    Keys: `model` (module, config or zero-argument callable), `model_init`, `config`, `train_dataset`,
    `data_collator`; others are kept in `extra`. Loading runs code: only files made by this program's parent
    process are given here.

    Raises:
        UserError: unreadable in this process, or not such a dict.
    """
    import cloudpickle

    try:
        with open(path, "rb") as handle:
            packed = handle.read()
    except OSError as error:
        raise UserError(f"the objects' file cannot be read: {error.strerror or error}") from None
    try:
        data = cloudpickle.loads(packed)
    except MemoryError:
        raise
    except Exception as error:  # unpickling runs the objects' own code, which may raise anything
        raise UserError(
            f"an object cannot be loaded in a trial's process: {type(error).__name__}: {first_line(error)}",
            hint="its class must be in an importable module, and files and connections opened on first use; for a model, pass a function that builds it",
        ) from error
    if not isinstance(data, Mapping):
        raise UserError(f"the objects' file holds a {type(data).__name__}, not a dict")
    return _sorted_out(data)


def _sorted_out(data: Mapping[str, Any]) -> LiveObjects:
    rest = dict(data)
    given = {"model": rest.pop("model", None), "model_init": rest.pop("model_init", None)}
    given["config"] = rest.pop("config", None)
    candidate = given["model"]
    if isinstance(candidate, PretrainedConfig):
        given.update(model=None, config=candidate)
    elif candidate is not None and not isinstance(candidate, torch.nn.Module):
        if not callable(candidate):
            raise UserError(
                f"model must be a module, a config or a function, got {type(candidate).__name__}",
                hint="pass a name, a path, an nn.Module, a config, or a function that builds the model",
            )
        given.update(model=None, model_init=candidate)
    _check_kinds(given)
    return LiveObjects(
        **given,
        train_dataset=rest.pop("train_dataset", None),
        data_collator=rest.pop("data_collator", None),
        extra=MappingProxyType(rest),
    )


def _check_kinds(given: Mapping[str, Any]) -> None:
    if given["config"] is not None and not isinstance(given["config"], PretrainedConfig):
        raise UserError(f"config must be a transformers config, got {type(given['config']).__name__}")
    if given["model_init"] is not None and not callable(given["model_init"]):
        raise UserError(f"model_init must be a function, got {type(given['model_init']).__name__}")
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise UserError(f"{' and '.join(several)} were both given: only one of them can be the model")
