"""Belief about memory: forecasts and their correction, learning without forecasts, dominance."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autofit.beliefs.learned_memory import MemorySighting
from autofit.beliefs.predict import MemoryBelief, MemoryForecast, dominates, least_trust, normal_cdf
from autofit.problem.config import Precision, TrialConfig
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord
from autofit.units import GIB
from tests.adversaries import CONTEXT, grid, plain_bytes

CONFIGS = tuple(p.config for p in grid().points)
LIMIT = 16 * GIB


class Biased:
    """Predicts `factor` times the truth with a band of 8 % to either side."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def needed(self, config: TrialConfig) -> MemoryForecast:
        """Context included."""
        guess = int(self._factor * (plain_bytes(config) + CONTEXT))
        return MemoryForecast(low_bytes=int(0.92 * guess), bytes=guess, high_bytes=int(1.08 * guess))


def record(number: int, config: TrialConfig, limit: int = LIMIT) -> TrialRecord:
    """What a trial of the adversaries' model shows."""
    needed = plain_bytes(config)
    if needed + CONTEXT > limit:
        failure = Failure(reason=Reason.OUT_OF_MEMORY, message="out of memory")
        return TrialRecord(number=number, config=config, outcome=Outcome.INFEASIBLE, failure=failure)
    memory = Memory(peak_reserved_bytes=needed, context_bytes=CONTEXT)
    measurement = Measurement(micro_step_seconds=(0.1,), memory=memory)
    return TrialRecord(number=number, config=config, outcome=Outcome.COMPLETED, measurement=measurement)


def truth(limit: int = LIMIT) -> np.ndarray:
    """Which configurations fit."""
    return np.array([plain_bytes(c) + CONTEXT <= limit for c in CONFIGS])


def test_a_forecast_keeps_its_order() -> None:
    with pytest.raises(ValueError, match="low <= bytes <= high"):
        MemoryForecast(low_bytes=3, bytes=2, high_bytes=4)


def test_what_is_too_big_is_so_at_its_low_end() -> None:
    forecast = MemoryForecast(low_bytes=9, bytes=10, high_bytes=11)
    assert forecast.too_big(8)
    assert not forecast.too_big(9)
    assert not forecast.too_big(None)


def test_without_a_limit_everything_fits() -> None:
    fits = MemoryBelief(CONFIGS, limit_bytes=None).update((), np.random.default_rng(0))
    assert (fits == 1.0).all()


def test_a_trial_corrects_the_forecasts_of_all_others() -> None:
    belief = MemoryBelief(CONFIGS, limit_bytes=LIMIT, model=Biased(0.95))
    belief.update([record(i, CONFIGS[i]) for i in (0, 40, 90)], np.random.default_rng(0))
    errors = []
    for config in CONFIGS:
        forecast = belief.forecast(config)
        assert forecast is not None
        errors.append(forecast.bytes / (plain_bytes(config) + CONTEXT) - 1)
    assert abs(float(np.median(errors))) < 0.02


def test_a_bias_within_the_band_is_seen_through_after_one_trial_near_the_limit() -> None:
    belief = MemoryBelief(CONFIGS, limit_bytes=LIMIT, model=Biased(0.95))
    near = max((c for c in CONFIGS if plain_bytes(c) + CONTEXT <= LIMIT), key=plain_bytes)
    before = belief.update((), np.random.default_rng(0))
    after = belief.update([record(0, near)], np.random.default_rng(0))
    wrong = ~truth()
    assert after[wrong].sum() <= before[wrong].sum()


def test_what_ran_out_of_memory_and_what_needs_no_less_cannot_fit() -> None:
    limit = 8 * GIB
    too_big = next(
        c for c in CONFIGS if plain_bytes(c) + CONTEXT > limit and c.gradient_accumulation_steps > 1
    )
    fits = MemoryBelief(CONFIGS, limit_bytes=limit).update(
        [record(0, too_big, limit)], np.random.default_rng(0)
    )
    for config, probability in zip(CONFIGS, fits):
        if dominates(config, too_big):
            assert probability == 0.0


def test_what_completed_fits_whatever_a_smaller_one_did_afterwards() -> None:
    # A run near the limit may go either way: what was seen of a configuration itself outweighs what another one implies.
    large = max(CONFIGS, key=plain_bytes)
    small = next(c for c in CONFIGS if c != large and dominates(large, c))
    completed = replace(record(0, small, 80 * GIB), config=large)
    failure = Failure(reason=Reason.OUT_OF_MEMORY, message="out of memory")
    lost = TrialRecord(number=1, config=small, outcome=Outcome.INFEASIBLE, failure=failure)
    fits = dict(zip(CONFIGS, MemoryBelief(CONFIGS, limit_bytes=LIMIT).update([completed, lost], np.random.default_rng(0))))
    assert (fits[large], fits[small]) == (1.0, 0.0)


def test_memory_is_learned_from_a_handful_of_trials() -> None:
    chosen = [
        c
        for c in CONFIGS
        if c.per_device_train_batch_size in (1, 8, 16)
        and c.optim == "adamw_torch_fused"
        and c.precision in (Precision.BF16, Precision.FP32)
    ][:8]
    fits = MemoryBelief(CONFIGS, limit_bytes=LIMIT).update(
        [record(i, c) for i, c in enumerate(chosen)], np.random.default_rng(0)
    )
    assert ((fits > 0.5) == truth()).mean() > 0.85


def test_probability_never_rises_with_the_batch_of_a_class() -> None:
    fits = MemoryBelief(CONFIGS, limit_bytes=LIMIT).update([record(0, CONFIGS[0])], np.random.default_rng(0))
    groups: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    for config, probability in zip(CONFIGS[1:], fits[1:]):
        if config.gradient_accumulation_steps > 1:
            key = (config.precision, config.optim, config.gradient_checkpointing)
            groups.setdefault(key, []).append((config.per_device_train_batch_size, float(probability)))
    for group in groups.values():
        ordered = [p for _, p in sorted(group)]
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(ordered))


def test_dominance_needs_the_same_class_and_no_fewer_gradients() -> None:
    small = TrialConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    large = TrialConfig(per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert not dominates(large, small)  # one micro-step keeps no gradients
    assert dominates(large, large.but(gradient_checkpointing=True))
    assert not dominates(large.but(optim="adafactor"), large)


def test_the_normal_distribution_function_is_exact() -> None:
    assert normal_cdf(np.array([0.0, 1.959964])) == pytest.approx([0.5, 0.975], abs=1e-6)


def test_only_contradictions_of_the_learned_form_keep_everything_possible() -> None:
    fused, adafactor = (
        TrialConfig(per_device_train_batch_size=8, gradient_accumulation_steps=8, optim=optim)
        for optim in ("adamw_torch_fused", "adafactor")
    )

    def seen(config: TrialConfig, needed_bytes: int | None) -> MemorySighting:
        return MemorySighting(config=config, needed_bytes=needed_bytes)

    assert least_trust([]) == 0.0
    assert least_trust([seen(fused, None), seen(adafactor, GIB)]) == 0.0, "more state, and it did not fit: as expected"
    assert least_trust([seen(fused, GIB), seen(adafactor, None)]) == pytest.approx(0.1)
    larger = adafactor.but(per_device_train_batch_size=16, gradient_accumulation_steps=4)
    assert least_trust([seen(fused, GIB), seen(larger, None)]) == 0.0, "a larger batch may need more"
    twice = [seen(fused, GIB), seen(adafactor, None), seen(adafactor.but(gradient_checkpointing=True), None)]
    assert least_trust(twice) == pytest.approx(0.15)
