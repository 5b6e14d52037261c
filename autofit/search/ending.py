"""Why a search ends without an answer: every trial failed, or nothing fits. Pure; decided from records."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autofit.beliefs.predict import dominates, is_memory_failure
from autofit.errors import AutofitError, NothingFits, SearchFailed, UserError
from autofit.trials.soundness import departed
from autofit.trials.trial import OUTSIDE, SCRIPT_PHASE, Failure, Outcome, Reason, TrialRecord
from autofit.units import format_bytes


def all_failed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Every trial that ran to an end of its own, if all of them failed; else none."""
    ended = [r for r in records if r.outcome is not Outcome.SKIPPED and not r.interrupted]
    return ended if all(r.outcome is Outcome.FAILED for r in ended) else []


def alike(records: Sequence[TrialRecord]) -> bool:
    """Whether all of them failed in the same way."""
    return len({signature(r.failure) for r in records if r.failure is not None}) == 1


def signature(failure: Failure) -> tuple[str, str]:
    """What makes two failures alike: the reason and the message without its numbers."""
    return failure.reason.value, re.sub(r"\d+", "#", failure.message)


def nothing_completed(
    records: Sequence[TrialRecord],
    *,
    stopped: str,
    left: int,
    effective_batch: int,
    limit_bytes: int,
    predicted_bytes: Sequence[int],
) -> AutofitError:
    """The error for a search in which no configuration completed that may win.

    Args:
        records: all trials.
        stopped: why the search ended.
        left: configurations that may still run.
        effective_batch, limit_bytes, predicted_bytes: see `nothing_fits`.
    """
    failed = all_failed(records)
    if failed:
        return search_failed(failed)
    if left:
        return UserError(
            f"{stopped}, and {what_completed(records)}; {left} configurations were not tried",
            hint="give it more --trials or --timeout, or smaller batches with --batch-size",
        )
    return (
        nothing_sound(records, limit_bytes=limit_bytes)
        or broken(records, limit_bytes=limit_bytes)
        or nothing_fits(records, effective_batch=effective_batch, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes)
    )


def what_completed(records: Sequence[TrialRecord]) -> str:
    """What became of the trials that completed, where none of them is an answer, as a part of a sentence."""
    completed = {r.config for r in records if r.outcome is Outcome.COMPLETED and r.why != OUTSIDE}
    outside = any(r.outcome is Outcome.COMPLETED and r.why == OUTSIDE for r in records)
    if not completed:
        return f"no trial completed{' but baselines that were not asked for' if outside else ''}"
    lost = [r for r in records if r.outcome is Outcome.INFEASIBLE and (r.config in completed or r.config.precision in departed(records))]
    first = next((f": {r.config.label()}: {r.failure.message}" for r in lost if r.failure is not None), "")
    many = f"none of the {len(completed)} configurations that completed held" if len(completed) > 1 else "the only configuration that completed did not hold"
    return f"{many} when run again or checked{first}"


def search_failed(failed: Sequence[TrialRecord]) -> AutofitError:
    """The error for trials (at least one) that all failed; it keeps the traceback of the first. What all of them refused is the user's mistake."""
    first = failed[0].failure
    assert first is not None
    if _all_refused(failed):
        return UserError(first.message, hint=first.hint)
    who = "the only trial failed" if len(failed) == 1 else f"all {len(failed)} trials failed"
    who += " alike" if len(failed) > 1 and alike(failed) else ""
    return _failed(who, first)


def _all_refused(failed: Sequence[TrialRecord]) -> bool:
    return all(r.failure is not None and r.failure.refused for r in failed)


def _failed(who: str, failure: Failure) -> SearchFailed:
    hint = "the traceback is the training's own: fix what it says, then search again"
    if not (failure.traceback or failure.log_tail):
        hint = "search other configurations: --precision, --optim and --checkpointing choose"
    if failure.reason is Reason.KNOB_WITHOUT_EFFECT:
        hint = "something else than the arguments decides it (a Trainer's own code, accelerator_config): leave it to them"
    if failure.reason is Reason.TIMEOUT:
        hint = "give trials more time with --trial-timeout, or search a smaller model"
        if failure.phase == SCRIPT_PHASE:
            hint = "the script takes longer than that before it trains: give trials more time with --trial-timeout, or have it keep what it prepares"
    return SearchFailed(f"{who}: {failure.message}", traceback=failure.traceback or failure.log_tail or "", hint=hint)


def broken(records: Sequence[TrialRecord], *, limit_bytes: int) -> AutofitError | None:
    """The error where the training itself failed in configurations that may well have fitted; None where memory alone is the cause. What all of them refused is the user's mistake."""
    too_large = {r.config for r in records if is_memory_failure(r)}
    failed = [
        r
        for r in records
        if r.outcome is Outcome.FAILED and r.failure is not None and not r.interrupted
        if not any(dominates(r.config, smaller) for smaller in too_large)
    ]
    if not failed or failed[0].failure is None:
        return None
    if not too_large and _all_refused(failed):
        return UserError(failed[0].failure.message, hint=failed[0].failure.hint)
    misfits = f"{len(too_large)} did not fit into {format_bytes(limit_bytes)}, " if too_large else ""
    return _failed(f"{what_completed(records)}: {misfits}{len({r.config for r in failed})} failed", failed[0].failure)


def nothing_sound(records: Sequence[TrialRecord], *, limit_bytes: int) -> SearchFailed | None:
    """The error where configurations ran and fitted, and none of them trained soundly; None where none did."""
    unsound = [r for r in records if r.outcome is Outcome.INFEASIBLE and not is_memory_failure(r)]
    if not unsound or unsound[0].failure is None:
        return None
    first, misfits = unsound[0].failure, len({r.config for r in records if is_memory_failure(r)})
    which = f"that fits into {format_bytes(limit_bytes)} " if misfits else ""
    hint = "allow --precision fp32" if first.reason is Reason.DEPARTS_FROM_FP32 else "look at the loss of this training in fp32 first"
    return SearchFailed(f"no configuration {which}trains soundly: {first.message}", traceback="", hint=hint)


def nothing_fits(
    records: Sequence[TrialRecord], *, effective_batch: int, limit_bytes: int, predicted_bytes: Sequence[int]
) -> NothingFits:
    """The error for a limit that nothing fits.

    Args:
        records: all trials.
        effective_batch, limit_bytes: for the message.
        predicted_bytes: of the configurations that have a prediction.
    """
    return NothingFits(
        f"no configuration fits into {format_bytes(limit_bytes)} at effective batch {effective_batch}",
        shortfall_bytes=shortfall(records, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes),
        hint="what helps: a shorter --seq-len, --checkpointing both, adafactor or an 8-bit optimizer, or a smaller model",
    )


def shortfall(
    records: Sequence[TrialRecord], *, limit_bytes: int, predicted_bytes: Sequence[int]
) -> int | None:
    """The smallest number of bytes that are predicted to be missing, or that the device refused; None when unknown."""
    if predicted_bytes and min(predicted_bytes) > limit_bytes:
        return min(predicted_bytes) - limit_bytes
    asked = [
        r.failure.requested_bytes for r in records if r.failure is not None and r.failure.requested_bytes
    ]
    return min(asked) if asked else None
