"""What the user would have run without us: plain defaults, and the recipe of a careful hand. Both at the exact effective batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autofit.beliefs.predict import is_memory_failure
from autofit.problem.arguments import CHECKPOINTING_NAMES, DEFAULT_BATCH
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import divisors
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord

FIRST_GUESS = 32  #: where a hand starts when it knows nothing of memory


def plain_defaults(
    effective_batch: int, optim: str, defaults: Mapping[str, Any] = MappingProxyType({}), *, weights_dtype: str | None = None
) -> TrialConfig:
    """TrainingArguments as they come: batch 8 (or the largest divisor below), the weights' own precision, no checkpointing, the default optimizer.

    Args:
        effective_batch: samples per optimizer step.
        optim: the default optimizer.
        defaults: of the user's own class of arguments: TRL's train in bf16 with checkpointing unless told otherwise.
        weights_dtype: of the user's own model; None where autofit builds it (float32).
    """
    batch = defaults.get("per_device_train_batch_size") or DEFAULT_BATCH
    size = max(d for d in divisors(effective_batch) if d <= batch)
    unforced = Precision.PURE_BF16 if weights_dtype == "bfloat16" else Precision.FP32
    return TrialConfig(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=effective_batch // size,
        gradient_checkpointing=any(bool(defaults.get(name)) for name in CHECKPOINTING_NAMES),
        precision=next((Precision(name) for name in ("bf16", "fp16", "tf32") if defaults.get(name)), unforced),
        optim=optim,
    )


def hand_recipe_sizes(effective_batch: int) -> tuple[int, ...]:
    """The powers of two that divide the effective batch, ascending."""
    return tuple(d for d in divisors(effective_batch) if d & (d - 1) == 0)


def half_precision(native: Sequence[Precision]) -> Precision:
    """bf16 where the device has it, else fp16, else fp32."""
    return next((p for p in (Precision.BF16, Precision.FP16) if p in native), Precision.FP32)


def hand_recipe(effective_batch: int, size: int, precision: Precision, optim: str) -> TrialConfig:
    """Half precision, no checkpointing, the default optimizer, batch `size`."""
    return TrialConfig(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=effective_batch // size,
        precision=precision,
        optim=optim,
    )


def next_hand_recipe(
    recipes: Sequence[TrialConfig],
    records: Sequence[TrialRecord],
    *,
    too_big: Callable[[TrialConfig], bool],
    likely: Callable[[TrialConfig], bool | None],
) -> TrialConfig | None:
    """The next size to try so that the largest power of two that fits becomes known; None when it is.

    With a prediction the hand starts at the largest size that is likely to fit, and goes on to the next as long as it may fit;
    without one it starts at `FIRST_GUESS`, then doubles or halves.

    Args:
        recipes: one configuration per power of two, ascending by batch size.
        records: all trials so far.
        too_big: whether a configuration cannot fit (predicted, or no less than one that did not).
        likely: whether it is expected to fit; None = not known.
    """
    fitting = [c for c in recipes if _outcome(c, records) is Outcome.COMPLETED]
    above = fitting[-1].per_device_train_batch_size if fitting else 0
    open_sizes = []
    for config in recipes:
        if _outcome(config, records) in (Outcome.INFEASIBLE, Outcome.FAILED, Outcome.SKIPPED) or too_big(
            config
        ):
            break  # no larger one is worth a trial
        if config.per_device_train_batch_size > above:
            open_sizes.append(config)
    if not open_sizes:
        return None
    if any(likely(c) is not None for c in open_sizes):
        expected = [c for c in open_sizes if likely(c)]
        if expected:
            return expected[-1]
        return open_sizes[0] if not fitting or likely(open_sizes[0]) is None else None
    if fitting:
        return open_sizes[0]
    return min(open_sizes, key=lambda c: abs(c.per_device_train_batch_size - FIRST_GUESS))


def settled_hand_recipe(recipes: Sequence[TrialConfig], records: Sequence[TrialRecord]) -> TrialConfig | None:
    """The largest power of two that is known to fit; None when none is."""
    fitting = [c for c in recipes if _outcome(c, records) is Outcome.COMPLETED]
    return fitting[-1] if fitting else None


def why_no_hand_recipe(
    recipes: Sequence[TrialConfig],
    records: Sequence[TrialRecord],
    *,
    skipped: Callable[[TrialConfig], Failure | None],
) -> str | None:
    """Why no power of two is known to fit; None when one is.

    Args:
        recipes: ascending by batch size; none where a recorded grid lacks them.
        records: all trials.
        skipped: why a configuration need not run, by all records.
    """
    if not recipes:
        return "none of it is in the recorded grid"
    if settled_hand_recipe(recipes, records) is not None:
        return None
    failures = [r.failure for r in records if r.config in recipes and r.failure is not None and not r.interrupted]
    smallest = [r for r in records if r.config == recipes[0]]
    reason = skipped(recipes[0])
    if any(is_memory_failure(r) for r in smallest) or (reason is not None and reason.reason in (Reason.PREDICTED_TOO_BIG, Reason.DOMINATED)):
        least = recipes[0].per_device_train_batch_size
        if least > 1:
            return f"without checkpointing batch {least} does not fit, and no smaller power of two is searched"
        return "no power of two fits without checkpointing"
    other = [f.message for f in failures if f.reason not in (Reason.OUT_OF_MEMORY, Reason.SUSPECTED_OUT_OF_MEMORY, Reason.ALLOCATOR_THRASH)]
    return other[0] if other else "was not run" if reason is None else reason.message


def _outcome(config: TrialConfig, records: Sequence[TrialRecord]) -> Outcome | None:
    """What all runs of `config` say: infeasible in any is infeasible; a run that completed outweighs one that failed."""
    outcomes = [r.outcome for r in records if r.config == config and not r.interrupted]
    for outcome in (Outcome.INFEASIBLE, Outcome.COMPLETED):
        if outcome in outcomes:
            return outcome
    return outcomes[0] if outcomes else None
