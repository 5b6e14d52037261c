"""What is around a live model: Trainer class, collator, callbacks, processing class and the arguments that are kept. Records made in other surroundings
must not mix."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn, optim

from autofit.workload.digests import digest_of, module_digest

#: beginnings of arguments that say where and when to write, report or evaluate: a trial does none of it
NOT_MEASURED = (
    "output_dir", "logging_", "log_", "save_", "eval_", "per_device_eval", "do_", "hub_", "push_", "report_", "run_name", "project",
    "load_best", "metric_for", "greater_is", "resume_", "disable_tqdm", "num_train_epochs", "max_steps", "seed", "data_seed",
)  # fmt: skip


def training_facts(extra: Mapping[str, Any], *, own_directory: str | None = None) -> dict[str, str]:
    """`training`, a label and a digest of what the user put around the model; empty where there is nothing.

    Args:
        extra: the live objects beside model and data.
        own_directory: of a trial, whose name is another each time: no text that holds it counts.
    """
    collator = extra.get("data_collator")
    named = [extra.get("trainer_cls"), *(extra.get("callbacks") or ()), extra.get("processing_class")]
    names = [_class_name(thing) for thing in named if thing is not None]
    arguments = {k: v for k, v in (extra.get("arguments") or {}).items() if not k.startswith(NOT_MEASURED)}
    further = extra.get("trainer_arguments") or {}
    if not names and not arguments and not further and collator is None:
        return {}
    label = ", ".join(name.rpartition(".")[2] for name in names) or "Trainer"
    own = [] if collator is None else [_collator(collator)]
    told = _without([names, _told(arguments), _told(further), *own], own_directory)
    return {"training": f"{label} {digest_of(told)}"}


def _without(told: Any, directory: str | None) -> Any:
    """JSON without the texts that hold the name of a directory."""
    if isinstance(told, dict):
        return {name: _without(value, directory) for name, value in told.items()}
    if isinstance(told, list):
        return [_without(value, directory) for value in told]
    return None if directory and isinstance(told, str) and directory in told else told


def _collator(collator: Any) -> Any:
    """What a collator does, as far as its code and its plain attributes say: it decides the length of every batch."""
    if isinstance(collator, functools.partial):
        return [_collator(collator.func), _told(list(collator.args)), _told(collator.keywords)]
    code = getattr(collator, "__code__", None)
    if code is not None:
        constants = [value for value in code.co_consts if _told(value) == value]
        return [collator.__qualname__, code.co_code.hex(), constants, list(code.co_names)]
    return [_class_name(collator), _told(getattr(collator, "__dict__", {}))]


def _class_name(thing: Any) -> str:
    cls = thing if isinstance(thing, type) else type(thing)
    return f"{cls.__module__}.{cls.__qualname__}"


def _told(value: Any) -> Any:
    """A value as JSON that is the same in every process: plain data as it is, models by their parameters, optimizers by their
    settings, anything else by the name of its class."""
    if isinstance(value, Mapping):
        return {str(k): _told(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_told(v) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, nn.Module):
        return module_digest(value)
    if isinstance(value, optim.Optimizer):
        return [_class_name(value), _told(value.defaults)]
    return getattr(value, "__qualname__", None) or _class_name(value)
