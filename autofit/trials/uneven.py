"""Times of batches that differ in size, brought to what an epoch's mean batch takes. Pure.

An epoch takes the sum of its batches' times, so its throughput follows from their mean, not from the median: where lengths differ, a median
forgets the long batches, which take the time. A short trial sees few batches, and few of a long tail, so its own mean is off by luck. But the
sizes of an epoch's batches are known without running them. A curve through (size, time),

    f(size) = fixed + linear x size + square x size^2        none of them negative

(launches; layers that go with the tokens; attention, which goes with their square at a fixed batch) says what the unseen batches take, and
the longest batch, timed in the prelude, holds the far end of the curve. As a control variate,

    adjusted_i = seconds_i - f(size_i) + mean of f over an epoch's batches

has the mean time of an epoch as its mean, and the machine's jitter without the data's as its spread. Ignored: what depends on single lengths and
not on size (padding to tiles, kernels chosen by shape).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_FOR_A_CURVE = 4
REWEIGHTED = 4
FLOOR = 0.05  #: of the mean: no adjusted time is below it

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of a trial's batches, in one unit: rows times the longest of them.

    Attributes:
        measured: of each measured micro-step's batch, in order.
        mean, mean_square: of the batches of an epoch; None = not known.
        longest: of the largest batch that the sampler can draw; None = it was not timed.
        longest_seconds: micro-steps on that one, optimizer state present, before the measured ones.
    """

    measured: tuple[float, ...]
    mean: float | None = None
    mean_square: float | None = None
    longest: float | None = None
    longest_seconds: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatchSizes:
        """Inverse of `to_json`; unknown keys are ignored."""
        names = {f.name for f in fields(cls)}
        known: dict[str, Any] = {k: tuple(map(float, v)) if isinstance(v, list) else v for k, v in data.items() if k in names}
        return cls(**known)


@functools.lru_cache(maxsize=4096)
def at_mean_batch(seconds: tuple[float, ...], sizes: BatchSizes) -> tuple[float, ...]:
    """`seconds` of each measured batch as an epoch's mean batch would have taken; as they are where sizes do not say.

    Args:
        seconds: at least one, in the order of `sizes.measured`.
        sizes: of the batches.
    """
    if sizes.mean is None or sizes.mean_square is None or len(seconds) != len(sizes.measured):
        return seconds
    curve = _curve(*_seen(seconds, sizes))
    if curve is None:
        return seconds
    fixed, linear, square = curve
    whole = fixed + linear * sizes.mean + square * sizes.mean_square
    floor = FLOOR * float(np.mean(seconds))
    return tuple(
        max(floor, t - (fixed + linear * size + square * size**2) + whole) for t, size in zip(seconds, sizes.measured)
    )


def mean_batch_error(seconds: tuple[float, ...], sizes: BatchSizes) -> tuple[float, int] | None:
    """Variance of the mean of `at_mean_batch` and its degrees of freedom; None where no curve was fitted, or no batch is left to check it.

    That mean is linear in the times: their own mean, and the curve's difference between an epoch's batches and those seen. The scatter about the
    curve is relative, and each of the curve's terms costs a degree of freedom.
    """
    if sizes.mean is None or sizes.mean_square is None or len(seconds) != len(sizes.measured):
        return None
    points, times = _seen(seconds, sizes)
    curve = _curve(points, times)
    terms = [] if curve is None else [power for power, value in enumerate(curve) if value > 0]
    freedom = len(times) - len(terms)
    if curve is None or freedom < 1:
        return None
    scale = points.max()
    form = np.stack([(points / scale) ** power for power in terms], axis=1)
    fitted = form @ np.array([curve[power] * scale**power for power in terms])
    epoch = np.array([(1.0, sizes.mean / scale, sizes.mean_square / scale**2)[power] for power in terms])
    count = len(seconds)
    shares = (epoch - form[:count].mean(axis=0)) @ np.linalg.pinv(form / fitted[:, None]) / fitted
    shares[:count] += 1 / count
    scatter = float((((times - fitted) / fitted) ** 2).sum()) / freedom
    return scatter * float(((shares * fitted) ** 2).sum()), freedom


def _seen(seconds: tuple[float, ...], sizes: BatchSizes) -> tuple[Array, Array]:
    """Sizes and times that the curve goes through: of the measured batches, then of the longest."""
    longest = [sizes.longest] * len(sizes.longest_seconds) if sizes.longest else []
    times = [*seconds, *(sizes.longest_seconds if sizes.longest else ())]
    return np.array([*sizes.measured, *longest], dtype=np.float64), np.array(times, dtype=np.float64)


def _curve(sizes: Array, times: Array) -> tuple[float, float, float] | None:
    """Coefficients, none negative, of the least relative squares; None for too few batches, or batches alike."""
    if len(times) < LEAST_FOR_A_CURVE or np.ptp(sizes) <= 1e-9 * sizes.max() or times.min() <= 0:
        return None
    scale = sizes.max()
    form = np.stack([np.ones_like(sizes), sizes / scale, (sizes / scale) ** 2], axis=1)
    fitted = times
    for _ in range(REWEIGHTED):  # by the curve and not by the times themselves: a batch that was fast by luck must not weigh more
        curve = _non_negative(form / fitted[:, None], times / fitted)
        fitted = form @ curve
    fixed, linear, square = map(float, curve)
    return fixed, linear / scale, square / scale**2


def _non_negative(form: Array, values: Array) -> Array:
    """(3,) least squares with no coefficient below zero: the best of all subsets of the columns."""
    best, least = np.zeros(3), np.inf
    for terms in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        found, *_ = np.linalg.lstsq(form[:, terms], values, rcond=None)
        error = float(((form[:, terms] @ found - values) ** 2).sum())
        if found.min() >= 0 and error < least:
            best, least = np.zeros(3), error
            best[list(terms)] = found
    return best
