"""The user's own class of arguments (`SFTConfig`, `DPOConfig`, `Seq2SeqTrainingArguments`, ...): its fields, and what it trains with by default.

TRL's classes train in bf16 and with checkpointing unless told otherwise: what must be written down, and what "plain defaults" means, depends on the class.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any

from transformers import TrainingArguments

from autofit.errors import UserError
from autofit.problem.adaptation import peft_config_json
from autofit.problem.arguments import CHECKPOINTING_NAMES
from autofit.workload.digests import digest_of, json_able

MISSING = type(dataclasses.MISSING)  #: by class: that of a class which travelled by cloudpickle is another object
#: fields that a class may settle in `__post_init__`
SETTLED = ("bf16", "fp16", "tf32", "optim", "per_device_train_batch_size", *CHECKPOINTING_NAMES)


def argument_defaults(cls: type[TrainingArguments] = TrainingArguments) -> dict[str, Any]:
    """Name -> default of every field of a class of arguments; enums as their values, factories called."""
    defaults = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        value = None if isinstance(field.default, MISSING) else field.default
        if callable(field.default_factory):
            value = field.default_factory()
        defaults[field.name] = value.value if isinstance(value, Enum) else value
    return defaults


def effective_defaults(cls: type[TrainingArguments], *, cpu: bool) -> dict[str, Any]:
    """As `argument_defaults`, with what the class makes of them: `bf16=None` is on for TRL's classes.

    Args:
        cls: a subclass of `TrainingArguments`.
        cpu: whether the training is on the CPU.
    """
    defaults = argument_defaults(cls)
    try:
        with tempfile.TemporaryDirectory(prefix="autofit-") as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = cls(output_dir=directory, use_cpu=cpu)
    except Exception:  # the class's own code: it refuses its own defaults on this device, bf16 above all
        return {**defaults, "bf16": True if defaults.get("bf16") is None else defaults["bf16"]}
    for name in SETTLED:
        if name in defaults:
            value = getattr(plain, name)
            defaults[name] = value.value if isinstance(value, Enum) else value
    return defaults


def class_of(extra: Mapping[str, Any]) -> type[TrainingArguments]:
    """The class of the user's arguments among the live objects; the plain one when there are none."""
    return extra.get("arguments_cls") or TrainingArguments


def refuse_model_keywords(extra: Mapping[str, Any]) -> None:
    """Refuse what the user's arguments say of loading the model (TRL's `model_init_kwargs`): one that has only a name is built here, without them.

    Raises:
        UserError: they say something.
    """
    if (extra.get("arguments") or {}).get("model_init_kwargs"):
        raise UserError(
            f"{class_of(extra).__name__} holds model_init_kwargs, which do not reach a model that autofit builds from a name or a config",
            hint='load the model with them and hand that over, or say it here: precision="pure_bf16", attn_implementation=..., quantize=...',
        )


def trained_as(facts: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a model with what the user's Trainer makes of it: fields of its arguments' own class, and an adapter that it puts on.

    Returns:
        `digest`, which tells trainings apart whose records must not mix, and `adapter`; empty where a Trainer adds nothing.
    """
    plain = argument_defaults()
    kept = {k: v for k, v in (extra.get("arguments") or {}).items() if k not in plain}
    config = (extra.get("trainer_arguments") or {}).get("peft_config")
    if not kept and config is None:
        return {}
    adapter = None if config is None else peft_config_json(config)
    found: dict[str, Any] = {"digest": digest_of([facts["digest"], json_able(kept), adapter])}
    if adapter is not None:
        found |= {"adapter": json.loads(adapter).get("peft_type"), "n_trainable_params": None}
    return found


def qualified_name(cls: type[Any]) -> str:
    """`module.Class`, as an import would find it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def own_class(cls: type[TrainingArguments], *, cpu: bool) -> dict[str, Any]:
    """`arguments_class` and `argument_defaults` of the user's own class, as JSON; empty for the plain one."""
    if cls is TrainingArguments:
        return {}
    return {"arguments_class": qualified_name(cls), "argument_defaults": scalars(effective_defaults(cls, cpu=cpu))}


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that JSON knows."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | None)}
