"""What a reader must be told of the trials that were run on the winner when the search had ended: its loader and its evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.problem.config import TrialConfig
from autofit.results.evaluation import Evaluation, batch_of
from autofit.results.loader import kept_settings, lost_settings
from autofit.results.result import Warning
from autofit.results.wording import format_factor
from autofit.trials.trial import EVAL_BATCH, Failure, Role, TrialRecord


def of_loader(winner: TrialConfig, records: Sequence[TrialRecord]) -> list[Warning]:
    """Settings of the loader that came late, or that could not be tried, each with its cause."""
    found: dict[str, Failure] = {}
    for record in records:
        if record.role is Role.LOADER and record.failure is not None and not record.interrupted:
            found.setdefault(_settings(record.config), record.failure)
    failed = [
        Warning(
            code="loader_failed",
            message=f"the data loader did not work with {settings}: {failure.message}",
            next_step=f"the answer does without; {failure.hint or 'a dataset must work in a process that was forked from the training'}",
        )
        for settings, failure in found.items()
    ]
    return [*_late(winner), *_lost(winner, records), *failed]


def _late(winner: TrialConfig) -> list[Warning]:
    if not kept_settings(winner):
        return []
    return [
        Warning(
            code="loader_late",
            message="the configurations were compared while the loader held them back: another may be faster now that it does not",
            next_step=f"search once more with {_settings(winner)} in your own TrainingArguments",
        )
    ]


def _lost(winner: TrialConfig, records: Sequence[TrialRecord]) -> list[Warning]:
    lost = lost_settings(winner, records)
    if lost is None:
        return []
    settings = ", ".join(f"{name}={value}" for name, value in lost.settings)
    return [
        Warning(
            code="loader_lost",
            message=f"with {settings} the winner was {format_factor(lost.factor)} as fast, but {lost.cause}: it is no part of the answer",
            next_step="search once more with it in your own TrainingArguments",
        )
    ]


def _settings(config: TrialConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in kept_settings(config))


def of_evaluation(evaluation: Evaluation | None) -> list[Warning]:
    """Evaluation that does not fit, failed, or whose metrics raised."""
    if evaluation is None:
        return []
    found = []
    if evaluation.advice is not None:
        found.append(
            Warning(
                code="evaluation_memory",
                message=evaluation.advice,
                next_step="the answer's TrainingArguments hold it" if evaluation.must_change else None,
            )
        )
    if evaluation.failure is not None:
        batch = batch_of(evaluation.attempts[-1]) if evaluation.attempts else evaluation.asked
        found.append(
            Warning(
                code="evaluation_failed",
                message=f"evaluation was tried at {EVAL_BATCH}={batch} and failed: {evaluation.failure}",
                next_step="what it said is in the result file under evaluation.attempts; the tuned arguments do not depend on it",
            )
        )
    if evaluation.metric_error is not None:
        found.append(
            Warning(
                code="metrics_failed",
                message=f"metrics could not be computed on the few rows that were evaluated: {evaluation.metric_error}",
                next_step="if it needs the whole evaluation set this is no problem; else fix it before a long training",
            )
        )
    return found
