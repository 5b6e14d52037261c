"""The replay of a landscape as a runner; the contract it shares with real trials is in `test_runner_conformance`."""

from __future__ import annotations

import dataclasses

from autofit.problem.config import TrialConfig
from autofit.trials.landscape import Point
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome, Reason
from tests.adversaries import CONTEXT, grid

LANDSCAPE = grid(effective_batch=8)
POINT = LANDSCAPE.points[5]
assert POINT.measurement is not None
RESERVED = POINT.measurement.memory.peak_reserved_bytes or 0


def test_samples_are_drawn_from_the_recorded_lists() -> None:
    result = ReplayRunner(LANDSCAPE, seed=1).run(TrialRequest(config=POINT.config))
    assert result.measurement is not None
    assert POINT.measurement is not None
    assert set(result.measurement.micro_step_seconds) <= set(POINT.measurement.micro_step_seconds)
    assert len(result.measurement.update_seconds) == len(POINT.measurement.update_seconds)
    assert result.measurement.memory.needed_bytes == RESERVED + CONTEXT


def test_the_limit_counts_context_and_reserved_bytes() -> None:
    runner = ReplayRunner(LANDSCAPE)
    fits = runner.run(TrialRequest(config=POINT.config, memory_limit_bytes=RESERVED + CONTEXT))
    misses = runner.run(TrialRequest(config=POINT.config, memory_limit_bytes=RESERVED + CONTEXT - 1))
    assert fits.outcome is Outcome.COMPLETED
    assert misses.outcome is Outcome.INFEASIBLE
    assert misses.failure is not None
    assert misses.failure.reason is Reason.OUT_OF_MEMORY


def test_a_point_recorded_as_out_of_memory_stays_so_without_a_limit() -> None:
    landscape = dataclasses.replace(LANDSCAPE, points=(Point(config=POINT.config),))
    assert ReplayRunner(landscape).run(TrialRequest(config=POINT.config)).outcome is Outcome.INFEASIBLE


def test_a_configuration_that_was_not_recorded_is_named_as_unsupported() -> None:
    result = ReplayRunner(LANDSCAPE).run(TrialRequest(config=TrialConfig(per_device_train_batch_size=3)))
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason is Reason.UNSUPPORTED
    assert "3x1 fp32 adamw_torch_fused is not in the landscape" in result.failure.message


def test_same_seed_and_requests_give_same_results_and_repeats_differ() -> None:
    request = TrialRequest(config=POINT.config)
    first, second = ReplayRunner(LANDSCAPE, seed=4), ReplayRunner(LANDSCAPE, seed=4)
    a, b = [first.run(request) for _ in range(2)], [second.run(request) for _ in range(2)]
    assert a == b
    assert a[0] != a[1]


def test_seconds_are_those_of_the_device() -> None:
    result = ReplayRunner(LANDSCAPE).run(TrialRequest(config=POINT.config))
    assert result.measurement is not None
    assert result.seconds > sum(result.measurement.micro_step_seconds)
