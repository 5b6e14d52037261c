"""When a run that came to its end must not count, and when a precision is not the training that was asked for. Pure.

**fp16.** The gradient scaler starts at 2^16 and halves at every step whose gradients overflow, so up to 16 skipped steps are its search for a scale; one more
means that gradients overflow without any scaling. Then the format has no room for this model.

**Departure from fp32.** Computing in a format with unit roundoff `u` (half of the distance from 1 to the next number: bf16 2^-8, fp16 and tf32 2^-11)
changes each intermediate result by at most `u` relative. Roundings are independent to a good approximation, so `n` of them in a row add up to about
`u * sqrt(n)` where no step magnifies them (condition 1). `n = 256` is a network of some 25 layers with ten roundings in a row in each. Hence the bound

    mean |loss - loss in fp32|  <=  16 * u * mean |loss in fp32|,     bf16: 6.3 %, fp16 and tf32: 0.8 %

over the first steps, from the same weights, on the same samples, with the same optimizer and no dropout. A larger departure shows that the model magnifies
rounding: large terms that cancel, sums that overflow. Losses below `SMALL_LOSS` count as if they were as large: a cross entropy near zero
is the difference of nearly equal numbers, and rounds badly without harm. Not covered: what goes wrong only after thousands of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autofit.memory.replay import thrashes
from autofit.problem.config import Precision
from autofit.trials.measurement import Measurement
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord

MAX_SKIPPED_STEPS = 16
STEPS_OF_GROWTH = 2000  #: `growth_interval` of torch's GradScaler
UNIT_ROUNDOFF: Mapping[Precision, float] = {
    Precision.FP32: 2.0**-24,
    Precision.TF32: 2.0**-11,
    Precision.FP16: 2.0**-11,
    Precision.BF16: 2.0**-8,
    Precision.PURE_BF16: 2.0**-8,
}
ROUNDINGS = 256  #: in a row
SMALL_LOSS = 0.1


def unsound(measurement: Measurement) -> Failure | None:
    """Why a run that came to its end must not count, or None when it may.

    `facts` of the measurement: `asked` and `seen` are flat mappings with the same keys and comparable values (a key that is missing in `seen` was not
    observed), `alloc_retries_after_warmup` is the number of allocator retries in the measured steps. `optimizer_steps` includes the skipped ones.
    """
    facts = measurement.facts or {}
    if measurement.optimizer_steps < 1:
        return Failure(reason=Reason.ERROR, message="the run completed no optimizer step")
    differing = _differing(facts.get("asked") or {}, facts.get("seen") or {})
    if differing:
        return Failure(reason=Reason.KNOB_WITHOUT_EFFECT, message="; ".join(differing))
    return _skipping(measurement) or _not_finite(measurement) or _thrashing(measurement)


def departure_bound(precision: Precision) -> float:
    """Largest relative departure of the first losses from fp32 that rounding explains, see the module's derivation."""
    return math.sqrt(ROUNDINGS) * UNIT_ROUNDOFF[precision]


def departure(
    losses: Sequence[float], reference: Sequence[float], precision: Precision, *, skipped: Sequence[bool] = ()
) -> Failure | None:
    """Why `precision` is unsound for this training; None when rounding explains the difference.

    Args:
        losses: of the first optimizer steps, in `precision`.
        reference: of the same steps in fp32.
        skipped: which steps the gradient scaler skipped; what follows one is not compared, because its weights are others.

    Raises:
        ValueError: there is no step to compare.
    """
    count = min(len(losses), len(reference), _until_skipped(skipped))
    if count == 0:
        raise ValueError("no step can be compared")
    ours, theirs = losses[:count], reference[:count]
    if not all(math.isfinite(x) for x in theirs):
        return None  # fp32 itself is not sound: its own trial says so
    if not all(math.isfinite(x) for x in ours):
        message = f"in {precision} the loss is not finite where it is {statistics.fmean(theirs):.4g} in fp32"
        return Failure(reason=Reason.DEPARTS_FROM_FP32, message=message)
    relative, bound = relative_departure(ours, theirs), departure_bound(precision)
    if relative <= bound:
        return None
    message = (
        f"in {precision} the loss of the first {count} steps is {100 * relative:.3g} % off fp32's ({statistics.fmean(ours):.4g} instead of "
        f"{statistics.fmean(theirs):.4g}); rounding explains {100 * bound:.3g} %"
    )
    return Failure(reason=Reason.DEPARTS_FROM_FP32, message=message)


def relative_departure(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Mean distance over the mean size of the reference (at least `SMALL_LOSS`)."""
    size = max(SMALL_LOSS, statistics.fmean(abs(x) for x in reference))
    return statistics.fmean(abs(a - b) for a, b in zip(losses, reference)) / size


def departed(records: Iterable[TrialRecord]) -> frozenset[Precision]:
    """Precisions that were found to depart from fp32: no configuration in them is sound. fp32 cannot depart from itself."""
    return frozenset(
        r.config.precision
        for r in records
        if r.config.precision is not Precision.FP32
        and r.outcome is Outcome.INFEASIBLE and r.failure is not None and r.failure.reason is Reason.DEPARTS_FROM_FP32
    )


def _until_skipped(skipped: Sequence[bool]) -> int:
    """Steps whose losses come from weights that were updated alike: the first skipped one is the last of them."""
    return list(skipped).index(True) + 1 if True in skipped else max(len(skipped), 1 << 30)


def _skipping(measurement: Measurement) -> Failure | None:
    skipped, steps = measurement.skipped_steps, measurement.optimizer_steps
    if skipped >= steps:
        message = f"all {steps} optimizer steps were skipped: gradients overflow in fp16"
        return Failure(reason=Reason.ALL_STEPS_SKIPPED, message=message)
    if skipped > MAX_SKIPPED_STEPS + steps // STEPS_OF_GROWTH:
        message = (
            f"{skipped} of {steps} optimizer steps were skipped: {MAX_SKIPPED_STEPS} bring the loss scale from 65536 to 1, "
            "so that gradients overflow in fp16 without any scaling"
        )
        return Failure(reason=Reason.STEPS_SKIPPED, message=message)
    return None


def _not_finite(measurement: Measurement) -> Failure | None:
    bad = [i for i, loss in enumerate(measurement.losses, start=1) if not math.isfinite(loss)]
    if not bad:
        return None
    message = f"the loss is not finite from optimizer step {bad[0]} ({len(bad)} of {len(measurement.losses)})"
    return Failure(reason=Reason.NON_FINITE_LOSS, message=message)


def _thrashing(measurement: Measurement) -> Failure | None:
    retries, steps = (measurement.facts or {}).get("alloc_retries_after_warmup") or 0, len(measurement.update_seconds)
    if not thrashes(retries, steps):
        return None
    message = f"the allocator freed its cache and tried again {retries} times in {steps} optimizer steps: too close to the limit"
    return Failure(reason=Reason.ALLOCATOR_THRASH, message=message)


def _differing(asked: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: asked for {asked[name]!r}, the run had {seen[name]!r}"
        for name in asked
        if name in seen and asked[name] != seen[name]
    ]
