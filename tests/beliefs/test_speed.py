"""Belief about speed: what trials teach, and how sure it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autofit.beliefs.speed import DRIFT_SHARE, Observation, SpeedModel, log_time, update_prior
from autofit.problem.config import Precision, TrialConfig
from autofit.trials.landscape import Landscape
from autofit.trials.measurement import Measurement
from tests.adversaries import grid


def observed(landscape: Landscape, rows: list[int]) -> list[Observation]:
    """Trials of these points."""
    points = [landscape.points[row] for row in rows]
    return [Observation.of(p.config, p.measurement) for p in points if p.measurement is not None]


def true_log_speeds(landscape: Landscape) -> np.ndarray:
    """By the medians of the recorded samples."""
    return np.array(
        [
            math.log(
                p.measurement.samples_per_second(
                    per_device_train_batch_size=p.config.per_device_train_batch_size,
                    gradient_accumulation_steps=p.config.gradient_accumulation_steps,
                )
            )
            for p in landscape.points
            if p.measurement is not None
        ]
    )


def draws(landscape: Landscape, rows: list[int], count: int = 400) -> np.ndarray:
    """Posterior after trials of these points."""
    model = SpeedModel([p.config for p in landscape.points])
    return model.log_speed_draws(observed(landscape, rows), count, np.random.default_rng(0))


def test_error_of_a_median_joins_jitter_and_drift() -> None:
    rng = np.random.default_rng(0)
    quiet = log_time(tuple(0.1 * np.exp(rng.normal(0, 0.001, 50))), floor=1e-9)
    noisy = log_time(tuple(0.1 * np.exp(rng.normal(0, 0.1, 50))), floor=1e-9)
    assert quiet.value == pytest.approx(math.log(0.1), abs=0.001)
    assert quiet.error < 0.005
    assert noisy.error > DRIFT_SHARE * 0.07


def test_what_was_measured_is_known_to_within_its_noise() -> None:
    landscape = grid()
    found = draws(landscape, [0, 100, 200])
    truth = true_log_speeds(landscape)
    for row in (0, 100, 200):
        assert found[:, row].mean() == pytest.approx(truth[row], abs=0.02)
        low, high = np.quantile(found[:, row], [0.16, 0.84])
        assert high - low < 0.05


def test_one_trial_teaches_about_other_optimizers_of_the_same_micro_step() -> None:
    landscape = grid()
    found = draws(landscape, [0])
    first = landscape.points[0].config
    for row, point in enumerate(landscape.points):
        same_cell = point.config.but(optim=first.optim) == first
        if same_cell and first.gradient_accumulation_steps >= 16:
            assert found[:, row].std() < 0.1


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    landscape = grid()
    rng = np.random.default_rng(5)
    truth, inside = true_log_speeds(landscape), []
    for _ in range(6):
        found = draws(landscape, [int(r) for r in rng.choice(len(landscape.points), 8, replace=False)])
        low, high = np.quantile(found, [0.025, 0.975], axis=0)
        inside.append(((low <= truth) & (truth <= high)).mean())
    assert np.mean(inside) >= 0.9


def test_more_trials_make_it_surer() -> None:
    landscape = grid()
    assert (
        draws(landscape, list(range(0, 224, 14))).std(axis=0).mean()
        < 0.7 * draws(landscape, [0, 112]).std(axis=0).mean()
    )


def test_runs_that_disagree_are_trusted_less() -> None:
    def spread(drift: float) -> float:
        landscape = grid(drift=drift, seed=2)
        return float(draws(landscape, list(range(0, 224, 9))).std(axis=0).mean())

    assert spread(0.3) > 2 * spread(0.0)


def test_a_roofline_orders_configurations_before_any_trial() -> None:
    configs = [p.config for p in grid().points]

    class Roof:
        def micro_seconds(self, config: TrialConfig) -> float:
            return config.per_device_train_batch_size * (0.25 if config.precision is Precision.BF16 else 1.0)

        def update_seconds(self, config: TrialConfig) -> float:
            return 0.1

    found = SpeedModel(configs, Roof()).log_speed_draws((), 200, np.random.default_rng(0)).mean(axis=0)
    fast = [found[i] for i, c in enumerate(configs) if c.precision is Precision.BF16]
    slow = [found[i] for i, c in enumerate(configs) if c.precision is Precision.FP32]
    assert np.mean(fast) > np.mean(slow) + 0.5


def test_missing_update_and_fetch_samples_are_no_error() -> None:
    configs = [p.config for p in grid(effective_batch=4).points]
    seen = Observation.of(configs[0], Measurement(micro_step_seconds=(0.1, 0.1, 0.1)))
    assert seen.update is None
    found = SpeedModel(configs).log_speed_draws([seen], 50, np.random.default_rng(0))
    assert np.isfinite(found).all()


def test_an_unknown_optimizer_is_believed_anything_within_reason() -> None:
    mean, spread = update_prior("my_optimizer")
    assert spread > update_prior("adamw_torch_fused")[1]
    assert abs(mean) < 2 * spread
