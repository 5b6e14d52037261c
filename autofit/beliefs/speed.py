"""How fast each configuration is believed to be: a factorised model of one optimizer step, learned from trials.

    seconds = accumulation x (t_micro + t_fetch) + t_update

- `t_micro` depends on precision, checkpointing, extras and batch, not on the optimizer (see `microstep`);
- `t_fetch` depends on the batch and on extras; `t_update` on optimizer, precision and extras, not on the batch.

So one trial teaches about every configuration that shares a factor with it. Everything is a draw from a posterior: an
interval of throughput holds few data, machine noise and drift, the steps that hardware makes between batch sizes, and
how well the physical form has fitted so far. Not covered: data-parallel reduction, optimizers whose cost depends on the data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autofit.beliefs.gaussian import GaussianCells, Indices, cells_of, same
from autofit.beliefs.microstep import MicroStepModel
from autofit.beliefs.posterior import Array
from autofit.problem.config import Precision, TrialConfig
from autofit.trials.measurement import Measurement

DRIFT_SHARE = (
    0.5  #: drift between runs as a share of the jitter within one (CPU: medians of long runs differ by 0.65)
)
DRIFT_FLOOR = 0.003  #: relative; clocks and temperature of a quiet GPU
NEGLIGIBLE = 1e-4  #: parts of a step below this share are as good as zero
MEDIAN_ERROR = 1.2533  #: standard error of a median over that of a mean, normal samples

# Median and spread (log) of an update's time against fused AdamW: passes over the parameters and kernels per tensor.
_UPDATE_PRIOR = {"fused": (0.0, 0.1), "adamw_torch": (0.4, 0.4), "sgd": (-0.4, 0.4), "8bit": (0.4, 0.7)}
_UPDATE_PRIOR |= {"adafactor": (0.9, 0.6)}
_UPDATE_UNKNOWN = (0.4, 0.8)


class TimePrior(Protocol):
    """What a roofline over the traced operations says before any trial; right to some tens of percent."""

    def micro_seconds(self, config: TrialConfig) -> float | None:
        """One micro-step, or None when it cannot be predicted."""
        ...

    def update_seconds(self, config: TrialConfig) -> float | None:
        """One optimizer update, or None when it cannot be predicted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTime:
    """Natural logarithm of a median time in seconds and its standard error, drift between runs included; `jitter` is the part of it that samples show."""

    value: float
    error: float
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one completed trial says about the three parts of a step; None where it has no such samples."""

    config: TrialConfig
    micro: LogTime
    fetch: LogTime | None
    update: LogTime | None

    @classmethod
    def of(cls, config: TrialConfig, measurement: Measurement) -> Observation:
        """Reduce raw samples to medians with honest errors."""
        mean = measurement.uneven
        micro = log_time(measurement.typical_micro_seconds, floor=1e-9, mean=mean)
        small = NEGLIGIBLE * math.exp(micro.value)
        fetch, update = measurement.fetch_blocks, measurement.update_seconds
        return cls(
            config=config,
            micro=micro,
            fetch=log_time(fetch, floor=small, mean=measurement.mean_fetch) if fetch else None,
            update=log_time(update, floor=small * config.gradient_accumulation_steps, mean=mean)
            if update
            else None,
        )


def log_time(samples: Sequence[float], *, floor: float, mean: bool = False) -> LogTime:
    """Median of `samples` (seconds, at least one), or their mean, as a logarithm with its error.

    The error joins the jitter within the run (robust: from the median absolute deviation) and the drift between runs, which
    one run cannot show and which is therefore assumed to be a fixed share of the jitter.
    """
    logs = [math.log(max(value, floor)) for value in samples]
    middle = math.log(max(statistics.fmean(samples), floor)) if mean else statistics.median(logs)
    if len(logs) < 3:
        jitter = 0.05
    else:
        jitter = 1.4826 * statistics.median(abs(value - middle) for value in logs)
        jitter = max(jitter, 0.25 * statistics.pstdev(logs))
    drift = max(DRIFT_FLOOR, DRIFT_SHARE * jitter)
    own = MEDIAN_ERROR * jitter / math.sqrt(len(logs))
    return LogTime(value=middle, error=math.hypot(own, drift), jitter=own)


class SpeedModel:
    """The model over a fixed list of configurations.

    Args:
        configs: all configurations, in the order of the columns of `log_speed_draws`.
        prior: a roofline, where there is one.
    """

    def __init__(self, configs: Sequence[TrialConfig], prior: TimePrior | None = None) -> None:
        self._configs = tuple(configs)
        roofs = [None if prior is None else prior.micro_seconds(c) for c in configs]
        self._micro = MicroStepModel(self._configs, roofs)
        self._fetch, self._fetch_cell = _fetch_model(self._configs)
        updates = [None if prior is None else prior.update_seconds(c) for c in configs]
        self._update, self._update_cell = _update_model(self._configs, updates)
        self._row = {config: row for row, config in enumerate(self._configs)}
        self._accumulation = np.array([float(c.gradient_accumulation_steps) for c in self._configs])
        self._samples = np.array([float(c.effective_batch()) for c in self._configs])

    def log_speed_draws(
        self, observations: Sequence[Observation], count: int, rng: np.random.Generator
    ) -> Array:
        """Return (count, configurations) joint draws of log samples/s given what was observed.

        Without any observation the level is arbitrary (0 = one second per micro-step) unless a roofline gives it.
        """
        rows = np.array([self._row[o.config] for o in observations], dtype=np.int64)
        micro = self._micro.draws(rows, _values(o.micro for o in observations), count, rng)
        seconds = np.exp(micro)
        seconds += self._part_draws(self._fetch, self._fetch_cell, "fetch", observations, count, rng)
        seconds *= self._accumulation
        seconds += self._part_draws(self._update, self._update_cell, "update", observations, count, rng)
        return np.asarray(np.log(self._samples) - np.log(seconds), dtype=np.float64)

    def _part_draws(
        self,
        model: GaussianCells,
        cells: Indices,
        part: str,
        observations: Sequence[Observation],
        count: int,
        rng: np.random.Generator,
    ) -> Array:
        """Seconds of fetch or update per configuration; 0 while nothing was seen of it and nothing predicts it."""
        seen = [(self._row[o.config], getattr(o, part)) for o in observations if getattr(o, part) is not None]
        if not seen:
            return np.zeros((count, len(self._configs)))
        rows = cells[[row for row, _ in seen]]
        draws = model.draws(rows, _values(time for _, time in seen), count, rng)
        return np.asarray(np.exp(draws[:, cells]), dtype=np.float64)


def _values(times: Iterable[LogTime]) -> Array:
    return np.array([(t.value, t.error) for t in times], dtype=np.float64).reshape(-1, 2)


def _fetch_model(configs: Sequence[TrialConfig]) -> tuple[GaussianCells, Indices]:
    """Log seconds of fetch by (batch, extras): grows with the batch, how fast is learned; the level is free."""
    cells, index = cells_of([(c.per_device_train_batch_size, c.extra) for c in configs])
    octaves = np.log([float(batch) for batch, _ in cells])
    covariance = 3.0**2 + 0.35**2 * np.outer(octaves, octaves) + 0.15**2 * np.eye(len(cells))
    covariance += 0.5**2 * same([extra for _, extra in cells])
    return GaussianCells(-6.0 + 0.6 * octaves, covariance), index


def _update_model(
    configs: Sequence[TrialConfig], predicted: Sequence[float | None]
) -> tuple[GaussianCells, Indices]:
    """Log seconds of an update by (optimizer, precision, extras): the level is free, ratios have physical priors."""
    cells, index = cells_of([(c.optim, c.precision, c.extra) for c in configs])
    first = {cell: predicted[int(np.flatnonzero(index == row)[0])] for row, cell in enumerate(cells)}
    mean, spread = np.zeros(len(cells)), np.zeros(len(cells))
    for row, (optim, precision, extra) in enumerate(cells):
        roof = first[(optim, precision, extra)]
        known, spread[row] = update_prior(optim)
        mean[row] = -4.0 + known if roof is None else math.log(roof)
        if roof is None and precision is Precision.PURE_BF16:
            mean[row] -= math.log(2.0)
    if None not in first.values():
        spread = np.clip(spread, 0.4, 0.6)  # bytes are known, launches are not
    optims, precisions = [c[0] for c in cells], [c[1] for c in cells]
    covariance = 3.0**2 + same(optims) * np.outer(spread, spread)
    covariance += 0.1**2 * same(precisions) + 0.03**2 * same([c[:2] for c in cells])
    covariance += 0.05**2 * same([c[2] for c in cells]) + 0.01**2 * np.eye(len(cells))
    return GaussianCells(mean, covariance), index


def update_prior(optim: str) -> tuple[float, float]:
    """Mean and spread of the log ratio of an optimizer's update time to fused AdamW's, by its name."""
    for part, belief in _UPDATE_PRIOR.items():
        if part in optim:
            return belief
    return _UPDATE_UNKNOWN
