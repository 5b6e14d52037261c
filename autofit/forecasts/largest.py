"""The largest per-device batch of every class of configurations on a card: what is behind `autofit estimate --max-batch`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from autofit.devices.target import Target
from autofit.errors import UserError
from autofit.forecasts.estimation import Subject, asking
from autofit.forecasts.laws import ClassLaws, Setting, collect, law_class, uneven
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import DEFAULT_OPTIMS, divisors
from autofit.problem.spec import MAX_EFFECTIVE_BATCH, Workload

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """Largest per-device batch of one class that fits; 0 when not even 1 does, None when it could not be predicted."""

    precision: Precision
    gradient_checkpointing: bool
    optim: str
    batch_size: int | None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatches:
    """The answer to `--max-batch`: what it is about, and a row per class; of the divisors of `effective_batch`, or of any batches where that is None."""

    subject: Subject
    rows: tuple[LargestBatch, ...]
    effective_batch: int | None = None


def largest_batches(
    workload: Workload,
    target: Target,
    *,
    effective_batch: int | None = None,
    precisions: Sequence[Precision] | None = None,
    optims: Sequence[str] | None = None,
    checkpointing: Sequence[bool] | None = None,
    padded: bool = False,
) -> LargestBatches:
    """Largest per-device batch for every precision x checkpointing x optimizer on the target.

    Args:
        effective_batch: only its divisors count, and accumulation is as it then must be; None = any batch, with accumulation.

    Raises:
        UserError: the target's memory was not said, or an effective batch below 1.
    """
    if target.memory_bytes is None:
        raise UserError(
            "--max-batch needs the device's memory", hint="name a card with --gpu or a size with --memory"
        )
    if effective_batch is not None and effective_batch < 1:
        raise UserError(f"effective batch must be a positive whole number, got {effective_batch}")
    if effective_batch is not None and effective_batch > MAX_EFFECTIVE_BATCH:
        raise UserError(f"effective batch must be at most {MAX_EFFECTIVE_BATCH}, got {effective_batch}")
    room = target.memory_bytes - target.context_bytes
    configs = [
        TrialConfig(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=on,
            precision=precision,
            optim=optim,
        )
        for precision in (precisions or target.precisions)
        for on in (checkpointing or (False, True))
        for optim in (optims or DEFAULT_OPTIMS)
    ]
    with asking(workload) as (facts, ask):
        setting = Setting(
            workload=workload, facts=facts, compute_capability=target.compute_capability, padded=padded or uneven(facts)
        )
        wanted = partial(collect, setting, ask=ask, workers=max(1, os.cpu_count() or 1), single=True)
        laws = wanted(configs)
        if effective_batch is not None:
            laws |= wanted(
                [_whole(c) for c in configs if _fits_not(laws[law_class(setting, c)], effective_batch, room)]
            )
    rows = tuple(_row(setting, config, laws, room, effective_batch) for config in configs)
    return LargestBatches(subject=Subject.of(setting), rows=rows, effective_batch=effective_batch)


def _whole(config: TrialConfig) -> TrialConfig:
    """`config` without accumulation."""
    return config.but(gradient_accumulation_steps=1)


def _fits_not(found: ClassLaws, batch: int, room: int) -> bool:
    return found.laws is not None and not found.laws.memory.fits(batch, room)


def _row(
    setting: Setting,
    config: TrialConfig,
    laws: Mapping[str, ClassLaws],
    room: int,
    effective_batch: int | None,
) -> LargestBatch:
    found = laws[law_class(setting, config)]
    size = None if found.laws is None else found.laws.memory.max_batch(room)
    if size is not None and effective_batch is not None:
        size = max((d for d in divisors(effective_batch) if d <= size), default=0)
        # The whole of it in one micro-step keeps no gradients beside the activations: it may fit where accumulation does not.
        whole = laws.get(law_class(setting, _whole(config)))
        if whole is not None and whole.laws is not None and whole.laws.memory.fits(effective_batch, room):
            size = effective_batch
    return LargestBatch(
        precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing,
        optim=config.optim,
        batch_size=size,
        note=found.reason,
    )


def largest_json(found: LargestBatches, target: Target) -> dict[str, Any]:
    """The document that `autofit estimate --max-batch --json` prints."""
    return {
        "schema": "autofit/largest-batch",
        "version": VERSION,
        "subject": asdict(found.subject),
        "effective_batch": found.effective_batch,
        "device": target.name,
        "memory_bytes": target.memory_bytes,
        "rows": [asdict(row) for row in found.rows],
        "warnings": list(target.warnings),
    }
