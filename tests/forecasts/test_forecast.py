"""Forecasts: ordered ends, monotone in the batch; in a search, too big is skipped, the band is run, nothing feasible is lost."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.beliefs.predict import MemoryBelief, is_memory_failure
from autofit.devices.cards import find
from autofit.forecasts.forecast import OVER, SPARE, TracedForecast
from autofit.forecasts.laws import ClassLaws, law_class
from autofit.memory.roofline import CostLaw
from autofit.problem.config import Precision, TrialConfig
from autofit.results import advisories
from autofit.trials.trial import Outcome, Reason, Role
from autofit.units import GIB, MIB
from tests.lawful import (
    CONTEXT,
    SETTING,
    grid,
    landscape_of,
    needed_bytes,
    samples_per_second,
    search_over,
    toy_forecast,
    toy_laws,
    under,
)
from tests.memory.traces import training_loop

LIMITS = st.integers(CONTEXT + 250 * MIB, CONTEXT + 3 * GIB)
BATCHES = st.integers(1, 200)
CLASSES = st.sampled_from([c for c in grid() if c.per_device_train_batch_size in (1, 32)])


@functools.cache
def _forecast() -> TracedForecast:
    return toy_forecast(GIB)


@given(CLASSES, BATCHES, LIMITS)
def test_the_ends_of_a_forecast_are_in_order(config: TrialConfig, batch: int, limit: int) -> None:
    told = under(_forecast(), limit).needed(config.but(per_device_train_batch_size=batch))
    assert told is not None
    assert CONTEXT < told.low_bytes <= told.bytes <= told.high_bytes


@given(CLASSES, BATCHES, BATCHES, LIMITS)
def test_no_end_of_a_forecast_falls_as_the_batch_grows(
    config: TrialConfig, one: int, other: int, limit: int
) -> None:
    forecast = under(_forecast(), limit)
    small = forecast.needed(config.but(per_device_train_batch_size=min(one, other)))
    large = forecast.needed(config.but(per_device_train_batch_size=max(one, other)))
    assert small is not None
    assert large is not None
    assert small.low_bytes <= large.low_bytes
    assert small.bytes <= large.bytes
    assert small.high_bytes <= large.high_bytes


@given(CLASSES, BATCHES, LIMITS)
def test_what_is_certain_and_what_is_too_big_keep_their_margins(
    config: TrialConfig, batch: int, limit: int
) -> None:
    config = config.but(per_device_train_batch_size=batch)
    forecast = under(_forecast(), limit)
    law = forecast.laws[law_class(SETTING, config)].laws
    told = forecast.needed(config)
    assert law is not None
    assert told is not None
    peaks, room = law.memory.predict(batch), limit - CONTEXT
    if told.high_bytes <= limit:
        assert peaks.min_capacity_bytes <= SPARE * room + 1
    if told.too_big(limit):
        assert peaks.peak_allocated_bytes > OVER * room - OVER


def test_a_class_without_a_law_has_no_forecast() -> None:
    config = grid()[0]
    none = replace(
        _forecast(), laws={law_class(SETTING, config): ClassLaws(laws=None, reason="no kernel")}, _known={}
    )
    assert none.needed(config) is None
    assert none.needed(config.but(optim="sgd")) is None
    assert none.micro_seconds(config) is None


def test_time_is_predicted_where_the_card_and_the_work_are_known_and_tf32_is_faster_than_fp32() -> None:
    config = TrialConfig(per_device_train_batch_size=8)
    (key,) = laws = toy_laws([config])
    known = laws[key].laws
    assert known is not None
    laws[key] = ClassLaws(laws=replace(known, cost=CostLaw.fit(training_loop(2), training_loop(4))))
    forecast = replace(_forecast(), laws=laws, roof=find("A100-80GB"), _known={})
    fp32, tf32 = forecast.micro_seconds(config), forecast.micro_seconds(config.but(precision=Precision.TF32))
    assert fp32 is not None
    assert tf32 is not None
    assert 0 < tf32 < fp32
    assert (forecast.update_seconds(config) or 0) > 0
    assert replace(forecast, roof=None).micro_seconds(config) is None


def _ran(study_records: object) -> list[TrialConfig]:
    return [r.config for r in study_records if r.outcome is not Outcome.SKIPPED]  # type: ignore[attr-defined]


def test_what_is_clearly_too_big_is_never_run_and_is_called_skipped_with_the_predicted_bytes() -> None:
    limit = CONTEXT + 700 * MIB
    forecast = under(_forecast(), limit)
    search, study = search_over(landscape_of(forecast), forecast)
    search.run()
    too_big = [c for c in grid() if (told := forecast.needed(c)) is not None and told.too_big(limit)]
    assert too_big
    assert not set(too_big) & set(_ran(study.records))
    failure = search.reason_to_skip(too_big[0])
    assert failure is not None
    assert failure.reason is Reason.PREDICTED_TOO_BIG
    assert "predicted to need" in failure.message
    for record in study.records:
        if record.outcome is Outcome.SKIPPED:
            assert record.predicted_bytes is not None
            assert record.predicted_bytes > limit


def test_a_configuration_in_the_band_is_not_skipped() -> None:
    forecast = _forecast()
    config = next(c for c in grid() if c.per_device_train_batch_size == 32)
    told = forecast.needed(config)
    assert told is not None
    for limit in (told.low_bytes + 2 * MIB, told.bytes, told.high_bytes - 2 * MIB):
        tight = under(forecast, limit)
        search, _ = search_over(landscape_of(tight), tight)
        inside = tight.needed(config)
        assert inside is not None
        assert not inside.too_big(limit)
        assert search.reason_to_skip(config) is None


def test_every_trial_keeps_its_prediction_and_a_true_one_raises_no_warning() -> None:
    limit = CONTEXT + 900 * MIB
    forecast = under(_forecast(), limit)
    search, study = search_over(landscape_of(forecast), forecast)
    search.run()
    completed = [r for r in study.records if r.outcome is Outcome.COMPLETED]
    assert completed
    assert all(r.predicted_bytes is not None for r in completed)
    assert all(abs(advisories.prediction_error(r) or 0.0) <= advisories.PREDICTION_ERROR for r in completed)
    assert not [w for w in advisories.of_records(study.records) if w.code == "prediction_off"]


def test_a_prediction_more_than_five_percent_off_is_said() -> None:
    limit = CONTEXT + 900 * MIB
    forecast = under(_forecast(), limit)
    search, study = search_over(landscape_of(forecast, factor=0.85), forecast)
    search.run()
    (warning,) = [w for w in advisories.of_records(study.records) if w.code == "prediction_off"]
    assert "+" in warning.message
    assert "%" in warning.message


@pytest.mark.parametrize("more", [80 * MIB, -80 * MIB], ids=["a larger context", "a smaller context"])
def test_the_first_trial_calibrates_the_others(more: int) -> None:
    limit = CONTEXT + 900 * MIB
    forecast = under(_forecast(), limit)
    landscape = landscape_of(forecast, context_bytes=CONTEXT + more)
    search, study = search_over(landscape, forecast)
    search.run()
    first = next(r for r in study.records if r.outcome is Outcome.COMPLETED)
    belief = MemoryBelief(grid(), limit_bytes=limit, model=forecast)
    belief.update([first], np.random.default_rng(0))
    before_errors, after_errors = [], []
    for config in grid():
        before, after, truth = (
            forecast.needed(config),
            belief.forecast(config),
            needed_bytes(landscape, config),
        )
        assert before is not None
        assert after is not None
        if config != first.config and 0.5 * limit <= truth <= 1.2 * limit:  # where it decides something
            before_errors.append(abs(before.bytes - truth))
            after_errors.append(abs(after.bytes - truth))
            assert after.high_bytes - after.low_bytes < before.high_bytes - before.low_bytes
    assert len(before_errors) >= 5
    assert statistics.fmean(after_errors) < 0.8 * statistics.fmean(before_errors)


@settings(max_examples=15)
@given(LIMITS)
def test_no_feasible_configuration_is_ever_predicted_too_big(limit: int) -> None:
    forecast = under(_forecast(), limit)
    landscape = landscape_of(forecast)
    search, _ = search_over(landscape, forecast)
    for config in grid():
        if needed_bytes(landscape, config) <= limit:
            assert search.reason_to_skip(config) is None


@settings(max_examples=6)
@given(st.integers(CONTEXT + 400 * MIB, CONTEXT + 2 * GIB), st.integers(-8, 60))
def test_a_search_runs_the_feasible_optimum_or_what_is_as_fast(limit: int, more_mib: int) -> None:
    forecast = under(_forecast(), limit)
    landscape = landscape_of(forecast, context_bytes=CONTEXT + more_mib * MIB)
    search, study = search_over(landscape, forecast)
    finding = search.run()
    feasible = [c for c in grid() if needed_bytes(landscape, c) <= limit]
    fastest = max(feasible, key=samples_per_second)
    assert search.reason_to_skip(fastest) is None
    assert samples_per_second(finding.winner) >= 0.95 * samples_per_second(fastest)
    failed = [
        r
        for r in study.records
        if is_memory_failure(r) and r.role in (Role.SEARCH, Role.DEFAULTS, Role.HAND_RECIPE)
    ]
    assert len(failed) <= 3


@pytest.mark.parametrize("off_mib", [0, 40], ids=["true context", "context 40 MiB larger"])
def test_the_median_search_has_at_most_one_trial_out_of_memory(off_mib: int) -> None:
    counts = []
    for limit in range(CONTEXT + 400 * MIB, CONTEXT + 1900 * MIB, 137 * MIB):
        forecast = under(_forecast(), limit)
        search, study = search_over(landscape_of(forecast, context_bytes=CONTEXT + off_mib * MIB), forecast)
        search.run()
        counts.append(sum(is_memory_failure(r) for r in study.records))
    assert statistics.median(counts) <= 1, counts
