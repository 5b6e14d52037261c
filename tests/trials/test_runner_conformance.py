"""One contract for every runner (see `autofit.trials.runner`): the process runner on a real model, and the replay of a landscape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autofit.devices.device import Device
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import Runner, TrialRequest
from autofit.trials.trial import Outcome, Reason
from autofit.units import GIB, MIB

SMALL = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=2)
LIMIT, TIGHT = 4 * GIB, 24 * MIB
UNSUPPORTED = SMALL.but(optim="adamw_anyprecision")


def process_runner() -> Runner:
    return ProcessRunner(Workload(model="bert-base-uncased", seq_len=8), "cpu")


def replay_runner() -> Runner:
    measurement = Measurement(
        micro_step_seconds=(0.01, 0.011, 0.012),
        fetch_seconds=(0.001,),
        update_seconds=(0.002, 0.003),
        memory=Memory(peak_allocated_bytes=100 * MIB, peak_reserved_bytes=128 * MIB),
    )
    device = Device(kind="cuda", name="card", total_memory_bytes=8 * GIB, context_bytes=MIB)
    return ReplayRunner(Landscape(points=(Point(config=SMALL, measurement=measurement),), device=device))


@pytest.fixture(scope="module", params=[process_runner, replay_runner], ids=["process", "replay"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with request.param() as made:
        yield made


def test_a_runner_is_one(runner: Runner) -> None:
    assert isinstance(runner, Runner)


def test_a_completed_trial_has_samples_memory_and_no_failure(runner: Runner) -> None:
    result = runner.run(TrialRequest(config=SMALL, memory_limit_bytes=LIMIT, window_seconds=0.1))
    assert result.outcome is Outcome.COMPLETED
    assert result.failure is None
    assert result.measurement is not None
    assert all(t > 0 for t in result.measurement.micro_step_seconds)
    assert result.measurement.update_seconds
    assert result.measurement.optimizer_steps >= 2
    assert result.measurement.memory.peak_reserved_bytes
    assert result.seconds > 0


def test_a_limit_that_is_too_small_is_infeasible_and_the_runner_goes_on(runner: Runner) -> None:
    tight = runner.run(TrialRequest(config=SMALL, memory_limit_bytes=TIGHT))
    assert tight.outcome is Outcome.INFEASIBLE
    assert tight.measurement is None
    assert tight.failure is not None
    assert tight.failure.reason is Reason.OUT_OF_MEMORY
    assert runner.run(TrialRequest(config=SMALL, memory_limit_bytes=LIMIT, window_seconds=0.1)).outcome is Outcome.COMPLETED


def test_what_cannot_run_is_failed_and_never_raised(runner: Runner) -> None:
    result = runner.run(TrialRequest(config=UNSUPPORTED, memory_limit_bytes=LIMIT))
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.message
    assert "\n" not in result.failure.message


def test_full_length_is_understood(runner: Runner) -> None:
    result = runner.run(TrialRequest(config=SMALL, memory_limit_bytes=LIMIT, full_length=True, optimizer_steps=2))
    assert result.outcome is Outcome.COMPLETED
    assert result.measurement is not None
    assert result.measurement.optimizer_steps == 2


def test_a_cancel_without_a_trial_does_not_end_the_next_one(runner: Runner) -> None:
    runner.cancel()
    assert runner.run(TrialRequest(config=SMALL, memory_limit_bytes=LIMIT, window_seconds=0.1)).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("make", [process_runner, replay_runner], ids=["process", "replay"])
def test_close_can_be_called_twice(make: object) -> None:
    made = make()  # type: ignore[operator]
    made.close()
    made.close()
