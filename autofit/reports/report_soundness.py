"""What the soundness check found, in one sentence of the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.problem.config import Precision
from autofit.results.checking import SPLIT_TOLERANCE
from autofit.trials.soundness import departure_bound


def checked_sentence(found: Mapping[str, Any], winner: Precision) -> str | None:
    """Return what was compared, with its figures; None where nothing had to be, or where a warning says it.

    Args:
        found: `TuneResult.soundness`.
        winner: the winner's precision; figures of another one, which was refused, are in the table of trials.
    """
    parts = []
    split = [found.get(name) for name in ("split_loss_difference", "split_gradient_difference")]
    if all(value is not None for value in split):
        worst = max(value for value in split if value is not None)
        if worst <= SPLIT_TOLERANCE:
            parts.append(f"one batch in one piece and in micro-batches agree to {_percent(worst)} in loss and gradient norm")
    off = found.get("precision_loss_difference")
    if off is not None and found.get("precision") == str(winner):
        parts.append(f"{winner} starts {_percent(off)} off the losses of fp32 (rounding explains {_percent(departure_bound(winner))})")
    if not parts:
        reason = found.get("skipped")
        return None if reason is None else f"Soundness was not checked: {reason}."
    return f"Checked: {'; '.join(parts)}."


def _percent(share: float) -> str:
    return "less than 0.001 %" if share < 1e-5 else f"{100 * share:.3g} %"
