"""A Gaussian belief over the cells of a table, conditioned on noisy sightings of some of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autofit.beliefs.posterior import Array

Indices = NDArray[np.int64]
Cell = TypeVar("Cell", bound=Hashable)
_RIDGE = 1e-9


def cells_of(keys: Sequence[Cell]) -> tuple[list[Cell], Indices]:
    """Distinct keys in order of appearance, and the position of each key among them."""
    position: dict[Cell, int] = {}
    index = [position.setdefault(key, len(position)) for key in keys]
    return list(position), np.array(index, dtype=np.int64)


def same(labels: Sequence[Hashable]) -> Array:
    """(m, m) matrix: 1 where two labels are equal, else 0."""
    _, index = cells_of(labels)
    return np.asarray(index[:, None] == index[None, :], dtype=np.float64)


class GaussianCells:
    """A joint normal prior over `m` cells.

    Args:
        mean: (m,) prior mean.
        covariance: (m, m), symmetric, positive semi-definite.
    """

    def __init__(self, mean: Array, covariance: Array) -> None:
        self._mean = mean
        self._covariance = covariance
        ridge = _RIDGE * float(np.trace(covariance)) / max(1, len(mean))
        self._root = np.linalg.cholesky(covariance + ridge * np.eye(len(mean)))

    def draws(self, rows: Indices, seen: Array, count: int, rng: np.random.Generator) -> Array:
        """Return (count, m) draws given sightings (Matheron's rule: a prior draw, moved by its own error).

        Args:
            rows: (k,) the cell of each sighting; a cell may be seen more than once.
            seen: (k, 2) value and standard error.
            count: number of draws.
            rng: source of randomness.
        """
        sample = self._mean + rng.standard_normal((count, len(self._mean))) @ self._root.T
        if not len(rows):
            return np.asarray(sample, dtype=np.float64)
        noisy = sample[:, rows] + seen[:, 1] * rng.standard_normal((count, len(rows)))
        joint = self._covariance[np.ix_(rows, rows)] + np.diag(seen[:, 1] ** 2 + _RIDGE)
        moved = np.linalg.solve(joint, (seen[:, 0] - noisy).T).T
        return np.asarray(sample + moved @ self._covariance[rows], dtype=np.float64)
