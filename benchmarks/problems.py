"""Problems: a landscape under a memory limit, with what would be known of it beforehand.

Recorded landscapes are read from `landscapes/`; modelled ones are computed (see `modelled`) over five cards, five models, several effective batches,
lengths and extras. Each yields a problem at its device's own size and more at smaller limits: common card sizes that still leave a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from autofit.beliefs.predict import MemoryForecast
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.trials.landscape import Landscape, Point
from autofit.units import GIB
from benchmarks.modelled import ARCHITECTURES, CARDS, Laws, modelled_landscape

LANDSCAPES = Path(__file__).parent / "landscapes"
CARD_SIZES = (24 * GIB, 16 * GIB, 12 * GIB, 8 * GIB, 6 * GIB)
LEAST_CHOICE = 12  #: feasible configurations below which a limit leaves no search to speak of
LIMITS_PER_GRID = 2
EFFECTIVE_BATCHES = (64, 96, 36, 128, 120)
LENGTHS = (128, 256, 512)


@dataclass(frozen=True)
class Problem:
    """One landscape under one limit.

    Attributes:
        name: for tables.
        landscape: the grid.
        memory_limit_bytes: context included.
        laws: the formulas behind a modelled landscape; None = recorded.
    """

    name: str
    landscape: Landscape
    memory_limit_bytes: int
    laws: Laws | None = None

    @cached_property
    def space(self) -> Space:
        """Every configuration of the grid, feasible or not."""
        return Space(configs=tuple(p.config for p in self.landscape.points))

    @cached_property
    def truth(self) -> dict[TrialConfig, float]:
        """Samples/s of the feasible configurations, from the medians of all recorded samples."""
        return {p.config: true_speed(p) for p in self.landscape.points if self._fits(p)}

    @property
    def optimum(self) -> float:
        """Best feasible samples/s."""
        return max(self.truth.values())

    def regret(self, config: TrialConfig | None) -> float:
        """Relative loss of `config` against the optimum; 1 for none or one that does not fit."""
        return 1.0 - self.truth.get(config, 0.0) / self.optimum if config is not None else 1.0

    def _fits(self, point: Point) -> bool:
        return fits(point, self.landscape.device.context_bytes, self.memory_limit_bytes)


def fits(point: Point, context_bytes: int, limit_bytes: int) -> bool:
    """Whether a recorded point survives under a limit."""
    if point.measurement is None:
        return False
    reserved = point.measurement.memory.peak_reserved_bytes
    return reserved is None or reserved + context_bytes <= limit_bytes


def true_speed(point: Point) -> float:
    """Samples/s of a completed point by its medians."""
    assert point.measurement is not None
    return point.measurement.samples_per_second(
        per_device_train_batch_size=point.config.per_device_train_batch_size,
        gradient_accumulation_steps=point.config.gradient_accumulation_steps,
    )


class ModelledForecast:
    """What traces would predict of a modelled landscape: its laws with errors of the size that validation found.

    Memory: 1 % in common, 1.5 % per class, the band 4 % below and 7 % above. Time: the bare roofline (no waves, launches or efficiencies), 15 % off per
    precision and 30 % per optimizer.
    """

    def __init__(self, laws: Laws, seed: int) -> None:
        self._laws, self._seed = laws, seed
        self._common = float(np.random.default_rng(seed).normal(0.0, 0.01))
        self._errors: dict[tuple[str, ...], float] = {}

    def needed(self, config: TrialConfig) -> MemoryForecast:
        """Device bytes, context included."""
        kind = (
            "memory",
            config.precision,
            str(config.gradient_checkpointing),
            config.optim,
            str(config.extra),
        )
        reserved = self._laws.reserved_bytes(config) * math.exp(self._common + self._error(kind, 0.015))
        guess = self._laws.card.context_bytes + int(reserved)
        return MemoryForecast(low_bytes=int(0.96 * guess), bytes=guess, high_bytes=int(1.07 * guess))

    def micro_seconds(self, config: TrialConfig) -> float:
        """The roofline's micro-step."""
        return self._laws.micro_seconds(config, ideal=True) * math.exp(
            self._error(("micro", config.precision), 0.15)
        )

    def update_seconds(self, config: TrialConfig) -> float:
        """The roofline's update."""
        return self._laws.update_seconds(config, ideal=True) * math.exp(
            self._error(("update", config.optim), 0.3)
        )

    def _error(self, kind: tuple[str, ...], spread: float) -> float:
        if kind not in self._errors:
            digits = [self._seed, *(ord(letter) for letter in "|".join(kind))]
            self._errors[kind] = float(np.random.default_rng(digits).normal(0.0, spread))
        return self._errors[kind]


def problems() -> list[Problem]:
    """All problems: recorded first, then modelled."""
    return [*recorded_problems(), *modelled_problems()]


def recorded_problems(folder: Path = LANDSCAPES) -> Iterator[Problem]:
    """Problems of the landscape files in `folder`."""
    for path in sorted(folder.glob("*.json")):
        yield from _under_limits(path.stem, Landscape.load(path), None)


def modelled_problems() -> Iterator[Problem]:
    """Problems of every card with every model."""
    number = 0
    for card in CARDS.values():
        for model in ARCHITECTURES.values():
            batch = EFFECTIVE_BATCHES[number % len(EFFECTIVE_BATCHES)]
            length = 197 if model.name.startswith("vit") else LENGTHS[number % len(LENGTHS)]
            extras = ("sdpa", "eager") if number % 7 == 3 else ()
            landscape = modelled_landscape(
                card, model, seq_len=length, effective_batch=batch, extras=extras, seed=number
            )
            name = f"{card.name} {model.name} L{length} B{batch}"
            yield from _under_limits(name, landscape, Laws(card=card, model=model, seq_len=length))
            number += 1


def _under_limits(name: str, landscape: Landscape, laws: Laws | None) -> Iterator[Problem]:
    """The device's own size, and smaller ones that still leave a choice and take some of it away."""
    recorded = landscape.spec.get("memory_limit_bytes")  # what did not fit under it might fit in more
    total = int(recorded or landscape.device.total_memory_bytes or 1 << 60)
    context, last, found = landscape.device.context_bytes, -1, 0
    for limit in (total, *_smaller(landscape, total)):
        feasible = sum(fits(p, context, limit) for p in landscape.points)
        if feasible >= LEAST_CHOICE and feasible != last and found < LIMITS_PER_GRID:
            label = "no limit" if limit >= 1 << 60 else f"{limit / GIB:.3g} GiB"
            yield Problem(name=f"{name} {label}", landscape=landscape, memory_limit_bytes=limit, laws=laws)
            last, found = feasible, found + 1


def _smaller(landscape: Landscape, total: int) -> list[int]:
    """Common card sizes below the device's; on the CPU, where those mean nothing, two fifths and two thirds of the largest need."""
    if landscape.device.kind != "cpu":
        return [size for size in CARD_SIZES if size < total]
    needs = [
        p.measurement.memory.peak_reserved_bytes or 0 for p in landscape.points if p.measurement is not None
    ]
    return [int(share * max(needs, default=0)) for share in (2 / 3, 2 / 5)]
