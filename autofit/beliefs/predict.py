"""Whether a configuration fits: predicted before the search where the model is known, corrected by every trial, or learned.

The seam is `MemoryModel`: who knows the model (a trace on fake tensors, a formula) says how many bytes of the device a configuration
takes. `MemoryBelief` turns that and the trials so far into a probability per configuration:

- predicted: the error of a prediction is shared (context, allocator), so trials shift all predictions, those of the same
  class more; an out-of-memory pushes them up;
- not predictable: learned from the trials alone, see `learned_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autofit.beliefs.gaussian import same
from autofit.beliefs.learned_memory import LearnedMemory, MemorySighting, optimizer_memory
from autofit.beliefs.posterior import Array
from autofit.problem.config import TrialConfig
from autofit.problem.extras import keeps_no_less
from autofit.trials.trial import Outcome, Reason, TrialRecord

NORMAL_95 = 1.96
CONTEXT_SHARE = 0.5  #: of the smallest prediction's error, that may be the context's
_SHARED = {"all": 0.3, "class": 0.45, "own": 0.25}  # shares of the variance of a prediction's relative error
_LEAST_ERROR = 1e-3  # of the limit: below this a prediction is as good as exact
MEMORY_REASONS = (Reason.OUT_OF_MEMORY, Reason.SUSPECTED_OUT_OF_MEMORY, Reason.ALLOCATOR_THRASH)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Device bytes that a run is predicted to take, context included (as `Memory.needed_bytes`).

    Attributes:
        low_bytes: it takes at least this (95 %).
        bytes: best guess.
        high_bytes: it takes at most this (95 %).
    """

    low_bytes: int
    bytes: int
    high_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes <= self.bytes <= self.high_bytes:
            raise ValueError(f"a forecast needs 0 <= low <= bytes <= high, got {self}")

    def too_big(self, limit_bytes: int | None) -> bool:
        """Even the low end does not fit: not worth a trial."""
        return limit_bytes is not None and self.low_bytes > limit_bytes


class MemoryModel(Protocol):
    """Predicts memory before any trial."""

    def needed(self, config: TrialConfig) -> MemoryForecast | None:
        """The forecast, or None when this configuration cannot be predicted."""
        ...


class MemoryBelief:
    """What is believed about memory over a fixed list of configurations.

    Args:
        configs: the space.
        limit_bytes: bytes of the device that a run may use, context included; None = no limit, everything fits.
        model: the prediction; None = learn from trials.
    """

    def __init__(
        self, configs: Sequence[TrialConfig], *, limit_bytes: int | None, model: MemoryModel | None = None
    ) -> None:
        self._configs, self._limit = tuple(configs), limit_bytes
        self._row = {config: row for row, config in enumerate(self._configs)}
        self._forecasts = [model.needed(c) if model is not None else None for c in self._configs]
        self._learned = LearnedMemory(self._configs)
        self._corrected = list(self._forecasts)
        self._fits = np.ones(len(self._configs))

    @property
    def predicted(self) -> bool:
        """Whether every configuration has a forecast."""
        return all(f is not None for f in self._forecasts)

    def forecast(self, config: TrialConfig) -> MemoryForecast | None:
        """The forecast of `config` as corrected by the last `update`; None when it is not predictable."""
        return self._corrected[self._row[config]]

    def update(self, records: Sequence[TrialRecord], rng: np.random.Generator) -> Array:
        """Return (configs,) probability that each fits, given all trials so far.

        What a trial showed is certain; so is that a configuration of the same class does not fit when one with a smaller batch
        and no less to keep did not.
        """
        if self._limit is None:
            self._fits = np.ones(len(self._configs))
            return self._fits
        sightings = self._sightings(records)
        fits = np.full(len(self._configs), np.nan)
        known = np.array([f is not None for f in self._forecasts])
        if known.any():
            fits[known] = self._calibrated(known, sightings)
        if not known.all():
            learned = self._learned.fit_probability(sightings, self._limit, rng)
            fits[~known] = np.maximum(learned, least_trust(sightings))[~known]
        for sighting in sightings:
            row = self._row[sighting.config]
            fits[row] = 0.0 if sighting.needed_bytes is None else 1.0
        failed = [s.config for s in sightings if s.needed_bytes is None]
        ran = {s.config for s in sightings if s.needed_bytes is not None}
        for row, config in enumerate(self._configs):
            if config not in ran and any(dominates(config, smaller) for smaller in failed):
                fits[row] = 0.0
        self._fits = fits
        return fits

    def _sightings(self, records: Sequence[TrialRecord]) -> list[MemorySighting]:
        found = []
        for record in records:
            if record.config not in self._row:
                continue
            if record.outcome is Outcome.COMPLETED and record.measurement is not None:
                memory = record.measurement.memory
                if memory.needed_bytes is not None:
                    found.append(
                        MemorySighting(
                            config=record.config,
                            needed_bytes=memory.needed_bytes,
                            context_bytes=memory.context_bytes or 0,
                        )
                    )
            elif is_memory_failure(record):
                found.append(MemorySighting(config=record.config, needed_bytes=None))
        return found

    def _calibrated(self, known: np.ndarray, sightings: Sequence[MemorySighting]) -> Array:
        """Probability of fitting by the predictions, their errors conditioned on the sightings (in units of the limit)."""
        assert self._limit is not None
        rows = np.flatnonzero(known)
        forecasts = [f for f in self._forecasts if f is not None]
        guess = np.array([f.bytes for f in forecasts]) / self._limit
        up = np.array([f.high_bytes for f in forecasts]) / self._limit - guess
        down = guess - np.array([f.low_bytes for f in forecasts]) / self._limit
        up, down = (np.maximum(side / NORMAL_95, _LEAST_ERROR) for side in (up, down))
        spread = (up + down) / 2
        shift, shrink = self._conditioned(rows, guess, spread, sightings)
        mean = guess + shift
        up, down = up * shrink, down * shrink
        for row, m, u, d in zip(rows, mean, up, down):
            ends = (m - NORMAL_95 * d, m, m + NORMAL_95 * u)
            low, middle, high = (max(0, int(end * self._limit)) for end in ends)
            self._corrected[row] = MemoryForecast(low_bytes=low, bytes=middle, high_bytes=high)
        return normal_cdf(np.where(mean <= 1.0, (1.0 - mean) / up, (1.0 - mean) / down))

    def _conditioned(
        self, rows: np.ndarray, guess: Array, spread: Array, sightings: Sequence[MemorySighting]
    ) -> tuple[Array, Array]:
        """Shift of every prediction and the factor its error shrinks by."""
        assert self._limit is not None
        place = {int(row): position for position, row in enumerate(rows)}
        seen, errors = [], []
        for sighting in sightings:
            position = place.get(self._row[sighting.config])
            if position is None:
                continue
            if sighting.needed_bytes is not None:
                error = sighting.needed_bytes / self._limit - guess[position]
            else:  # at least the limit; how much more is not known
                error = max(0.0, 1.0 + 0.5 * spread[position] - guess[position])
            seen.append(position)
            errors.append(error)
        if not seen:
            return np.zeros(len(rows)), np.ones(len(rows))
        classes = [_memory_class(self._configs[row]) for row in rows]
        # The context is one number of bytes for all: no more than half of the smallest error is taken for its; what is left of an
        # error grows with its configuration.
        offset = CONTEXT_SHARE * float(spread.min())
        relative = np.sqrt(np.maximum(spread**2 - offset**2, 0.0))
        shares = _SHARED["all"] + _SHARED["class"] * same(classes) + _SHARED["own"] * np.eye(len(rows))
        joint = offset**2 + shares * np.outer(relative, relative)
        inner = joint[np.ix_(seen, seen)] + np.diag(np.full(len(seen), (0.5 * _LEAST_ERROR) ** 2))
        gain = np.linalg.solve(inner, joint[seen]).T
        rest = 1.0 - np.einsum("ij,ji->i", gain, joint[seen]) / np.diag(joint)
        return gain @ np.array(errors), np.sqrt(np.clip(rest, 1e-4, 1.0))


