"""What bounds a search, and what it ends with before it is dressed as a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.problem.config import Precision, TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What bounds a search.

    Attributes:
        effective_batch: exact.
        memory_limit_bytes: enforced in each trial.
        trials, timeout_seconds, trial_timeout_seconds: budgets; None = none.
        tolerance: relative speed difference that does not matter.
        seed: of trials and of draws.
        native_precisions: of the device, for the hand recipe.
        default_optim: of the installed TrainingArguments.
        argument_defaults: of the class of arguments that the user trains with, for the plain baseline.
        weights_dtype: of the user's own model, for the same; None where autofit builds it.
        spent_seconds: of `timeout_seconds`, before the search begins.
        baselines_outside_space: run a baseline that the user's restrictions excluded (a recorded grid cannot).
    """

    effective_batch: int
    memory_limit_bytes: int
    trials: int | None = None
    timeout_seconds: float | None = None
    trial_timeout_seconds: float | None = None
    tolerance: float = 0.01
    seed: int = 0
    native_precisions: tuple[Precision, ...] = (Precision.FP32,)
    default_optim: str = "adamw_torch_fused"
    argument_defaults: Mapping[str, Any] = field(default_factory=dict)
    weights_dtype: str | None = None
    spent_seconds: float = 0.0
    baselines_outside_space: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a search ends with, before it is dressed as a result.

    Attributes:
        winner: the configuration that won.
        tied: keys of configurations that are not slower beyond the noise.
        confirmed: whether the winner passed its confirmation.
        stopped: why the search ended, one sentence.
        interrupted: whether the user ended it.
        seconds: wall time.
        hand_recipe: the largest power of two known to fit; None when none.
        no_recipe: why there is none.
        settled: whether the play-off went on until no other was faster by more than the tolerance, or to its last round.
    """

    winner: TrialConfig
    tied: tuple[TrialConfig, ...]
    confirmed: bool
    stopped: str
    interrupted: bool
    seconds: float
    hand_recipe: TrialConfig | None
    no_recipe: str | None = None
    settled: bool = True
