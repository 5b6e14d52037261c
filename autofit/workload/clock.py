"""The trial's own clock: micro-step, fetch and update seconds of the real Trainer, by wrapping `training_step` on the instance.

Order of events in Trainer's loop (transformers 5.23, `_run_epoch`): all `accumulation` batches are fetched, then for each one `training_step`;
after the last: clip, optimizer step, scheduler, zero_grad, `on_step_end`. So, with the device synchronised at each edge,

    fetch  = first training_step's begin - previous on_step_end, shared over the micro-steps, plus the loop's own time between micro-steps
    micro  = training_step
    update = on_step_end - last training_step's end, less one such loop time

and the three add up to the wall time of the step exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autofit.workload.loader import fetched_ahead
from autofit.workload.token_count import BatchCount, TokenCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a trial has measured enough.

    Attributes:
        optimizer_steps: exactly this many steps, when given.
        min_steps: at least this many steps, the dropped first one included (Adam's state appears after step 1).
        seconds: measured time aimed for.
        min_micro_steps: measured micro-steps aimed for, unless `seconds` have passed already.
        max_unskipped: with a gradient scaler, go on until this many steps were not skipped ...
        patience_steps: ... but no longer than this.
        least_micro_steps: measured micro-steps below which no time is enough (uneven batches need several).
        resting_steps, resting_seconds: while memory has not come to rest, go on until this many steps or this much measured time.
    """

    optimizer_steps: int | None = None
    min_steps: int = 2
    seconds: float = 1.0
    min_micro_steps: int = 8
    max_unskipped: int = 2
    patience_steps: int = 40
    least_micro_steps: int = 1
    resting_steps: int = 10
    resting_seconds: float = 4.0

    def enough(self, *, steps: int, unskipped: int, micro_steps: int, seconds: float, at_rest: bool = True) -> bool:
        """Whether to stop after `steps` optimizer steps (`unskipped` of them real), with `micro_steps` measured in `seconds`."""
        if self.optimizer_steps is not None:
            return steps >= self.optimizer_steps and micro_steps >= 1
        if unskipped < self.max_unskipped and steps < self.patience_steps:
            return False
        if not at_rest and steps < self.patience_steps and self.waits(steps=unskipped, seconds=seconds):
            return False
        if steps < self.min_steps or micro_steps < self.least_micro_steps:
            return False
        return seconds >= self.seconds or (
            micro_steps >= self.min_micro_steps and seconds >= self.seconds / 2
        )


    def waits(self, *, steps: int, seconds: float) -> bool:
        """Whether to go on for memory to come to rest."""
        return steps < self.resting_steps and seconds < self.resting_seconds


