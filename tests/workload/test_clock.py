"""The clock and the throughput formula, on virtual time: the real Trainer, with every second accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from autofit.trials.measurement import Measurement
from autofit.workload import clock as clock_module
from autofit.workload.clock import StepClock, Window
from tests.training import Rows, Straight

FORWARD, FETCH, UPDATE = 0.030, 0.0007, 0.0110


class VirtualTime:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class TimedModel(Straight):
    """Each forward takes `FORWARD` virtual seconds; the first is ten times slower, as first steps are."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self.time = [time]

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        self.time[0].now += FORWARD * (10 if self.calls == 1 else 1)
        return hidden


class TimedRows(Rows):
    """Each row takes a share of `FETCH`."""

    def __init__(self, time: VirtualTime, length: int, batch: int) -> None:
        super().__init__(length)
        self._time, self._share = time, FETCH / batch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._time.now += self._share
        return super().__getitem__(index)


class TimedUpdate(TrainerCallback):
    """The optimizer step takes `UPDATE`."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._time.now += UPDATE


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    virtual = VirtualTime()
    monkeypatch.setattr(clock_module, "time", virtual)
    return virtual


def train(time: VirtualTime, directory: Path, *, batch: int, accumulation: int, window: Window) -> StepClock:
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=100,
        use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=TimedModel(time),
        args=arguments,
        train_dataset=TimedRows(time, 100 * batch * accumulation, batch),
        callbacks=[TimedUpdate(time)],
    )
    clock = StepClock(window, enter=lambda phase: None, on_warm=lambda: None)
    clock.attach(trainer)
    trainer.train()
    return clock


def measurement(clock: StepClock) -> Measurement:
    samples = clock.samples
    return Measurement(
        micro_step_seconds=tuple(samples.micro), fetch_seconds=tuple(samples.fetch), update_seconds=tuple(samples.update)
    )


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8, 16])
def test_a_short_trial_gives_the_throughput_of_the_full_step_within_one_percent(
    time: VirtualTime, tmp_path: Path, accumulation: int
) -> None:
    short = train(time, tmp_path, batch=2, accumulation=min(2, accumulation), window=Window(optimizer_steps=4))
    begin = time.now
    full = train(time, tmp_path, batch=2, accumulation=accumulation, window=Window(optimizer_steps=5))
    first_step = accumulation * (FORWARD + FETCH) + 9 * FORWARD + UPDATE
    seconds_per_step = (time.now - begin - first_step) / (full.steps - 1)
    predicted = measurement(short).samples_per_second(per_device_train_batch_size=2, gradient_accumulation_steps=accumulation)
    assert predicted == pytest.approx(2 * accumulation / seconds_per_step, rel=0.01)


def test_the_three_parts_are_told_apart_and_the_first_step_is_dropped(time: VirtualTime, tmp_path: Path) -> None:
    clock = train(time, tmp_path, batch=4, accumulation=2, window=Window(optimizer_steps=3))
    assert clock.samples.micro == pytest.approx([FORWARD] * 4)
    assert clock.samples.fetch == pytest.approx([FETCH] * 2)
    assert clock.samples.update == pytest.approx([UPDATE] * 2)
    assert len(clock.losses) == clock.steps == 3


def test_the_window_asks_for_two_steps_at_least_and_for_time_or_micro_steps() -> None:
    window = Window(seconds=1.0, min_micro_steps=8)
    assert not window.enough(steps=1, unskipped=1, micro_steps=0, seconds=9.0)
    assert not window.enough(steps=5, unskipped=5, micro_steps=8, seconds=0.4)
    assert window.enough(steps=5, unskipped=5, micro_steps=8, seconds=0.5)
    assert window.enough(steps=2, unskipped=2, micro_steps=2, seconds=1.0)


def test_steps_skipped_by_the_scaler_do_not_count_until_patience_ends() -> None:
    window = Window(seconds=0.1, patience_steps=40)
    assert not window.enough(steps=9, unskipped=1, micro_steps=16, seconds=5.0)
    assert window.enough(steps=40, unskipped=0, micro_steps=78, seconds=5.0)


def test_the_window_stays_open_while_memory_grows_but_not_for_ever() -> None:
    window = Window(seconds=0.0, resting_steps=10)
    assert window.enough(steps=2, unskipped=2, micro_steps=2, seconds=1.0)
    assert not window.enough(steps=9, unskipped=9, micro_steps=9, seconds=1.0, at_rest=False)
    assert window.enough(steps=10, unskipped=10, micro_steps=10, seconds=1.0, at_rest=False)
    assert window.enough(steps=3, unskipped=3, micro_steps=3, seconds=window.resting_seconds, at_rest=False)


def test_a_trainer_subclass_keeps_its_own_loss_and_step(time: VirtualTime, tmp_path: Path) -> None:
    seen: list[str] = []

    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("loss")
            return super().compute_loss(model, inputs, *args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("step")
            return super().training_step(*args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True
    )
    trainer = Own(model=TimedModel(time), args=arguments, train_dataset=Rows(100))
    phases: list[str] = []
    clock = StepClock(Window(optimizer_steps=2), enter=phases.append, on_warm=lambda: None)
    clock.attach(trainer)
    trainer.train()
    assert seen == ["step", "loss"] * 2
    assert phases == ["forward", "backward", "update", "fetch"] * 2
