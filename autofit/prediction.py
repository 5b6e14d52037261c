"""Predictions for a whole space, made before its first trial. Where a model, a card or an operator cannot be traced, nothing is claimed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from autofit import cards
from autofit.cards import Card
from autofit.config import TrialConfig
from autofit.device import Device
from autofit.errors import UserError, WorkerError
from autofit.forecast import TracedForecast
from autofit.laws import Ask, Setting, collect, law_class
from autofit.space import Space
from autofit.spec import Workload

Predictor = Callable[[int], TracedForecast]
MAX_WORKERS = 8


def predictor_for(
    *,
    device: Device,
    workload: Workload,
    facts: Mapping[str, Any],
    space: Space,
    ask: Ask,
    say: Callable[[str], None],
) -> Predictor | None:
    """Return limit in bytes -> forecasts for every configuration of `space`; None when nothing can be predicted.

    Args:
        device: a CUDA device; others are not predicted (a CPU's allocator is another one).
        workload, facts: what is trained, and a child's description of it.
        space: whose classes are traced.
        ask: sends an estimate request to a child.
        say: told what could not be predicted, and why.
    """
    if device.kind != "cuda" or device.compute_capability is None or "digest" not in facts:
        return None
    setting = Setting(workload=workload, facts=facts, compute_capability=device.compute_capability)
    representatives = class_representatives(setting, space)
    try:
        laws = collect(setting, representatives, ask, workers=_workers())
    except (UserError, WorkerError) as error:
        say(f"memory is not predicted: {error.message}; it is learned from the trials")
        return None
    reasons = {found.reason for found in laws.values() if found.laws is None}
    for reason in sorted(str(r) for r in reasons):
        say(f"memory of some configurations is not predicted: {reason}")
    if all(found.laws is None for found in laws.values()):
        return None
    card = _card(device.name)

    def predictor(limit_bytes: int) -> TracedForecast:
        return TracedForecast(
            setting=setting, laws=laws, context_bytes=device.context_bytes, limit_bytes=limit_bytes, roof=card
        )

    return predictor


def class_representatives(setting: Setting, space: Space) -> list[TrialConfig]:
    """One configuration per law; the plainest first, so that a search can begin with those."""
    found: dict[str, TrialConfig] = {}
    for config in space.configs:
        found.setdefault(law_class(setting, config), config)
    return sorted(found.values(), key=lambda c: (c.optim != "adamw_torch_fused", c.gradient_checkpointing))


def _workers() -> int:
    return max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2))


def _card(name: str) -> Card | None:
    try:
        return cards.find(name)
    except UserError:
        return None
