"""What tests of `estimate` share: one small model whose traces are made once per run, and a process runner that must not start."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from autofit.devices.target import Target, target_of
from autofit.forecasts import estimation
from autofit.forecasts.estimation import MemoryEstimate, estimate_all
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner

MODEL, SEQ_LEN, GPU = "bert-tiny", 128, "T4"
WORKLOAD = Workload(model=MODEL, seq_len=SEQ_LEN)
FLAGS = ("--model", MODEL, "--seq-len", str(SEQ_LEN))


def configuration(batch: int = 8, accumulation: int = 1, **fields: Any) -> TrialConfig:
    """A configuration of the classes that `answers` has traced, unless `fields` say otherwise."""
    return TrialConfig(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **fields)


PLAIN, HALF = configuration(), configuration(16, 2, precision=Precision.FP16, gradient_checkpointing=True)


@functools.cache
def target() -> Target:
    """The card that all traces are for."""
    return target_of(GPU, None)


@functools.cache
def answers() -> tuple[MemoryEstimate, ...]:
    """Estimates of a plain and a thrifty configuration and of a batch of 1; their laws are on disk from then on."""
    return tuple(
        estimate_all(
            WORKLOAD, [configuration(1), PLAIN, HALF, HALF.but(per_device_train_batch_size=1)], target()
        )
    )


def forbid_children(patch: pytest.MonkeyPatch) -> None:
    """Let any child that is started fail the test."""

    def refuse(*_args: Any, **_kwargs: Any) -> ProcessRunner:
        raise AssertionError("a child was started")

    patch.setattr(estimation, "ProcessRunner", refuse)


def count_children(patch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of requests that children are asked from now on; an empty list means that none was started."""
    asked: list[str] = []

    class Counting(ProcessRunner):
        def ask(self, kind: Any, payload: Any, *, timeout: float | None) -> dict[str, Any]:
            asked.append(str(kind))
            return super().ask(kind, payload, timeout=timeout)

    patch.setattr(estimation, "ProcessRunner", Counting)
    return asked
