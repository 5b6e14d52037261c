"""How long a run goes on that is near its memory limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from autofit.trials.measurement import Memory
from autofit.workload.clock import StepClock, Window
from autofit.workload.rest import NEAR, STILL_STEPS, RestWatch
from tests.training import Rows, Straight

LIMIT = 1000


class Readings:
    """A meter whose peaks and retries are told beforehand, one pair per step; the last one stays."""

    def __init__(self, *pairs: tuple[int, int]) -> None:
        self._pairs = list(pairs)

    def read(self) -> Memory:
        reserved, retries = self._pairs.pop(0) if len(self._pairs) > 1 else self._pairs[0]
        return Memory(peak_allocated_bytes=reserved, peak_reserved_bytes=reserved, context_bytes=100, alloc_retries=retries)


def trained(tmp_path: Path, meter: Any, limit_bytes: int | None, **clock_options: Any) -> StepClock:
    """The clock of a run for which two optimizer steps would be enough."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=Straight(), args=arguments, train_dataset=Rows(400))
    watch = RestWatch(meter, limit_bytes)
    clock = StepClock(Window(seconds=0.0, resting_seconds=math.inf), enter=lambda phase: None, on_warm=lambda: None, at_rest=watch, **clock_options)
    clock.attach(trainer)
    trainer.train()
    return clock


FAR = int(NEAR * LIMIT) - 100


@pytest.mark.parametrize(
    ("meter", "limit", "steps"),
    [
        (Readings((850, 0)), None, 2),
        (Readings((FAR, 0)), LIMIT, 2),
        (Readings((FAR + 1, 0)), LIMIT, 1 + STILL_STEPS),
        (Readings((750, 0), (750, 0), (750, 0), (760, 0)), LIMIT, 4 + STILL_STEPS),
        (Readings((850, 0), (850, 1), (850, 2)), LIMIT, 3 + STILL_STEPS),
        (Readings(*((700 + k, 0) for k in range(1, 40))), LIMIT, 10),
    ],
    ids=["no limit", "room to spare", "near it", "growth in the fourth step", "retries", "growth for ever"],
)
def test_a_run_near_its_limit_goes_on_until_memory_is_still(tmp_path: Path, meter: Any, limit: int | None, steps: int) -> None:
    assert trained(tmp_path, meter, limit).steps == steps


def test_the_longest_batch_is_shown_until_memory_is_still(tmp_path: Path) -> None:
    growing = Readings((850, 0), (850, 0), (860, 0))
    clock = trained(tmp_path, growing, LIMIT, prelude_steps=2, settle_steps=0)
    assert (clock.steps, len(clock.samples.micro)) == (3 + STILL_STEPS + 1, 1)
    roomy = trained(tmp_path, Readings((10, 0)), LIMIT, prelude_steps=2, settle_steps=0)
    assert (roomy.steps, len(roomy.samples.micro)) == (3, 1)
