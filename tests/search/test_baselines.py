"""The baselines are exact, and the hand recipe finds the largest power of two that fits in few trials."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.problem.config import Precision, TrialConfig
from autofit.search.baselines import (
    FIRST_GUESS,
    half_precision,
    hand_recipe,
    hand_recipe_sizes,
    next_hand_recipe,
    plain_defaults,
    settled_hand_recipe,
    why_no_hand_recipe,
)
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord
from tests.builders import make_record
from tests.strategies import effective_batches

OPTIM = "adamw_torch_fused"


@given(effective_batches())
def test_plain_defaults_are_the_libraries_own_at_the_exact_product(effective_batch: int) -> None:
    config = plain_defaults(effective_batch, OPTIM)
    assert config.effective_batch() == effective_batch
    assert config.per_device_train_batch_size <= 8
    assert config == TrialConfig(
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        optim=OPTIM,
    )


@pytest.mark.parametrize(
    ("total", "size"), [(1, 1), (7, 7), (36, 6), (50, 5), (64, 8), (97, 1), (100, 5), (256, 8)]
)
def test_plain_defaults_take_eight_or_the_largest_divisor_below(total: int, size: int) -> None:
    assert plain_defaults(total, OPTIM).per_device_train_batch_size == size


def test_plain_defaults_of_a_model_that_is_stored_in_bf16_train_it_as_that() -> None:
    assert plain_defaults(8, OPTIM, weights_dtype="bfloat16").precision is Precision.PURE_BF16
    assert plain_defaults(8, OPTIM, {"bf16": True}, weights_dtype="bfloat16").precision is Precision.BF16
    assert plain_defaults(8, OPTIM, weights_dtype="float32").precision is Precision.FP32


@given(effective_batches())
def test_the_hand_tries_every_power_of_two_that_divides(effective_batch: int) -> None:
    sizes = hand_recipe_sizes(effective_batch)
    assert list(sizes) == [2**k for k in range(14) if effective_batch % 2**k == 0]
    recipes = [hand_recipe(effective_batch, size, Precision.BF16, OPTIM) for size in sizes]
    assert {recipe.effective_batch() for recipe in recipes} == {effective_batch}


@pytest.mark.parametrize(
    ("native", "chosen"),
    [
        (tuple(Precision), Precision.BF16),
        ((Precision.FP32, Precision.FP16), Precision.FP16),
        ((Precision.FP32, Precision.TF32), Precision.FP32),
        ((), Precision.FP32),
    ],
)
def test_the_hand_takes_the_half_precision_that_is_native(
    native: tuple[Precision, ...], chosen: Precision
) -> None:
    assert half_precision(native) is chosen


def ladder(effective_batch: int) -> list[TrialConfig]:
    sizes = hand_recipe_sizes(effective_batch)
    return [hand_recipe(effective_batch, size, Precision.BF16, OPTIM) for size in sizes]


def climb(
    recipes: list[TrialConfig], largest: int, likely: Callable[[TrialConfig], bool | None]
) -> list[TrialRecord]:
    """Run the hand's proposals against a device where sizes to `largest` fit."""
    records: list[TrialRecord] = []
    while True:
        config = next_hand_recipe(recipes, records, too_big=lambda c: False, likely=likely)
        if config is None:
            return records
        fits = config.per_device_train_batch_size <= largest
        assert len(records) <= len(recipes), "no size is tried twice"
        number = len(records)
        records.append(
            make_record(number, config, 10.0)
            if fits
            else make_record(number, config, reason=Reason.OUT_OF_MEMORY)
        )


@given(st.integers(0, 12), st.integers(0, 5000))
def test_without_a_prediction_the_hand_finds_the_largest_that_fits(power: int, largest: int) -> None:
    recipes = ladder(2**power)
    records = climb(recipes, largest, lambda config: None)
    fitting = [c for c in recipes if c.per_device_train_batch_size <= largest]
    assert settled_hand_recipe(recipes, records) == (fitting[-1] if fitting else None)
    assert len({r.config.key() for r in records}) == len(records)
    first = records[0].config.per_device_train_batch_size
    assert first == min(2**power, FIRST_GUESS)


