"""Memory learned from trials alone, for a model that nobody can predict.

    needed = context + offset + max(forward, update) + own overhead of the optimizer
    forward = W (1 + state + gradients + casts) + activations x batch        update = W (2 + state + transient)

`W` (weights in fp32) and the activations of one sample are unknown and found by the trials; how they change with precision,
checkpointing and optimizer has physical priors: state is 2 W for Adam, about 0.5 W in 8 bit, next to nothing for Adafactor;
gradients are kept whole from accumulation 2 on; 16 bit activations take about 0.6; checkpointing leaves a fifth, give or take a factor
of three. An out-of-memory is an observation too: at least the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.beliefs.posterior import Array, tempered_draws
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import memory_prior

PARTICLES = 128
SEEN_ERROR, UNSEEN_ERROR = 0.025, 0.08  # relative error of the form, in classes with and without a trial
_SIXTEEN = (Precision.BF16, Precision.FP16)
# By part of the optimizer's name: state and update's transient in units of the weights, and the log spread of the state.
_STATES = {
    "adafactor": (0.03, 0.3, 0.5),
    "8bit": (0.55, 0.1, 0.25),
    "4bit": (0.3, 0.1, 0.3),
    "fused": (2.0, 0.05, 0.05),
    "adamw_torch": (2.0, 0.7, 0.05),
    "adamw": (2.0, 0.2, 0.1),
    "sgd": (0.03, 0.3, 0.5),
    "lion": (1.0, 0.1, 0.1),
}
_STATE_UNKNOWN = (1.0, 0.3, 0.7)
#: Log, in units of the limit: what an optimizer takes beside state and transient (its kernels, a library's own buffers): next to nothing, as
#: far as nothing contradicts it.
_OVERHEAD = (math.log(0.003), 1.5)
_UNKNOWNS = {
    "weights": (math.log(0.04), 1.3),  # log, in units of the limit
    "activations": (math.log(0.01), 1.8),  # log, of one sample in fp32, in units of the limit
    "offset": (math.log(0.01), 1.0),  # log, in units of the limit
    "half": (math.log(0.6), 0.12),
    "pure": (math.log(0.5), 0.12),
    "checkpointed": (math.log(0.2), 0.6),
    "casts": (math.log(0.5), 0.3),
    "early_gradients": (0.0, 1.0),  # logit: share of the gradients alive at the peak of a single micro-step
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySighting:
    """What a trial showed: bytes taken with the context in them, or None when it did not fit."""

    config: TrialConfig
    needed_bytes: int | None
    context_bytes: int = 0


class LearnedMemory:
    """The form above over a fixed list of configurations."""

    def __init__(self, configs: Sequence[TrialConfig]) -> None:
        self._row = {config: row for row, config in enumerate(configs)}
        self._batch = np.array([float(c.per_device_train_batch_size) for c in configs])
        self._accumulates = np.array([float(c.gradient_accumulation_steps > 1) for c in configs])
        self._checkpointing = np.array([float(c.gradient_checkpointing) for c in configs])
        self._half = np.array([float(c.precision in _SIXTEEN) for c in configs])
        self._pure = np.array([float(c.precision is Precision.PURE_BF16) for c in configs])
        self._optims = list(dict.fromkeys(c.optim for c in configs))
        self._optim = np.array([self._optims.index(c.optim) for c in configs])
        self._facts = np.array([optimizer_memory(o) for o in self._optims]).reshape(-1, 3)
        values = dict.fromkeys(pair for c in configs for pair in c.extra)
        self._extras = np.array([[float(v in c.extra) for v in values] for c in configs]).reshape(
            len(configs), -1
        )
        self._classes = [(c.precision, c.gradient_checkpointing, c.extra) for c in configs]
        spread = [*_UNKNOWNS.values(), *((0.0, float(s)) for s in self._facts[:, 2])]
        spread += [memory_prior(pair) for pair in values]
        spread += [_OVERHEAD] * len(self._optims)
        self._means = np.array([m for m, _ in spread])
        self._spreads = np.array([s for _, s in spread])

    def fit_probability(
        self, sightings: Sequence[MemorySighting], limit_bytes: int, rng: np.random.Generator
    ) -> Array:
        """Return (configs,) probability that each needs at most `limit_bytes`."""
        context = max((s.context_bytes for s in sightings), default=0)
        limit = max(1, limit_bytes - context)
        particles = self._means + self._spreads * rng.standard_normal((PARTICLES, len(self._means)))
        if sightings:
            rows = np.array([self._row[s.config] for s in sightings])
            full = np.array([s.needed_bytes is None for s in sightings])
            taken = [limit if s.needed_bytes is None else s.needed_bytes - s.context_bytes for s in sightings]
            logs = np.log(np.maximum(1.0, np.array(taken, dtype=np.float64)) / limit)

            def likelihood(theta: Array) -> Array:
                rest = (logs - self._log_needed(theta, rows)) / SEEN_ERROR
                return np.asarray(
                    np.where(full, _log_tail(rest), -0.5 * rest**2).sum(axis=1), dtype=np.float64
                )

            particles = tempered_draws(
                particles,
                lambda theta: -0.5 * (((theta - self._means) / self._spreads) ** 2).sum(axis=1),
                likelihood,
                rng,
            )
        seen = {self._classes[self._row[s.config]] for s in sightings}
        error = np.array([SEEN_ERROR if c in seen else UNSEEN_ERROR for c in self._classes])
        margin = -self._log_needed(particles, np.arange(len(self._batch))) / error
        return np.asarray(
            (1.0 / (1.0 + np.exp(-1.702 * np.clip(margin, -40, 40)))).mean(axis=0), dtype=np.float64
        )

    def _log_needed(self, theta: Array, rows: np.ndarray) -> Array:
        """(particles, rows) log of what is needed without the context, in units of the limit."""
        at = {name: theta[:, column][:, None] for column, name in enumerate(_UNKNOWNS)}
        first = len(_UNKNOWNS)
        optim = self._optim[rows]
        state = self._facts[optim, 0] * np.exp(theta[:, first + optim])
        transient = self._facts[optim, 1]
        half, pure, keeps = self._half[rows], self._pure[rows], self._accumulates[rows]
        early = 1.0 / (1.0 + np.exp(-at["early_gradients"]))
        gradients = keeps + (1.0 - keeps) * early
        shrunk = 1.0 - 0.5 * pure
        static = np.exp(at["weights"]) * (shrunk * (1.0 + state + gradients) + half * np.exp(at["casts"]))
        sample = at["activations"] + at["half"] * half + at["pure"] * pure
        sample = sample + at["checkpointed"] * self._checkpointing[rows]
        for number in range(self._extras.shape[1]):
            sample = (
                sample + theta[:, first + len(self._optims) + number][:, None] * self._extras[rows, number]
            )
        forward = static + np.exp(np.minimum(sample, 50.0)) * self._batch[rows]
        update = np.exp(at["weights"]) * shrunk * (2.0 + state + transient)
        own = np.exp(np.minimum(theta[:, -len(self._optims) :][:, optim], 1.0))
        return np.asarray(np.log(np.maximum(forward, update) + np.exp(at["offset"]) + own), dtype=np.float64)


def optimizer_memory(optim: str) -> tuple[float, float, float]:
    """State and update's transient in units of the fp32 weights, and the log spread of the state, by the optimizer's name."""
    for part, facts in _STATES.items():
        if part in optim:
            return facts
    return _STATE_UNKNOWN


def _log_tail(values: Array) -> Array:
    """Log of the normal probability above `values` (logistic approximation, exact to 0.01; linear tail)."""
    return np.asarray(
        -np.logaddexp(0.0, 1.5976 * values + 0.07056 * np.clip(values, -8, 8) ** 3), dtype=np.float64
    )
