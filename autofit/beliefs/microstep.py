"""Seconds of one micro-step over precision, checkpointing, extras and batch: a physical form plus what it misses.

The form: a part that does not grow with the batch (kernel launches, weight traffic) and a part that does (`work`):

    t = (fixed^k + work^k)^(1/k)        k = 1: they add up; k large: the slower one hides the other

Its unknowns, all in logarithms, with priors from physics and nothing tuned to a landscape: at which batch the two parts are
equal; how much faster each precision computes (up to the ratio of the units' peaks, about 8 to 16, or slower where it is
emulated); what recomputation costs (a third of the work); what extras change. With a roofline the work is the roofline's,
up to an efficiency per precision.

What the form misses is a Gaussian process over the cells: by class, smooth in the batch, by the batch's alignment to 8,
and one part of its own per cell (tile and wave quantisation). Its scale is an unknown too: where the form fits, intervals
shrink; where there are cliffs, they grow. So is the noise between runs, which one run cannot show: where cells that should agree do not,
runs are trusted less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autofit.beliefs.gaussian import Indices, cells_of, same
from autofit.beliefs.posterior import Array, tempered_draws
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import TRACED, time_prior

# name -> (mean, standard deviation); natural logarithms unless said otherwise.
_BASE = {
    "level": (0.0, 0.3),  # of the first cell seen, about what was seen
    "balance": (0.0, 2.0),  # batch at which fixed part and work are equal, fp32, no checkpointing
    "sharpness": (0.9, 0.7),  # k: launches hide behind work (large), weight traffic adds to it (1)
    "scale": (0.0, 0.7),  # of the misfit
    "noise": (
        -4.6,
        1.2,
    ),  # between runs of one micro-step, beyond what one run can see: 1 %, a shared machine 10 %
}
_HALF = (1.1, 0.7)  # 16 bit against fp32: median 3x, 95 %: 0.75x .. 12x
_HALF_ROOF = (0.0, 0.45)  # efficiency of 16 bit against the roofline's
_TF32_SHARE = (0.6, 0.25)  # tf32's gain as a share of 16 bit's, not a logarithm
_FP16_OVER_BF16 = (0.0, 0.08)
_PURE_OVER_BF16 = (0.1, 0.2)
_HALF_FIXED = (0.15, 0.2)  # autocast adds casts: more launches
_RECOMPUTE = (0.285, 0.06)  # log 1.33: forward is a third of the work
_RECOMPUTE_FIXED = (0.285, 0.12)
_EXTRA = (0.0, 0.2)
_UNALIGNED = (
    0.05,
    0.12,
)  # work of a 16-bit batch that is no multiple of 8, where that reaches the tensor cores
_MISFIT = {
    "class": 0.04,
    "batch": 0.05,
    "batch_in_class": 0.04,
    "quantised": 0.05,
    "aligned": 0.03,
    "cell": 0.02,
}
_HALF_PRECISIONS = (Precision.BF16, Precision.FP16, Precision.PURE_BF16)
_INTO_BACKWARD = (
    "lomo",
    "layerwise",
)  # optimizers that update inside backward: their cost is in the micro-step
PARTICLES = 192
RUN_NOISES = (0.003, 0.01, 0.03, 0.1, 0.3)  #: levels at which the noise between runs is told apart


class MicroStepModel:
    """Belief about log `t_micro`.

    Args:
        configs: columns of `draws`.
        roofs: seconds of the roofline per configuration; used only when all are given.
    """

    def __init__(self, configs: Sequence[TrialConfig], roofs: Sequence[float | None]) -> None:
        cells, self._index = cells_of([_cell(c) for c in configs])
        self._roof: Array | None = None
        if all(roof is not None and roof > 0 for roof in roofs):
            by_cell = {int(i): float(r) for i, r in zip(self._index, roofs) if r is not None}
            self._roof = np.log([by_cell[i] for i in range(len(cells))])
        self._batch = np.log([float(c[3]) for c in cells])
        self._precisions = [c[0] for c in cells]
        self._checkpointing = np.array([float(c[1]) for c in cells])
        values = dict.fromkeys(pair for c in cells for pair in c[2])
        self._extras = np.array([[float(v in c[2]) for v in values] for c in cells]).reshape(len(cells), -1)
        self._unaligned = np.array([float(c[3] % 8 != 0 and c[0] in _HALF_PRECISIONS) for c in cells])
        self._names = self._unknowns(list(values))
        self._covariance = _misfit(cells)
        self._root = np.linalg.cholesky(self._covariance + 1e-10 * np.eye(len(cells)))

    def draws(self, rows: Indices, seen: Array, count: int, rng: np.random.Generator) -> Array:
        """Return (count, configurations) joint draws of log `t_micro`.

        Args:
            rows: (k,) position among the configurations of each sighting.
            seen: (k, 2) log seconds and standard error.
            count: number of draws.
            rng: source of randomness.
        """
        cells = self._index[rows]
        anchor = int(cells[0]) if len(cells) else None
        level = float(seen[0, 0]) if len(seen) else self._free_level()
        means = np.array([m for m, _ in self._names.values()])
        spreads = np.array([s for _, s in self._names.values()])
        particles = means + spreads * rng.standard_normal((PARTICLES, len(means)))
        unique = np.unique(cells)
        if len(cells):
            misfit = _Misfit(self._covariance[np.ix_(cells, cells)], seen[:, 1])

            def likelihood(theta: Array) -> Array:
                form = self._form(theta, unique, anchor) + level
                rest = seen[:, 0] - form[:, np.searchsorted(unique, cells)]
                return misfit.log_likelihood(rest, self._exp(theta, "scale"), self._exp(theta, "noise"))

            particles = tempered_draws(
                particles,
                lambda theta: -0.5 * (((theta - means) / spreads) ** 2).sum(axis=1),
                likelihood,
                rng,
            )
        chosen = particles[np.arange(count) % PARTICLES]
        scale = self._exp(chosen, "scale")[:, None]
        everywhere = np.arange(len(self._batch))
        values = level + self._form(particles, everywhere, anchor)[np.arange(count) % PARTICLES]
        values += scale * (rng.standard_normal(values.shape) @ self._root.T)
        if len(cells):
            noise = self._exp(chosen, "noise")
            errors = np.hypot(seen[:, 1], np.array(RUN_NOISES)[_levels(noise)][:, None])
            noisy = values[:, cells] + errors * rng.standard_normal((count, len(cells)))
            values += misfit.pull(seen[:, 0] - noisy, scale[:, 0], noise) @ self._covariance[cells]
        return np.asarray(values[:, self._index], dtype=np.float64)

    def _unknowns(self, extras: Sequence[object]) -> dict[str, tuple[float, float]]:
        names = dict(_BASE)
        present = set(self._precisions)
        if present & set(_HALF_PRECISIONS):
            names |= {"half": _HALF if self._roof is None else _HALF_ROOF, "half_fixed": _HALF_FIXED}
            names["unaligned"] = _UNALIGNED
        if Precision.FP16 in present:
            names["fp16"] = _FP16_OVER_BF16
        if Precision.PURE_BF16 in present:
            names["pure"] = _PURE_OVER_BF16
        if Precision.TF32 in present:
            names["tf32"] = _TF32_SHARE if self._roof is None else _HALF_ROOF
            names.setdefault("half", _HALF)
        if self._checkpointing.any():
            names |= {"recompute": _RECOMPUTE, "recompute_fixed": _RECOMPUTE_FIXED}
        for number, pair in enumerate(extras):
            work, fixed = _extra_priors(pair, traced=self._roof is not None)
            names |= {f"extra{number}": work, f"extra_fixed{number}": fixed}
        return names

    def _column(self, name: str) -> int:
        return list(self._names).index(name)

    def _exp(self, theta: Array, name: str) -> Array:
        return np.asarray(np.exp(theta[:, self._column(name)]), dtype=np.float64)

    def _free_level(self) -> float:
        return float(self._roof[0]) if self._roof is not None else 0.0

    def _form(self, theta: Array, cells: Indices, anchor: int | None) -> Array:
        """(particles, cells) log seconds by the form, less that of the anchor cell, plus the level."""
        at = {name: theta[:, column][:, None] for column, name in enumerate(self._names)}
        points = cells if anchor is None else np.append(cells, anchor)
        work, fixed = self._work(at, points), self._fixed(at, points)
        sharp = np.exp(at["sharpness"])
        high, low = np.maximum(work, fixed), np.minimum(work, fixed)
        log_seconds = high + np.log1p(np.exp(sharp * (low - high))) / sharp
        reference = log_seconds[:, :1] if anchor is None else log_seconds[:, -1:]
        return np.asarray(log_seconds[:, : len(cells)] - reference + at["level"], dtype=np.float64)

    def _work(self, at: dict[str, Array], cells: Indices) -> Array:
        """Log of the part that grows with the batch; fp32 without checkpointing at batch 1 is 0 (or the roofline's)."""
        gains = np.hstack([self._gain(at, p) for p in dict.fromkeys(self._precisions)])
        order = list(dict.fromkeys(self._precisions))
        column = np.array([order.index(self._precisions[i]) for i in cells])
        work: Array = -gains[:, column]
        if self._roof is None:
            work = work + self._batch[cells]
            if "recompute" in at:
                work = work + at["recompute"] * self._checkpointing[cells]
        else:
            work = work + self._roof[cells] - self._roof.min()
            if "recompute" in at:
                work = work + (at["recompute"] - _RECOMPUTE[0]) * self._checkpointing[cells]
        if "unaligned" in at:
            work = work + at["unaligned"] * self._unaligned[cells]
        for number in range(self._extras.shape[1]):
            work = work + at[f"extra{number}"] * self._extras[cells, number]
        return work

    def _gain(self, at: dict[str, Array], precision: Precision) -> Array:
        if precision is Precision.FP32:
            return np.zeros_like(at["level"])
        if precision is Precision.TF32:
            return at["tf32"] * at["half"] if self._roof is None else at["tf32"]
        gain = at["half"]
        if precision is Precision.FP16:
            gain = gain + at["fp16"]
        if precision is Precision.PURE_BF16:
            gain = gain + at["pure"]
        return gain

    def _fixed(self, at: dict[str, Array], cells: Indices) -> Array:
        """Log of the part that does not grow with the batch, in the same unit as the work."""
        fixed: Array = at["balance"] + np.zeros((1, len(cells)))
        autocast = np.array([float(self._precisions[i] in (Precision.BF16, Precision.FP16)) for i in cells])
        if "half_fixed" in at:
            fixed = fixed + at["half_fixed"] * autocast
        if "recompute_fixed" in at:
            fixed = fixed + at["recompute_fixed"] * self._checkpointing[cells]
        for number in range(self._extras.shape[1]):
            fixed = fixed + at[f"extra_fixed{number}"] * self._extras[cells, number]
        return fixed


class _Misfit:
    """Likelihood of the Gaussian process at the sightings for any scale and run noise: one eigendecomposition per level of noise."""

    def __init__(self, covariance: Array, errors: Array) -> None:
        self._weights, self._axes, self._values = [], [], []
        for noise in RUN_NOISES:
            weight = 1.0 / np.hypot(errors, noise)
            values, axes = np.linalg.eigh(covariance * np.outer(weight, weight))
            self._weights.append(weight)
            self._axes.append(axes)
            self._values.append(np.maximum(values, 0.0))

    def log_likelihood(self, rest: Array, scale: Array, noise: Array) -> Array:
        """(n,) log likelihood of residuals (n, k) where the process has scale (n,) and runs differ by noise (n,)."""
        found = np.empty(len(rest))
        for level, of in _by_level(noise):
            weight = self._weights[level]
            variance = 1.0 + scale[of, None] ** 2 * self._values[level]
            along = (rest[of] * weight) @ self._axes[level]
            found[of] = np.log(weight).sum() - 0.5 * (along**2 / variance + np.log(variance)).sum(axis=1)
        return found

    def pull(self, rest: Array, scale: Array, noise: Array) -> Array:
        """(n, k) weights: times the covariance to the sightings, the process's move towards the residuals (n, k)."""
        found = np.empty_like(rest)
        for level, of in _by_level(noise):
            weight, axes = self._weights[level], self._axes[level]
            squared = scale[of, None] ** 2
            along = (rest[of] * weight) @ axes / (1.0 + squared * self._values[level])
            found[of] = squared * ((along @ axes.T) * weight)
        return found


def _levels(noise: Array) -> Indices:
    """The nearest of `RUN_NOISES`, in logarithms."""
    middles = [math.sqrt(a * b) for a, b in itertools.pairwise(RUN_NOISES)]
    return np.asarray(np.searchsorted(middles, noise), dtype=np.int64)


def _by_level(noise: Array) -> Iterator[tuple[int, Indices]]:
    levels = _levels(noise)
    for level in range(len(RUN_NOISES)):
        of = np.flatnonzero(levels == level)
        if len(of):
            yield level, of


def _cell(config: TrialConfig) -> tuple[Precision, bool, tuple[object, ...], int]:
    extra: tuple[object, ...] = config.extra
    if any(part in config.optim for part in _INTO_BACKWARD):
        extra = (*extra, ("optim", config.optim))
    return config.precision, config.gradient_checkpointing, extra, config.per_device_train_batch_size


def _extra_priors(pair: object, *, traced: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Belief about what an extra does to the work and to the fixed part; a roofline has the work of what can be traced in it."""
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return _EXTRA, _EXTRA
    mean, spread = time_prior(pair)
    if traced and pair[0] in TRACED:
        mean = 0.0
    return (mean, spread), (min(mean, 0.0), max(spread, _EXTRA[1]))


def _misfit(cells: Sequence[tuple[Precision, bool, tuple[object, ...], int]]) -> Array:
    """Covariance of what the physical form misses, at scale 1."""
    octave = np.log2([float(c[3]) for c in cells])
    apart = np.abs(octave[:, None] - octave[None, :])
    classes = same([c[:3] for c in cells])
    alignment = [(min(3, (c[3] & -c[3]).bit_length() - 1), c[0] in _HALF_PRECISIONS) for c in cells]
    covariance = _MISFIT["class"] ** 2 * classes
    covariance = covariance + _MISFIT["batch"] ** 2 * np.exp(-0.5 * (apart / 2.0) ** 2)
    covariance = covariance + _MISFIT["batch_in_class"] ** 2 * classes * np.exp(-apart / 3.0)
    quantised = [(c[3], c[0] in _HALF_PRECISIONS) for c in cells]
    covariance = covariance + _MISFIT["quantised"] ** 2 * same(quantised)
    covariance = covariance + _MISFIT["aligned"] ** 2 * same(alignment)
    return np.asarray(covariance + _MISFIT["cell"] ** 2 * np.eye(len(cells)), dtype=np.float64)