@given(st.integers(0, 12), st.integers(0, 5000))
def test_with_an_exact_prediction_the_hand_needs_one_trial(power: int, largest: int) -> None:
    recipes = ladder(2**power)
    records = climb(recipes, largest, lambda c: c.per_device_train_batch_size <= largest)
    fitting = [c for c in recipes if c.per_device_train_batch_size <= largest]
    assert settled_hand_recipe(recipes, records) == (fitting[-1] if fitting else None)
    assert len(records) == 1


@given(st.integers(0, 12), st.integers(0, 5000), st.integers(0, 5000))
def test_a_wrong_prediction_costs_trials_and_never_an_unproved_answer(
    power: int, largest: int, predicted: int
) -> None:
    recipes = ladder(2**power)
    records = climb(recipes, largest, lambda c: c.per_device_train_batch_size <= predicted)
    settled = settled_hand_recipe(recipes, records)
    assert settled is None or settled.per_device_train_batch_size <= largest
    assert settled is not None or largest == 0 or predicted > largest
    assert len(records) <= 1 + max(0, math.ceil(math.log2(max(1, predicted))) + 1)


def test_what_cannot_fit_is_not_tried() -> None:
    recipes = ladder(64)
    chosen = next_hand_recipe(
        recipes, [], too_big=lambda c: c.per_device_train_batch_size > 4, likely=lambda c: None
    )
    assert chosen is not None
    assert chosen.per_device_train_batch_size == 4
    assert next_hand_recipe(recipes, [], too_big=lambda c: True, likely=lambda c: None) is None


@pytest.mark.parametrize("reason", [Reason.CRASH, Reason.DOMINATED, Reason.OUT_OF_MEMORY])
def test_nothing_above_a_size_that_did_not_complete_is_tried(reason: Reason) -> None:
    recipes = ladder(64)
    records = [make_record(0, recipes[2], reason=reason)]
    chosen = next_hand_recipe(recipes, records, too_big=lambda c: False, likely=lambda c: None)
    assert chosen == recipes[1]


def test_a_size_that_was_out_of_memory_once_does_not_count_as_fitting() -> None:
    recipes = ladder(4)
    records = [make_record(0, recipes[2], 10.0), make_record(1, recipes[2], reason=Reason.OUT_OF_MEMORY)]
    assert settled_hand_recipe(recipes, records) is None
    assert [r.outcome for r in records] == [Outcome.COMPLETED, Outcome.INFEASIBLE]


@pytest.mark.parametrize(
    ("reasons", "skipped", "said"),
    [
        ({0: Reason.OUT_OF_MEMORY}, None, "no power of two fits without checkpointing"),
        ({}, Reason.PREDICTED_TOO_BIG, "no power of two fits without checkpointing"),
        ({}, None, "was not run"),
        ({2: Reason.INTERRUPTED}, None, "was not run"),
        ({2: Reason.OUT_OF_MEMORY}, None, "was not run"),
        ({2: Reason.ERROR}, None, "what it said"),
        ({}, Reason.DEPARTS_FROM_FP32, "why it is skipped"),
    ],
)
def test_why_there_is_no_hand_recipe_is_said_as_it_was(
    reasons: dict[int, Reason], skipped: Reason | None, said: str
) -> None:
    recipes = ladder(64)
    records = [make_record(n, recipes[n], reason=reason, message="what it said") for n, reason in reasons.items()]
    failure = None if skipped is None else Failure(reason=skipped, message="why it is skipped")
    assert why_no_hand_recipe(recipes, records, skipped=lambda c: failure) == said


def test_powers_of_two_that_are_not_searched_are_not_said_not_to_fit() -> None:
    recipes = ladder(64)[5:]
    records = [make_record(0, recipes[0], reason=Reason.OUT_OF_MEMORY)]
    said = "without checkpointing batch 32 does not fit, and no smaller power of two is searched"
    assert why_no_hand_recipe(recipes, records, skipped=lambda c: None) == said


def test_a_hand_recipe_that_exists_needs_no_excuse() -> None:
    recipes = ladder(4)
    assert why_no_hand_recipe(recipes, [make_record(0, recipes[1], 10.0)], skipped=lambda c: None) is None
