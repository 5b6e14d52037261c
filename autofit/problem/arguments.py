"""TrainingArguments keywords of a configuration, by the names that the installed transformers knows and has not deprecated."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from autofit.errors import UserError
from autofit.problem.config import PRECISION_FACTS, TrialConfig

MODEL_EXTRAS = ("attn_implementation",)  #: go to the model's constructor, not to TrainingArguments
CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")  #: the newer name first
CHECKPOINTING_EXTRAS = (
    "use_reentrant",
    "every_n_layers",
    "offload",
)  #: go to activation_checkpointing_kwargs

DEFAULT_BATCH = 8  #: TrainingArguments' own per_device_train_batch_size
#: Defaults of transformers 5.23 for the fields that are tuned: for answers without an installed transformers at hand (a replay).
KNOWN_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": DEFAULT_BATCH,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": None,
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "optim": "adamw_torch_fused",
    "torch_compile": False,
    "use_liger_kernel": False,
}

#: What a trial and a trace must not do, whatever the user's own arguments say: write, report, evaluate, or stop early for another reason.
SILENT_ARGUMENTS: Mapping[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "num_train_epochs": 1,
    "logging_first_step": False,
    "eval_on_start": False,
    "enable_jit_checkpoint": False,
    "resume_from_checkpoint": None,
}


def explicit_arguments(config: TrialConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every knob as a keyword, also where it equals the default, so that nothing of a base `args` shines through.

    Args:
        config: the configuration.
        defaults: name -> default of each field of the installed TrainingArguments.

    Raises:
        UserError: an extra that the installed TrainingArguments does not know.
    """
    checkpointing = checkpointing_name(defaults)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        checkpointing: config.gradient_checkpointing,
        "bf16": False,
        "fp16": False,
        "tf32": None,
        "optim": config.optim,
        **PRECISION_FACTS[config.precision].arguments,
    }
    options = {}
    for name, value in config.extra:
        if name in CHECKPOINTING_EXTRAS:
            options[name] = value
        elif name not in MODEL_EXTRAS:
            if name not in defaults:
                raise UserError(f"the installed TrainingArguments has no argument {name!r}")
            arguments[name] = value
    if options and config.gradient_checkpointing:
        arguments[f"{checkpointing}_kwargs"] = options
    return arguments


def with_own(own: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own keywords under those of a configuration; ways of checkpointing that it does not name stay the user's."""
    merged = {**own, **explicit}
    for name in (f"{name}_kwargs" for name in CHECKPOINTING_NAMES):
        if isinstance(explicit.get(name), Mapping):
            merged[name] = {**(own.get(name) or {}), **explicit[name]}
    return merged


def overridden(arguments: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that hold another value than was asked for, with that value: a class of the user's own may settle them itself.

    Args:
        arguments: a TrainingArguments.
        asked: keywords that it was made with.
    """
    found = {name: getattr(arguments, name, value) for name, value in asked.items() if not isinstance(value, Mapping)}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if (value or False) != (asked[name] or False)}


def refuse_overridden(arguments: Any, asked: Mapping[str, Any]) -> None:
    """Have a class that does not take what is tuned say so, instead of training something else.

    Raises:
        UserError: a field of `arguments` holds another value than `asked`, by name.
    """
    name = type(arguments).__name__
    for field, value in overridden(arguments, asked).items():
        raise UserError(
            f"{name} makes {field}={value!r} of {field}={asked[field]!r}",
            hint=f"what is tuned must stay as it is given: see {name}.__post_init__",
        )


def training_arguments(config: TrialConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that differ from the installed defaults: what the user must write, and no more."""
    arguments = explicit_arguments(config, defaults)
    # A default of None for a switch means False to TrainingArguments (activation_checkpointing).
    return {
        name: value
        for name, value in arguments.items()
        if value != defaults.get(name) and not (value is False and defaults.get(name) is None)
    }


def model_arguments(config: TrialConfig) -> dict[str, Any]:
    """Keywords for `from_pretrained` that the configuration needs beside TrainingArguments (empty for most)."""
    arguments = {name: value for name, value in config.extra if name in MODEL_EXTRAS and value is not None}
    facts = PRECISION_FACTS[config.precision]
    if facts.weight_dtype != "float32":
        arguments["dtype"] = facts.weight_dtype
    return arguments


def checkpointing_name(defaults: Mapping[str, Any]) -> str:
    """`activation_checkpointing` where the installed version has it (5.23 deprecates the old name), else `gradient_checkpointing`."""
    newer, older = CHECKPOINTING_NAMES
    return newer if newer in defaults else older
