"""A configuration becomes the keywords that the installed TrainingArguments knows: all of them, or what differs."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from autofit.problem.arguments import (
    KNOWN_DEFAULTS,
    checkpointing_name,
    explicit_arguments,
    model_arguments,
    training_arguments,
    with_own,
)
from autofit.problem.config import Precision, TrialConfig
from tests.builders import ARGUMENT_DEFAULTS
from tests.refusals import refused
from tests.strategies import trial_configs

OLD_NAMES = {
    name.replace("activation_", "gradient_"): value for name, value in ARGUMENT_DEFAULTS.items()
}  #: before 5.23
KNOBS = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "bf16",
    "fp16",
    "tf32",
    "optim",
}


@given(trial_configs())
def test_every_knob_is_said_so_that_nothing_shines_through(config: TrialConfig) -> None:
    arguments = explicit_arguments(config, ARGUMENT_DEFAULTS)
    assert set(arguments) >= KNOBS
    assert arguments["per_device_train_batch_size"] == config.per_device_train_batch_size
    assert arguments["gradient_accumulation_steps"] == config.gradient_accumulation_steps
    assert sum(bool(arguments[name]) for name in ("bf16", "fp16", "tf32")) <= 1


@given(trial_configs())
def test_what_the_user_must_write_is_what_differs_and_leads_to_the_same(config: TrialConfig) -> None:
    short = training_arguments(config, ARGUMENT_DEFAULTS)
    assert all(ARGUMENT_DEFAULTS[name] != value for name, value in short.items())
    for name, value in explicit_arguments(config, ARGUMENT_DEFAULTS).items():
        seen = short.get(name, ARGUMENT_DEFAULTS[name])
        assert seen == value or (seen is None and value is False)


@given(trial_configs())
def test_the_product_is_exact_in_what_the_user_writes(config: TrialConfig) -> None:
    written = {**ARGUMENT_DEFAULTS, **training_arguments(config, ARGUMENT_DEFAULTS)}
    product = written["per_device_train_batch_size"] * written["gradient_accumulation_steps"]
    assert product == config.effective_batch()


def test_the_library_defaults_need_no_keywords() -> None:
    config = TrialConfig(per_device_train_batch_size=8)
    assert training_arguments(config, ARGUMENT_DEFAULTS) == {}
    assert training_arguments(config, KNOWN_DEFAULTS) == {}


@pytest.mark.parametrize(
    ("precision", "written"),
    [
        (Precision.FP32, {}),
        (Precision.TF32, {"tf32": True}),
        (Precision.BF16, {"bf16": True}),
        (Precision.FP16, {"fp16": True}),
        (Precision.PURE_BF16, {}),
    ],
)
def test_each_precision_has_its_keyword(precision: Precision, written: dict[str, bool]) -> None:
    config = TrialConfig(per_device_train_batch_size=8, precision=precision)
    assert training_arguments(config, ARGUMENT_DEFAULTS) == written
    assert model_arguments(config) == ({"dtype": "bfloat16"} if precision is Precision.PURE_BF16 else {})


@pytest.mark.parametrize(
    ("defaults", "name"),
    [(ARGUMENT_DEFAULTS, "activation_checkpointing"), (OLD_NAMES, "gradient_checkpointing")],
)
def test_checkpointing_goes_by_the_name_that_is_not_deprecated(defaults: dict[str, Any], name: str) -> None:
    config = TrialConfig(per_device_train_batch_size=8, gradient_checkpointing=True)
    assert checkpointing_name(defaults) == name
    assert training_arguments(config, defaults) == {name: True}
    tuned = config.but(extra=(("use_reentrant", False),))
    assert training_arguments(tuned, defaults) == {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def test_ways_of_checkpointing_that_are_not_tuned_stay_the_users() -> None:
    own = {"activation_checkpointing_kwargs": {"use_reentrant": True}, "learning_rate": 1.0, "bf16": True}
    config = TrialConfig(per_device_train_batch_size=8, gradient_checkpointing=True)
    assert with_own(own, explicit_arguments(config, ARGUMENT_DEFAULTS)) == own | explicit_arguments(config, ARGUMENT_DEFAULTS)
    tuned = with_own(own, explicit_arguments(config.but(extra=(("every_n_layers", 2),)), ARGUMENT_DEFAULTS))
    assert tuned["activation_checkpointing_kwargs"] == {"use_reentrant": True, "every_n_layers": 2}
    assert (tuned["learning_rate"], tuned["bf16"]) == (1.0, False)


def test_extras_go_where_they_belong() -> None:
    config = TrialConfig(
        per_device_train_batch_size=8,
        extra=(("attn_implementation", "eager"), ("dataloader_num_workers", 2), ("every_n_layers", 2)),
    )
    assert training_arguments(config, ARGUMENT_DEFAULTS) == {"dataloader_num_workers": 2}
    assert model_arguments(config) == {"attn_implementation": "eager"}
    assert model_arguments(config.but(extra=(("attn_implementation", None),))) == {}


def test_an_extra_that_the_library_does_not_know_is_refused() -> None:
    config = TrialConfig(per_device_train_batch_size=8, extra=(("torch_compil", True),))
    with refused("^the installed TrainingArguments has no argument 'torch_compil'$"):
        explicit_arguments(config, ARGUMENT_DEFAULTS)


def test_the_defaults_we_remember_are_those_of_the_installed_library() -> None:
    """Read from its source: importing transformers for this would cost seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if not isinstance(node.value, ast.Call) or node.target.id not in KNOWN_DEFAULTS:
            continue
        default = next((k.value for k in node.value.keywords if k.arg == "default"), None)
        if isinstance(default, ast.Constant):
            found[node.target.id] = default.value
    assert found.pop("activation_checkpointing", None) is None
    assert len(found) >= 4
    assert found == {name: KNOWN_DEFAULTS[name] for name in found}