@dataclass
class Samples:
    """Raw samples of the measured steps (the first step is not among them); `batch` numbers the loader's batch of each micro-step."""

    micro: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    fetch: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class StepClock(TrainerCallback):
    """Times a Trainer's steps and stops it when the window is full.

    Args:
        window: when to stop.
        enter: called with the name of each phase (`forward`, `backward`, `update`, `fetch`).
        on_warm: called once, after the prelude, or after the first optimizer step where there is none.
        prelude_steps: optimizer steps, not skipped ones, that a `DataFeed` gives the longest batch, and more until memory is at
            rest; they are not measured.
        settle_steps: further steps that are not measured.
        busy: asked after each step: whether it did something that is no part of the training's speed, as compiling is.
        at_rest: asked after each step: whether memory has come to rest, as far as that matters.
    """

    def __init__(
        self,
        window: Window,
        *,
        enter: Callable[[str], None],
        on_warm: Callable[[], None],
        prelude_steps: int = 0,
        settle_steps: int = 1,
        busy: Callable[[], bool] = lambda: False,
        at_rest: Callable[[], bool] = lambda: True,
    ) -> None:
        self.samples = Samples()
        self.losses: list[float] = []
        self.steps = 0
        self.accumulated = 0  # most micro-steps of an optimizer step
        self.skipped = 0
        self.counts: list[BatchCount] = []
        self.prelude_counts: list[BatchCount] = []
        self.prelude_seconds: list[float] = []  # micro-steps of the prelude's last step
        self._prelude, self._settle, self._warm = prelude_steps, settle_steps, False
        self._busy, self._at_rest = busy, at_rest
        self._batches = 0  # of the loader, that were trained on
        self._window, self._enter, self._on_warm = window, enter, on_warm
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._step_losses: list[torch.Tensor] = []
        self._last_end = time.perf_counter()
        self._measured_since = 0.0
        self._ahead = 0  # batches that loader workers had ready before the first step: their fetch costs nothing
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Wrap the instance's `training_step` and `compute_loss`; user subclasses keep theirs."""
        self._trainer = trainer
        self._counter = TokenCounter(trainer.args.train_batch_size)
        self._ahead = 0 if self._window.optimizer_steps is not None else fetched_ahead(trainer.args)
        step, loss = trainer.training_step, trainer.compute_loss

        def timed_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._counter.note(inputs)
            synchronize()
            self._begins.append(time.perf_counter())
            self._enter("forward")
            result = step(model, inputs, *args, **kwargs)
            synchronize()
            self._ends.append(time.perf_counter())
            self._enter("update")
            self._step_losses.append(result.detach())
            return result

        def noted_loss(*args: Any, **kwargs: Any) -> Any:
            result = loss(*args, **kwargs)
            self._enter("backward")
            return result

        trainer.training_step = timed_step  # type: ignore[method-assign]
        trainer.compute_loss = noted_loss  # type: ignore[method-assign]
        trainer.add_callback(self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Close one optimizer step."""
        synchronize()
        now = time.perf_counter()
        self._enter("fetch")
        assert self._trainer is not None
        self.steps += 1
        self.accumulated = max(self.accumulated, len(self._begins))
        self.skipped += bool(self._trainer.accelerator.optimizer_step_was_skipped)
        counts, at_rest = self._counter.close(), self._at_rest()
        if self.in_prelude:
            self.prelude_counts += counts
            self.prelude_seconds = [end - begin for begin, end in zip(self._begins, self._ends)]
            self._measured_since = now if self.steps == 1 else self._measured_since
            if self._prelude_is_over(now, at_rest):
                self._prelude, self._measured_since = 0, now
        else:
            self._close_own_step(now, counts)
        if not self._warm and not self.in_prelude:
            self._warm = True
            self._on_warm()
        self.losses.append(float(torch.stack(self._step_losses).sum()))
        self._begins, self._ends, self._step_losses = [], [], []
        control.should_training_stop = self._window.enough(
            steps=self.steps,
            unskipped=self.steps - self.skipped,
            micro_steps=len(self.samples.micro),
            seconds=now - self._measured_since,
            at_rest=at_rest,
        )
        self._last_end = time.perf_counter()
        return control

    @property
    def in_prelude(self) -> bool:
        """Whether the next optimizer step is to see the longest batch."""
        return self._prelude > 0

    def _prelude_is_over(self, now: float, at_rest: bool) -> bool:
        if self.steps >= self._window.patience_steps:
            return True
        waits = not at_rest and self._window.waits(steps=self.steps - self.skipped, seconds=now - self._measured_since)
        return self.steps - self.skipped >= self._prelude and not waits

    def _close_own_step(self, now: float, counts: list[BatchCount]) -> None:
        """A step on the loader's own batches: the first ones settle, the others are measured."""
        count = len(self._begins)
        busy = self._busy()
        if self._settle > 0 or self._ahead > 0 or busy:
            self._measured_since = now
        else:
            self._record(now)
            self.counts += counts
            self.samples.batch += range(self._batches, self._batches + count)
        self._settle -= 1
        self._ahead -= count
        self._batches += count

    def _record(self, now: float) -> None:
        count = len(self._begins)
        gaps = [begin - end for begin, end in zip(self._begins[1:], self._ends[:-1])]
        gap = sum(gaps) / len(gaps) if gaps else 0.0
        update = now - self._ends[-1]
        gap = min(gap, update)
        self.samples.micro += [end - begin for begin, end in zip(self._begins, self._ends)]
        self.samples.fetch.append((self._begins[0] - self._last_end) / count + gap)
        assert self._trainer is not None
        if not self._trainer.accelerator.optimizer_step_was_skipped:  # an update that did not take place takes no time
            self.samples.update.append(update - gap)


def synchronize() -> None:
    """Wait for the accelerator; nothing to wait for on the CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
