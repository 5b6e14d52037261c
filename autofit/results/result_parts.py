"""Parts of a result: warnings, baselines, and what the search cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.kinds import check_numbers
from autofit.problem.config import TrialConfig
from autofit.trials.estimates import Estimate
from autofit.trials.lengths import LengthSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something the user should know: a stable code, one sentence, and what to do next (None: nothing)."""

    code: str
    message: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the user would have had: `estimate` is None when it did not fit (`note` says so)."""

    config: TrialConfig | None
    estimate: Estimate | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON for the result file."""
        return {
            "config": self.config.to_json() if self.config else None,
            "estimate": self.estimate.to_json() if self.estimate else None,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baseline:
        """Inverse of `to_json`."""
        return cls(
            config=TrialConfig.from_json(data["config"]) if data["config"] else None,
            estimate=Estimate.from_json(data["estimate"]) if data["estimate"] else None,
            note=data["note"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the search cost.

    Attributes:
        seconds: wall time of the search, imports and predictions included.
        device_seconds: of it, in trials.
        trials: trials that ran (play-off and confirmation not counted).
        out_of_memory: of them, those that did not fit.
        break_even_hours: per baseline: hours of training with the answer after which the search has paid for itself; None
            where the answer is not faster.
        predicting_seconds: of `seconds`, on traces before the first trial.
        compile_seconds: what the answer spends on compilation when a training begins; it counts in the break-even, not in the speed.
    """

    seconds: float
    device_seconds: float
    trials: int
    out_of_memory: int
    break_even_hours: Mapping[str, float | None] = field(default_factory=dict)
    compile_seconds: float = 0.0
    predicting_seconds: float = 0.0


OBJECTS = ("speedup", "software", "model", "data", "untested", "certificate", "soundness", "numerics", "argument_defaults")


def check_parts(data: Mapping[str, Any]) -> None:
    """Check those parts of a result's JSON that are kept as they come.

    Raises:
        TypeError, KeyError, ValueError: one of them is of another kind, lacks a field, or holds a number that is none.
    """
    check_numbers(data)
    for name in OBJECTS:
        if not isinstance(data.get(name) or {}, Mapping):
            raise TypeError(f"{name} is no object")
    if not all(isinstance(removal, Mapping) and {"knob", "value", "reason"} <= set(removal) for removal in data["removals"]):
        raise TypeError("removals hold something that is none")
    limit = data["memory_limit_bytes"]
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise TypeError(f"memory_limit_bytes is {limit!r}")
    if any(isinstance(value, int | float) and value < 0 for value in data["cost"].values()):
        raise ValueError(f"a part of the cost is {min(v for v in data['cost'].values() if isinstance(v, int | float))}")
    if any(ratio is not None and not ratio > 0 for ratio in data["speedup"].values()):
        raise ValueError(f"a speedup is {min(r for r in data['speedup'].values() if r is not None)}")
    for contender in (data["certificate"] or {}).get("contenders") or ():
        interval = contender["interval"]
        numbers = (interval["low"], interval["high"], contender["fit_probability"], contender["beats_probability"])
        if "config" not in contender or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            raise TypeError(f"a contender of the certificate is {contender!r}")
    if data.get("data"):
        LengthSummary.from_json(data["data"]["lengths"])