def least_trust(sightings: Sequence[MemorySighting]) -> float:
    """Least probability to fit of anything that is not ruled out by construction: above 0 only where the learned form was contradicted.

    A contradiction is a configuration that did not fit although one completed that should need no less: as large a batch, no more checkpointing, as much
    optimizer state. Allocators that are not the device's (a CPU's arenas, a library's buffers) do that; then the form must not rule out alone.
    """
    completed = [s.config for s in sightings if s.needed_bytes is not None]
    failed = [s.config for s in sightings if s.needed_bytes is None]
    surprises = sum(any(_should_need_no_less(one, other) for one in completed) for other in failed)
    return 0.3 * surprises / (surprises + 2)


def _should_need_no_less(config: TrialConfig, other: TrialConfig) -> bool:
    """As `dominates`, over optimizers too, by the state that they are known to keep."""
    state, other_state = optimizer_memory(config.optim)[0], optimizer_memory(other.optim)[0]
    return state >= other_state and dominates(config.but(optim=other.optim), other)


def is_memory_failure(record: TrialRecord) -> bool:
    """Whether the trial ran and did not fit (thrash counts: it did not fit soundly)."""
    return (
        record.outcome is Outcome.INFEASIBLE
        and record.failure is not None
        and record.failure.reason in MEMORY_REASONS
    )


def dominates(config: TrialConfig, other: TrialConfig) -> bool:
    """Whether `config` needs at least as much memory as `other` by construction.

    Same precision and optimizer, no smaller batch, and gradients kept across micro-steps if the other keeps them; checkpointing off needs
    at least what checkpointing on needs, and so do fewer checkpointed layers.
    """
    if (config.precision, config.optim) != (other.precision, other.optim) or not keeps_no_less(config, other):
        return False
    if config.per_device_train_batch_size < other.per_device_train_batch_size:
        return False
    return config.gradient_accumulation_steps > 1 or other.gradient_accumulation_steps == 1


def normal_cdf(values: Array) -> Array:
    """Standard normal distribution function, elementwise."""
    flat = [0.5 * math.erfc(-float(v) / math.sqrt(2.0)) for v in np.ravel(values)]
    return np.array(flat, dtype=np.float64).reshape(np.shape(values))


def _memory_class(config: TrialConfig) -> tuple[object, ...]:
    return config.precision, config.gradient_checkpointing, config.extra
