"""Draws from a posterior of a dozen unknowns, by tempered particles: numpy only, deterministic, a few milliseconds.

Particles start as draws from the prior and are led to the posterior in steps (likelihood to the power 0 .. 1); in
each step they are resampled and moved by differential-evolution Metropolis moves (ter Braak 2006), which need no
tuning. Chosen over a Laplace approximation because early posteriors (two trials, ten unknowns) are not Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Density = Callable[[Array], Array]
MAX_STAGES = 24
MOVES_PER_STAGE = 3
LAST_MOVES = 9


def tempered_draws(
    prior: Array, log_prior: Density, log_likelihood: Density, rng: np.random.Generator
) -> Array:
    """Return draws from the posterior.

    Args:
        prior: (n, d) draws from the prior; n at least 4.
        log_prior: (n, d) -> (n,), up to a constant.
        log_likelihood: (n, d) -> (n,), finite.
        rng: source of randomness; same state, same draws.

    Returns:
        (n, d) draws, equally weighted.
    """
    draws, power = prior.copy(), 0.0
    likelihood = log_likelihood(draws)
    for _ in range(MAX_STAGES):
        step = _next_step(likelihood, 1.0 - power)
        power += step
        chosen = _resample(step * likelihood, rng)
        draws, likelihood = draws[chosen], likelihood[chosen]
        last = power >= 1.0 - 1e-9
        for _ in range(LAST_MOVES if last else MOVES_PER_STAGE):
            draws, likelihood = _move(draws, likelihood, power, log_prior, log_likelihood, rng)
        if last:
            break
    return draws


def _next_step(likelihood: Array, rest: float) -> float:
    """Largest increase of the power that keeps half of the particles effective, found by bisection."""
    half = 0.5 * len(likelihood)
    if _effective(rest * likelihood) >= half:
        return rest
    low, high = 0.0, rest
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _effective(middle * likelihood) >= half else (low, middle)
    return max(low, rest / 1e6)


def _effective(log_weights: Array) -> float:
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum())


def _resample(log_weights: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """Systematic resampling: indices, each about weight x n times."""
    weights = np.exp(log_weights - log_weights.max())
    count = len(weights)
    positions = (rng.random() + np.arange(count)) / count
    found = np.searchsorted(np.cumsum(weights) / weights.sum(), positions)
    return np.asarray(np.minimum(found, count - 1), dtype=np.int64)


def _move(
    draws: Array,
    likelihood: Array,
    power: float,
    log_prior: Density,
    log_likelihood: Density,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """One Metropolis step of every particle along the difference of two others."""
    count, dimensions = draws.shape
    first, second = rng.integers(count, size=(2, count))
    scale = 2.38 / np.sqrt(2 * dimensions) * rng.choice([1.0, 0.5, 0.2], size=(count, 1))
    jitter = 1e-3 * rng.standard_normal(draws.shape)
    proposal = draws + scale * (draws[first] - draws[second]) + jitter
    proposed = log_likelihood(proposal)
    gain = power * (proposed - likelihood) + log_prior(proposal) - log_prior(draws)
    accepted = np.log(rng.random(count)) < gain
    return np.where(accepted[:, None], proposal, draws), np.where(accepted, proposed, likelihood)
