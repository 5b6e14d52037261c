"""The lines of a report about what was run on the winner when the search had ended: its data loader and its evaluation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.problem.config import Scalar, TrialConfig
from autofit.results.evaluation import Evaluation
from autofit.results.loader import gain, kept_settings, lost_settings, wait_share, without_settings
from autofit.results.result import TuneResult
from autofit.results.wording import format_factor, format_speed
from autofit.trials.trial import EVAL_BATCH, Outcome, Role, TrialRecord
from autofit.units import format_bytes


def after_lines(result: TuneResult) -> list[str]:
    """One sentence on the loader and one on the evaluation, where they were tried."""
    return [line for line in (loader_line(result), evaluation_line(result.evaluation)) if line is not None]


def loader_line(result: TuneResult) -> str | None:
    """Whether the loader held the winner back, and what helped; None where nothing was tried."""
    tried = [r for r in result.trials if r.role is Role.LOADER]
    if not tried:
        return None
    winner = result.best.config
    waited = f"waiting for data took {_share(without_settings(winner), result):.0%} of the winner's time".replace("%", " %")
    kept = kept_settings(winner)
    if kept:
        settings, faster = _listed(kept), gain(winner, result.trials)
        if faster is None:
            return f"Loader: {waited}; {settings} is part of the answer."
        before = format_speed(result.best.samples_per_second / faster)
        return f"Loader: {waited}; with {settings} it is {format_factor(faster)} as fast ({before} samples/s without)."
    lost = lost_settings(winner, result.trials)
    if lost is not None:
        return f"Loader: {waited}; with {_listed(lost.settings)} it was {format_factor(lost.factor)} as fast, but {lost.cause}."
    measured = [_said(r) for r in tried if r.outcome is Outcome.COMPLETED]
    failed = [_said(r) for r in tried if r.failure is not None and not r.interrupted]
    slow = [f"none of the settings measured was faster beyond the noise ({', '.join(measured)})"] if measured else []
    broken = [f"{', '.join(failed)} did not work (see the warnings)"] if failed else []
    unknown = [f"no setting that may help could be measured ({', '.join(_said(r) for r in tried)})"]
    return f"Loader: {'; '.join([waited, *((slow + broken) or unknown)])}."


def evaluation_line(evaluation: Evaluation | None) -> str | None:
    """Whether evaluation fits, at which batch; None where it was not tried."""
    if evaluation is None:
        return None
    if evaluation.fits is None:
        why = "failed (see the warnings)" if evaluation.failure else "does not fit, nor does any smaller batch that was tried"
        return f"Evaluation: {EVAL_BATCH}={evaluation.asked} {why}."
    kept = ", only the loss kept" if evaluation.loss_only else ""
    needed = "" if evaluation.peak_bytes is None else f": {format_bytes(evaluation.peak_bytes)} with the training state{kept}"
    if evaluation.fits == evaluation.asked:
        return f"Evaluation: {EVAL_BATCH}={evaluation.asked} fits too{needed}."
    return f"Evaluation: {EVAL_BATCH}={evaluation.asked} does not fit, {evaluation.fits} does{needed}."


def after_trials(result: TuneResult) -> int:
    """Trials that were run on the winner when the search had ended, its last confirmation among them."""
    attempts = len(result.evaluation.attempts) if result.evaluation is not None else 0
    return attempts + sum(r.after_search for r in result.trials)


def _share(base: TrialConfig, result: TuneResult) -> float:
    own = [r for r in result.trials if r.config == base and r.role is not Role.CONFIRMATION and r.outcome is Outcome.COMPLETED]
    return wait_share(own[-1]) if own else 0.0


def _said(record: TrialRecord) -> str:
    return _listed(kept_settings(record.config), " ")


def _listed(settings: Sequence[tuple[str, Scalar]], between: str = ", ") -> str:
    return between.join(f"{name}={value}" for name, value in settings)
