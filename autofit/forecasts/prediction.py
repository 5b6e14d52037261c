"""Predictions for a whole space, made before its first trial. Where a model, a card or an operator cannot be traced, nothing is claimed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from autofit.devices import cards
from autofit.devices.cards import Card
from autofit.devices.device import Device
from autofit.errors import UserError, WorkerError
from autofit.forecasts.forecast import TracedForecast
from autofit.forecasts.laws import Ask, Setting, collect, law_class, uneven
from autofit.memory.request import OUT_OF_PATIENCE
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.spec import Workload

Predictor = Callable[[int], TracedForecast]
MAX_WORKERS = 8
PATIENCE_SECONDS = 90.0


def capability_of(device: Device) -> str | None:
    """The compute capability for which a device's kernels are traced; None for one that is not predicted (no CUDA, or unknown)."""
    card = _card(device.name)
    known = None if card is None or card.is_amd else card.compute_capability
    return (device.compute_capability or known) if device.kind == "cuda" else None


def predictor_for(
    *,
    device: Device,
    workload: Workload,
    facts: Mapping[str, Any],
    space: Space,
    ask: Ask,
    say: Callable[[str], None],
    patience_seconds: float = PATIENCE_SECONDS,
    releases: bool = True,
) -> Predictor | None:
    """Return limit in bytes -> forecasts for the configurations of `space`; None when nothing can be predicted.

    Args:
        device: a CUDA device, here or recorded; others are not predicted (a CPU's allocator is another one).
        workload, facts: what is trained, and a child's description of it.
        space: whose classes are traced, the plainest first.
        ask: sends an estimate request to a child.
        say: told what is not predicted, and why.
        releases: whether the allocator may give back what it can when short of memory (a replayed one cannot).
        patience_seconds: no further trace begins after this time; what was traced is kept for the next search.
    """
    capability = capability_of(device)
    if capability is None or "digest" not in facts:
        return None
    setting = Setting(workload=workload, facts=facts, compute_capability=capability, padded=uneven(facts))
    wanted = class_representatives(setting, space)
    try:
        laws = collect(setting, wanted, ask, workers=_workers(), patience_seconds=patience_seconds)
    except (UserError, WorkerError) as error:
        say(f"memory is not predicted: {error.message}; it is learned from the trials")
        laws = collect(setting, wanted, ask, patience_seconds=0.0)  # what earlier searches traced
        patience_seconds = math.inf
    late = sum(found.late for found in laws.values())
    if late and math.isfinite(patience_seconds):
        say(f"memory of {late} of {len(laws)} classes is not predicted: {OUT_OF_PATIENCE} {patience_seconds:.0f} s")
    for reason in sorted({str(found.reason) for found in laws.values() if found.laws is None and not found.late}):
        say(f"memory of some configurations is not predicted: {reason}")
    if all(found.laws is None for found in laws.values()):
        return None

    def predictor(limit_bytes: int) -> TracedForecast:
        return TracedForecast(
            setting=setting,
            laws=laws,
            context_bytes=device.context_bytes,
            limit_bytes=limit_bytes,
            roof=_card(device.name),
            releases=releases,
        )

    return predictor


def class_representatives(setting: Setting, space: Space) -> list[TrialConfig]:
    """One configuration per law: first those that many batches share, the plainest of them before the others; last those of one
    micro-step per update, which serve a single batch."""
    found: dict[str, TrialConfig] = {}
    for config in space.configs:
        found.setdefault(law_class(setting, config), config)
    return sorted(
        found.values(),
        key=lambda c: (
            c.gradient_accumulation_steps == 1,
            c.optim != "adamw_torch_fused",
            c.gradient_checkpointing,
        ),
    )


def _workers() -> int:
    return max(1, min(MAX_WORKERS, os.cpu_count() or 1))


def _card(name: str) -> Card | None:
    try:
        return cards.find(name)
    except UserError:
        return None
