"""The lines of a report about what was run on the winner when the search had ended: its data loader and its evaluation. Pure."""

from __future__ import annotations

from autofit.problem.config import TrialConfig
from autofit.results.evaluation import Evaluation
from autofit.results.loader import kept_settings, lost_settings, wait_share
from autofit.results.result import TuneResult, estimates
from autofit.results.wording import format_factor, format_speed
from autofit.trials.trial import EVAL_BATCH, LOADER_KNOBS, Outcome, Role, TrialRecord
from autofit.units import format_bytes


def after_lines(result: TuneResult) -> list[str]:
    """One sentence on the loader and one on the evaluation, where they were tried."""
    return [line for line in (loader_line(result), evaluation_line(result.evaluation)) if line is not None]


def loader_line(result: TuneResult) -> str | None:
    """Whether the loader held the winner back, and what helped; None where nothing was tried."""
    tried = [r for r in result.trials if r.role is Role.LOADER]
    if not tried:
        return None
    base = without_loader(result.best.config)
    waited = f"waiting for data took {_share(base, result):.0%} of the winner's time".replace("%", " %")
    kept = kept_settings(result.best.config)
    if not kept:
        lost = lost_settings(result.best.config, result.trials)
        if lost is not None:
            settings = ", ".join(f"{name}={value}" for name, value in lost.settings)
            return f"Loader: {waited}; with {settings} it was {format_factor(lost.factor)} as fast, but {lost.cause}."
        ran = [_said(r) for r in tried if r.failure is None]
        failed = [_said(r) for r in tried if r.failure is not None and not r.interrupted]
        slow = [f"none of the settings tried was faster beyond the noise ({', '.join(ran)})"] if ran else []
        broken = [f"{', '.join(failed)} did not work (see the warnings)"] if failed else []
        return f"Loader: {'; '.join([waited, *slow, *broken])}."
    before = estimates(result.trials).get(base.key())
    settings = ", ".join(f"{name}={value}" for name, value in kept)
    if before is None:
        return f"Loader: {waited}; {settings} is part of the answer."
    gain = format_factor(result.best.samples_per_second / before.samples_per_second)
    return f"Loader: {waited}; with {settings} it is {gain} as fast ({format_speed(before.samples_per_second)} samples/s without)."


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


def without_loader(config: TrialConfig) -> TrialConfig:
    """The configuration as the search had it."""
    return config.but(extra=tuple((name, value) for name, value in config.extra if name not in LOADER_KNOBS))


def _share(base: TrialConfig, result: TuneResult) -> float:
    own = [r for r in result.trials if r.config == base and r.role is not Role.CONFIRMATION and r.outcome is Outcome.COMPLETED]
    return wait_share(own[-1]) if own else 0.0


def _said(record: TrialRecord) -> str:
    return " ".join(f"{name}={value}" for name, value in kept_settings(record.config))
