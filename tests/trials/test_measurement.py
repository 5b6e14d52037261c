"""Statistics are computed from raw samples alone, by the formula, and can be computed again."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.trials.measurement import (
    UNKNOWN,
    Interval,
    Measurement,
    Memory,
    pooled_interval,
    t_quantile,
    throughput,
)
from tests.refusals import refused
from tests.strategies import intervals, measurements, seconds

SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}


@given(measurements())
def test_a_measurement_survives_json(measurement: Measurement) -> None:
    assert (
        Measurement.from_json(json.loads(json.dumps(measurement.to_json(), allow_nan=False))) == measurement
    )


def test_a_loss_that_is_not_finite_is_null_in_json_and_comes_back_as_nan() -> None:
    losses = (0.5, math.inf, math.nan, -math.inf)
    data = Measurement(micro_step_seconds=(0.1,), losses=losses).to_json()
    assert data["losses"] == [0.5, None, None, None]
    assert [math.isnan(x) for x in Measurement.from_json(data).losses] == [False, True, True, True]


def test_keys_of_a_newer_record_are_ignored() -> None:
    measurement = Measurement(micro_step_seconds=(0.1,), memory=Memory(peak_allocated_bytes=7))
    data = measurement.to_json()
    data["joules"] = [1.0]
    data["memory"]["peak_swapped_bytes"] = 3
    assert Measurement.from_json(data) == measurement


@pytest.mark.parametrize("name", ["micro_step_seconds", "fetch_seconds", "update_seconds"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_sample_that_is_no_time_is_refused(name: str, value: float) -> None:
    fields: dict[str, Any] = {"micro_step_seconds": (0.1,), name: (0.1, value)}
    with refused(f"^{name} must be finite and not negative$"):
        Measurement(**fields)


def test_a_measurement_without_micro_steps_is_refused() -> None:
    with refused("^a measurement needs at least one micro_step_seconds$"):
        Measurement(micro_step_seconds=())


def test_a_micro_step_that_took_no_time_is_refused() -> None:
    with refused("^micro_step_seconds must be positive$"):
        Measurement(micro_step_seconds=(0.1, 0.0))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"micro_step_seconds": None},
        {"micro_step_seconds": ["fast"]},
        {"micro_step_seconds": 0.1},
        {"micro_step_seconds": [0.1], "losses": None},
        {"micro_step_seconds": [0.1], "losses": ["low"]},
        {"micro_step_seconds": [0.1], "memory": [1]},
        [],
        None,
    ],
)
def test_json_that_is_no_measurement_is_refused(data: Any) -> None:
    with refused("^not a measurement: "):
        Measurement.from_json(data)


def test_throughput_follows_the_formula_of_the_docstring() -> None:
    # 32 samples per optimizer step, in 8 x (0.10 + 0.02) + 0.04 = 1 second.
    measurement = Measurement(
        micro_step_seconds=(0.10, 0.10, 9.0), fetch_seconds=(0.02,), update_seconds=(0.01, 0.04, 0.05)
    )
    assert measurement.samples_per_second(**SIZES) == pytest.approx(32.0, rel=1e-12)
    assert (measurement.t_micro, measurement.t_fetch, measurement.t_update) == (0.10, 0.02, 0.04)


def test_missing_fetch_and_update_samples_count_as_nothing() -> None:
    measurement = Measurement(micro_step_seconds=(0.5,))
    assert (measurement.t_fetch, measurement.t_update) == (0.0, 0.0)
    assert measurement.samples_per_second(**SIZES) == pytest.approx(8.0)
    assert throughput(1, 1, 0.0, 0.0, 0.0) == math.inf


@given(st.integers(1, 512), st.integers(1, 512), seconds, seconds, seconds)
def test_accumulation_never_makes_a_sample_slower_and_never_beats_the_micro_step(
    batch: int, accumulation: int, micro: float, fetch: float, update: float
) -> None:
    once = throughput(batch, accumulation, micro, fetch, update)
    twice = throughput(batch, 2 * accumulation, micro, fetch, update)
    assert once <= twice * (1 + 1e-12)
    assert twice <= batch / (micro + fetch) * (1 + 1e-12)


@given(measurements())
def test_the_interval_is_ordered_and_the_same_every_time(measurement: Measurement) -> None:
    interval = measurement.interval(**SIZES)
    assert 0 <= interval.low <= interval.high < math.inf
    assert len(measurement.micro_step_seconds) > 1 or not interval.known
    assert not interval.known or interval.low > 0
    assert measurement.interval(**SIZES) == interval


def covered(micro: float, accumulation: int, measured: int, rng: random.Random) -> bool:
    """Whether the interval of a run of `measured` micro-steps holds the true speed."""
    updates = max(1, measured // accumulation)
    run = Measurement(
        micro_step_seconds=tuple(micro * math.exp(rng.gauss(0, 0.02)) for _ in range(measured)),
        update_seconds=tuple(0.05 * micro * math.exp(rng.gauss(0, 0.02)) for _ in range(updates)),
        fetch_seconds=(0.001,) * updates,
    )
    interval = run.interval(per_device_train_batch_size=8, gradient_accumulation_steps=accumulation)
    return interval.known and interval.low <= throughput(8, accumulation, micro, 0.001, 0.05 * micro) <= interval.high


@pytest.mark.parametrize(("measured", "accumulation"), [(2, 1), (3, 1), (5, 1), (8, 1), (30, 1), (2, 4), (4, 4)])
def test_the_interval_holds_the_true_speed_of_a_run_however_few_its_samples(measured: int, accumulation: int) -> None:
    rng, runs = random.Random(1), 400
    share = sum(covered(0.5, accumulation, measured, rng) for _ in range(runs)) / runs
    assert 0.92 <= share <= 0.99


def test_one_sample_says_nothing_of_its_spread() -> None:
    one = Measurement(micro_step_seconds=(0.5,), update_seconds=(0.01,)).interval(**SIZES)
    many = Measurement(micro_step_seconds=(0.1, 0.1, 0.11)).interval(**SIZES)
    assert one == UNKNOWN
    assert not one.known
    assert one.overlaps(many)
    assert json.loads(json.dumps(dataclasses.asdict(one), allow_nan=False)) == dataclasses.asdict(one)


def test_a_part_of_one_sample_scatters_as_the_micro_step_does() -> None:
    micro = (0.10, 0.11, 0.12, 0.13)
    widths = []
    for updates in ((), (0.4,)):
        interval = Measurement(micro_step_seconds=micro, update_seconds=updates).interval(**SIZES)
        widths.append(math.log(interval.high / interval.low))
    assert 0 < widths[0] < 2 * widths[1]


def test_the_interval_holds_the_estimate_and_shrinks_with_the_noise() -> None:
    def measured(spread: float) -> Measurement:
        return Measurement(micro_step_seconds=tuple(0.1 * (1 + spread * (i % 5 - 2)) for i in range(25)))

    widths = []
    for spread in (0.0, 0.01, 0.1):
        interval = measured(spread).interval(**SIZES)
        assert interval.low <= measured(spread).samples_per_second(**SIZES) <= interval.high
        widths.append(interval.high - interval.low)
    assert widths[0] == 0.0
    assert widths[0] < widths[1] < widths[2]


@given(intervals(), intervals())
def test_overlap_is_symmetric_and_means_a_shared_point(one: Interval, other: Interval) -> None:
    assert one.overlaps(one)
    assert one.overlaps(other) == other.overlaps(one)
    assert one.overlaps(other) == (max(one.low, other.low) <= min(one.high, other.high))


def test_needed_bytes_are_context_and_reserved_and_unknown_without_the_counter() -> None:
    assert Memory(peak_reserved_bytes=10, context_bytes=3).needed_bytes == 13
    assert Memory(peak_reserved_bytes=10).needed_bytes == 10
    assert Memory(peak_allocated_bytes=10, context_bytes=3).needed_bytes is None


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=40))
def test_a_pooled_interval_holds_the_mean_and_is_not_negative(values: list[float]) -> None:
    interval = pooled_interval(values)
    mean = math.fsum(values) / len(values)
    assert 0 <= interval.low <= mean * (1 + 1e-9)
    assert interval.high >= mean * (1 - 1e-9)


def test_a_pooled_interval_is_students() -> None:
    # Mean 10, standard deviation 1, three runs: 10 +- 4.303 / sqrt(3).
    interval = pooled_interval([9.0, 10.0, 11.0])
    assert interval.low == pytest.approx(10 - 4.303 / math.sqrt(3))
    assert interval.high == pytest.approx(10 + 4.303 / math.sqrt(3))


def test_one_run_has_no_pooled_interval() -> None:
    with pytest.raises(ValueError, match="at least two runs"):
        pooled_interval([1.0])


def test_students_quantile_falls_towards_the_normal_one() -> None:
    quantiles = [t_quantile(n) for n in range(1, 400)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[0] == 12.706
    assert 1.96 < quantiles[-1] < 1.97
    with pytest.raises(ValueError, match="degree of freedom"):
        t_quantile(0)


def test_batches_of_workers_come_in_bursts_and_count_by_their_mean() -> None:
    bursts = (0.2, 0.0, 0.2, 0.0, 0.2)
    plain = Measurement(micro_step_seconds=(0.1,) * 5, fetch_seconds=bursts)
    workers = Measurement(
        micro_step_seconds=(0.1,) * 5, fetch_seconds=bursts, facts={"loader": {"dataloader_num_workers": 2}}
    )
    assert plain.fetch_blocks == bursts
    assert plain.t_fetch == 0.2
    assert workers.fetch_blocks == (0.1, 0.1)
    assert workers.t_fetch == pytest.approx(0.1)
    speed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    assert workers.samples_per_second(**speed) == pytest.approx(5.0)
    interval = workers.interval(**speed)
    assert interval.low == pytest.approx(interval.high)


@pytest.mark.parametrize("facts", [None, {}, {"loader": None}, {"loader": {"dataloader_num_workers": None}}])
def test_a_record_without_a_word_on_its_loader_has_no_workers(facts: dict[str, object] | None) -> None:
    measurement = Measurement(micro_step_seconds=(0.1,), fetch_seconds=(0.2, 0.3), facts=facts)
    assert measurement.loader_workers == 0
    assert measurement.t_fetch == 0.25
    assert Measurement(micro_step_seconds=(0.1,), facts={"loader": {"dataloader_num_workers": 4}}).t_fetch == 0.0
