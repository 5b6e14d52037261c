"""A configuration is exact, comparable and JSON; what it cannot be is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.problem.config import PRECISION_FACTS, Precision, TrialConfig
from tests.refusals import refused
from tests.strategies import trial_configs


@given(trial_configs())
def test_a_configuration_survives_json(config: TrialConfig) -> None:
    assert TrialConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@given(trial_configs(), trial_configs())
def test_keys_are_equal_exactly_for_equal_configurations(one: TrialConfig, other: TrialConfig) -> None:
    assert (one.key() == other.key()) == (one == other)
    assert one.key() == TrialConfig.from_json(json.loads(one.key())).key()


@given(trial_configs(effective_batch=96), st.integers(1, 16))
def test_the_product_counts_every_device(config: TrialConfig, world_size: int) -> None:
    assert config.effective_batch() == 96
    assert config.effective_batch(world_size) == 96 * world_size


def test_the_order_of_extras_does_not_matter() -> None:
    one = TrialConfig(per_device_train_batch_size=1, extra=(("b", 1), ("a", 2)))
    other = TrialConfig(per_device_train_batch_size=1, extra=(("a", 2), ("b", 1)))
    assert one == other
    assert hash(one) == hash(other)
    assert one.key() == other.key()


def test_a_configuration_cannot_be_changed_only_copied() -> None:
    config = TrialConfig(per_device_train_batch_size=8)
    with pytest.raises(AttributeError):
        config.optim = "sgd"  # type: ignore[misc]
    changed = config.but(optim="sgd", precision="bf16")
    assert (changed.optim, changed.precision) == ("sgd", Precision.BF16)
    assert config.optim == "adamw_torch_fused"


def test_a_label_says_what_differs_at_a_glance() -> None:
    config = TrialConfig(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        precision=Precision.BF16,
        optim="adafactor",
        extra=(("attn_implementation", "sdpa"),),
    )
    assert config.label() == "8x4 bf16 ckpt adafactor attn_implementation=sdpa"
    assert config.but(gradient_checkpointing=False, extra=()).label() == "8x4 bf16 adafactor"


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -8, 1.0, "8", True, None])
def test_a_size_that_is_not_a_positive_integer_is_refused(name: str, value: Any) -> None:
    fields = {"per_device_train_batch_size": 8, name: value}
    with refused(f"^{name} must be a positive integer, got {value!r}$"):
        TrialConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"gradient_checkpointing": 1}, "^gradient_checkpointing must be true or false, got 1$", None),
        ({"precision": "fp8"}, "^unknown precision 'fp8'$", "choose from fp32, tf32, bf16, fp16, pure_bf16"),
        ({"precision": None}, "^unknown precision None$", "choose from"),
        ({"optim": ""}, "^optim must be the name of an optimizer, got ''$", None),
        ({"optim": 3}, "^optim must be the name of an optimizer, got 3$", None),
    ],
)
def test_a_knob_of_a_wrong_kind_is_refused(fields: dict[str, Any], message: str, hint: str | None) -> None:
    with refused(message, hint=hint):
        TrialConfig(per_device_train_batch_size=8, **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": ...}, "^a configuration lacks optim$"),
        ({"optim": ..., "precision": ...}, "^a configuration lacks precision, optim$"),
        ({"attn": [1]}, "^configuration field 'attn' must be a scalar, got list$"),
        ({"attn": {"a": 1}}, "^configuration field 'attn' must be a scalar, got dict$"),
        (
            {"per_device_train_batch_size": 0},
            "^per_device_train_batch_size must be a positive integer, got 0$",
        ),
    ],
)
def test_json_that_is_no_configuration_is_refused(change: dict[str, Any], message: str) -> None:
    data = {**TrialConfig(per_device_train_batch_size=8).to_json(), **change}
    with refused(message):
        TrialConfig.from_json({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize("thing", [None, [], "8x8", 3])
def test_json_that_is_not_an_object_is_refused(thing: Any) -> None:
    with refused(f"^a configuration must be an object, got {type(thing).__name__}$"):
        TrialConfig.from_json(thing)


def test_precision_is_three_separate_facts() -> None:
    facts = {p: (f.weight_dtype, f.autocast_dtype, f.fp32_matmul) for p, f in PRECISION_FACTS.items()}
    assert facts == {
        Precision.FP32: ("float32", None, "ieee"),
        Precision.TF32: ("float32", None, "tf32"),
        Precision.BF16: ("float32", "bfloat16", "ieee"),
        Precision.FP16: ("float32", "float16", "ieee"),
        Precision.PURE_BF16: ("bfloat16", None, "ieee"),
    }
    assert [dict(PRECISION_FACTS[p].arguments) for p in Precision] == [
        {},
        {"tf32": True},
        {"bf16": True},
        {"fp16": True},
        {},
    ]
