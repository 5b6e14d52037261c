"""Sizes of the batches that the model really got: rows, padded and real tokens, counted without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCount:
    """One micro-step's batch.

    Attributes:
        rows: samples in it.
        length: tokens of its longest row, padding included.
        padded: tokens, padding included.
        real: tokens that are not padding.
    """

    rows: int
    length: int
    padded: float
    real: float


class TokenCounter:
    """Counts the batches of one optimizer step; only batches with `input_ids` or a two-dimensional mask have tokens.

    Args:
        rows: samples per batch: packed rows arrive as one, and pairs of answers (DPO) as two each.
    """

    def __init__(self, rows: int | None = None) -> None:
        self._rows = rows
        self._open: list[tuple[int, int, int, torch.Tensor | int]] = []

    def note(self, inputs: Any) -> None:
        """Look at the inputs of a micro-step. The mask is summed on the device; nobody waits for it here."""
        if not hasattr(inputs, "get"):
            return
        mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
        if torch.is_tensor(mask) and mask.ndim == 2:
            real: torch.Tensor | int = mask.detach().sum()
            shape = mask.shape
        elif torch.is_tensor(ids) and ids.ndim == 2:
            real, shape = ids.numel(), ids.shape
        else:
            return
        reshaped = self._rows is not None and shape[0] in (1, 2 * self._rows)
        self._open.append((self._rows if reshaped and self._rows else int(shape[0]), int(shape[1]), int(shape.numel()), real))

    def close(self) -> list[BatchCount]:
        """The counts since the last call; waits for the device."""
        found = [BatchCount(rows=r, length=n, padded=p, real=float(real)) for r, n, p, real in self._open]
        self._open = []
        return found


def tokens_per_sample(counts: Sequence[BatchCount]) -> float | None:
    """Mean non-padding tokens per sample; None without a count."""
    rows = sum(count.rows for count in counts)
    return sum(count.real for count in counts) / rows if rows else None


def padding_share(counts: Sequence[BatchCount]) -> float | None:
    """Share of the tokens that are padding; None without a count."""
    padded = sum(count.padded for count in counts)
    return 1.0 - sum(count.real for count in counts) / padded if padded else None
