"""Throughput of an epoch whose batches differ: samples over the sum of times, recovered from a few batches."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.beliefs.speed import Observation
from autofit.problem.config import TrialConfig
from autofit.trials.lengths import spread_order
from autofit.trials.measurement import Measurement
from autofit.trials.uneven import BatchSizes, at_mean_batch

BATCH, ACCUMULATION, UPDATE, FETCH = 8, 4, 0.02, 0.001


def seconds_of(sizes: np.ndarray) -> np.ndarray:
    """A micro-step: launches, linear layers, and attention that grows faster than the length."""
    return 0.004 + 2e-5 * sizes + 2e-9 * sizes**2


def short_trial(sizes: np.ndarray, count: int) -> Measurement:
    seen, longest = sizes[spread_order(sizes)[:count]], 1.5 * sizes.max()
    return Measurement(
        micro_step_seconds=tuple(seconds_of(seen)),
        sizes=BatchSizes(
            measured=tuple(seen),
            mean=float(sizes.mean()),
            mean_square=float((sizes**2).mean()),
            longest=longest,
            longest_seconds=(float(seconds_of(np.array(longest))),) * 2,
        ),
        fetch_seconds=(FETCH,) * (count // 2),
        update_seconds=(UPDATE,) * (count // 2),
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.2, 0.6, 0.9])
def test_a_short_trial_gives_an_epochs_throughput_within_five_percent(seed: int, spread: float) -> None:
    sizes = np.minimum(4096, np.random.default_rng(seed).lognormal(6.0, spread, size=400))
    seconds = seconds_of(sizes).sum() + FETCH * len(sizes) + UPDATE * len(sizes) / ACCUMULATION
    epoch = BATCH * len(sizes) / seconds
    asked = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}
    said = short_trial(sizes, 16).samples_per_second(**asked)
    assert said == pytest.approx(epoch, rel=0.05)


def test_the_median_would_have_been_wrong() -> None:
    sizes = np.minimum(4096, np.random.default_rng(0).lognormal(6.0, 0.9, size=400))
    assert statistics.median(seconds_of(sizes)) < 0.85 * seconds_of(sizes).mean()
    assert short_trial(sizes, 16).t_micro == pytest.approx(seconds_of(sizes).mean(), rel=0.05)


@given(
    st.lists(st.floats(1, 1e5), min_size=4, max_size=40, unique=True),
    st.floats(1e-3, 1.0),
    st.floats(1e-6, 1e-3),
    st.floats(1.0, 3.0),
)
def test_a_line_is_recovered_from_any_batches(sizes: list[float], base: float, slope: float, off: float) -> None:
    times = tuple(base + slope * size for size in sizes)
    mean = off * statistics.fmean(sizes)
    adjusted = at_mean_batch(times, BatchSizes(measured=tuple(sizes), mean=mean, mean_square=2 * mean**2))
    assert len(adjusted) == len(times)
    assert all(math.isfinite(t) and t > 0 for t in adjusted)
    if np.ptp(sizes) > 0.1 * max(sizes):
        assert statistics.fmean(adjusted) == pytest.approx(base + slope * mean, rel=1e-3)


def test_noise_of_fast_batches_does_not_pull_the_mean_down() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(6.0, 0.9, size=400)
    noisy = seconds_of(sizes) * rng.lognormal(0.0, 0.3, size=400)
    seen = spread_order(sizes)[:32]
    found = []
    for _ in range(40):
        times = seconds_of(sizes[seen]) * rng.lognormal(0.0, 0.3, size=32)
        told = BatchSizes(measured=tuple(sizes[seen]), mean=float(sizes.mean()), mean_square=float((sizes**2).mean()))
        found.append(statistics.fmean(at_mean_batch(tuple(times), told)))
    assert statistics.fmean(found) == pytest.approx(noisy.mean(), rel=0.05)


@pytest.mark.parametrize("count", [4, 8, 30])
def test_the_interval_of_uneven_batches_holds_the_epochs_speed(count: int) -> None:
    rng, runs, hits = np.random.default_rng(3), 200, 0
    for _ in range(runs):
        sizes = np.minimum(4096, rng.lognormal(6.0, 0.6, size=400))
        run = short_trial(sizes, count)
        noisy = tuple(float(t) for t in np.array(run.micro_step_seconds) * rng.lognormal(0.0, 0.02, size=count))
        assert run.sizes is not None
        longest = tuple(float(t) for t in np.array(run.sizes.longest_seconds) * rng.lognormal(0.0, 0.02, size=2))
        run = replace(run, micro_step_seconds=noisy, sizes=replace(run.sizes, longest_seconds=longest))
        interval = run.interval(per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION)
        seconds = seconds_of(sizes).mean() + FETCH + UPDATE / ACCUMULATION
        hits += interval.low <= BATCH / seconds <= interval.high
    assert 0.92 <= hits / runs <= 0.99


def test_without_a_known_mean_nothing_is_adjusted_but_means_count() -> None:
    measurement = Measurement(micro_step_seconds=(1.0, 1.0, 4.0), sizes=BatchSizes(measured=(1.0, 1.0, 4.0)), update_seconds=(1.0, 1.0, 4.0))
    assert measurement.typical_micro_seconds == (1.0, 1.0, 4.0)
    assert measurement.t_micro == 2.0
    assert measurement.t_update == 2.0


def test_even_data_stays_as_it_was() -> None:
    measurement = Measurement(micro_step_seconds=(1.0, 1.0, 4.0), fetch_seconds=(0.1, 0.1, 0.4), update_seconds=(1.0, 1.0, 4.0))
    assert (measurement.t_micro, measurement.t_fetch, measurement.t_update) == (1.0, 0.1, 1.0)
    assert not measurement.uneven


def test_sizes_go_through_json_and_old_records_load() -> None:
    sizes = np.array([10.0, 20.0, 30.0, 40.0])
    measurement = short_trial(sizes, 4)
    assert Measurement.from_json(measurement.to_json()) == measurement
    old = {name: value for name, value in measurement.to_json().items() if name != "sizes"}
    assert not Measurement.from_json(old).uneven


def test_the_jitter_of_uneven_batches_is_the_machines_not_the_datas() -> None:
    sizes = np.random.default_rng(0).lognormal(6.0, 0.9, size=64)
    seen = Observation.of(TrialConfig(per_device_train_batch_size=BATCH), short_trial(sizes, 32))
    raw = Observation.of(TrialConfig(per_device_train_batch_size=BATCH), Measurement(micro_step_seconds=tuple(seconds_of(sizes))))
    assert seen.micro.error < raw.micro.error / 2
    assert math.exp(seen.micro.value) == pytest.approx(seconds_of(sizes).mean(), rel=0.05)


def test_the_interval_holds_the_throughput() -> None:
    measurement = short_trial(np.random.default_rng(0).lognormal(6.0, 0.9, size=400), 16)
    asked = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}
    interval = measurement.interval(**asked)
    assert interval.low <= measurement.samples_per_second(**asked) <= interval.high
