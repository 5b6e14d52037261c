"""What may still run: not known, not failed for good, not predicted or proved to be too big. Decided from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofit.beliefs.predict import MemoryModel, dominates, is_memory_failure
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.results.result import by_config
from autofit.trials.soundness import departed
from autofit.trials.trial import Failure, Outcome, Reason, TrialRecord
from autofit.units import format_bytes

RETRIED = frozenset({Reason.CRASH, Reason.UNREADABLE_ANSWER})  #: failures that are given a second chance

Records = Sequence[TrialRecord]


class Eligibility:
    """Says of a configuration whether it may run, and if not, why.

    Args:
        space: what may be run at all.
        limit_bytes: bytes of the device that a run may use.
        memory: predicts memory; None = nothing is predicted.
        learned: (config, records) -> whether it is expected to fit, by what the trials taught; None = nobody learns.
    """

    def __init__(
        self,
        space: Space,
        *,
        limit_bytes: int,
        memory: MemoryModel | None = None,
        learned: Callable[[TrialConfig, Records], bool | None] | None = None,
    ) -> None:
        self._space, self._limit, self._memory, self._learned = space, limit_bytes, memory, learned

    def open(self, records: Records) -> list[TrialConfig]:
        """Every configuration of the space that may run."""
        return [config for config in self._space.configs if self.may_run(config, records)]

    def may_run(self, config: TrialConfig, records: Records) -> bool:
        """Whether it was not run to an answer, did not fail for good, and nothing says (any more) that it cannot fit."""
        own = [r for r in records if r.config == config]
        known = any(r.outcome in (Outcome.COMPLETED, Outcome.INFEASIBLE) for r in own)
        return not known and not failed_for_good(own) and self.reason_to_skip(config, records) is None

    def reason_to_skip(self, config: TrialConfig, records: Records) -> Failure | None:
        """Why a configuration need not run: its precision is unsound, it is predicted not to fit, or needs no less than one that did not."""
        if config.precision in departed(records):
            message = f"{config.precision} was found to depart from fp32 with this model"
            return Failure(reason=Reason.DEPARTS_FROM_FP32, message=message)
        forecast = self._memory.needed(config) if self._memory is not None else None
        if forecast is not None and overprediction(records) * forecast.low_bytes > self._limit:
            message = f"predicted to need {format_bytes(forecast.bytes)}, the limit is {format_bytes(self._limit)}"
            return Failure(reason=Reason.PREDICTED_TOO_BIG, message=message)
        for record in records:
            if is_memory_failure(record) and record.config != config and dominates(config, record.config):
                message = f"needs at least as much memory as {record.config.label()}, which did not fit"
                return Failure(reason=Reason.DOMINATED, message=message)
        return None

    def likely_fits(self, config: TrialConfig, records: Records) -> bool | None:
        """Whether it is expected to fit: by prediction, else by what was learned; None when nobody knows."""
        predicted = self.predicted_bytes(config)
        if predicted is not None:
            return predicted <= self._limit
        return None if self._learned is None else self._learned(config, records)

    def predicted_bytes(self, config: TrialConfig) -> int | None:
        """Device bytes before anything ran, context included; None when not predictable."""
        forecast = self._memory.needed(config) if self._memory is not None else None
        return None if forecast is None else forecast.bytes

    def untested_counts(self, records: Records) -> dict[str, int]:
        """Reason -> how many configurations of the space have no run, for the report."""
        ran = {
            key
            for key, group in by_config(records).items()
            if any(r.outcome is not Outcome.SKIPPED for r in group)
        }
        counts: dict[str, int] = {}
        for config in self._space.configs:
            if config.key() not in ran:
                failure = self.reason_to_skip(config, records)
                name = failure.reason.value if failure is not None else "not_promising"
                counts[name] = counts.get(name, 0) + 1
        return counts


def overprediction(records: Records) -> float:
    """Least ratio of measured to predicted bytes so far, at most 1: forecasts that were too high for some may be so for others."""
    ratios = [
        needed / r.predicted_bytes
        for r in records
        if r.predicted_bytes and r.measurement is not None and (needed := r.measurement.memory.needed_bytes)
    ]
    return min([1.0, *ratios])


def failed_for_good(records: Records) -> bool:
    """Whether the failures of one configuration leave it no further chance: a crash has a second one, an interruption any number."""
    ended = [
        r.failure.reason
        for r in records
        if r.outcome is Outcome.FAILED and r.failure is not None and r.failure.reason is not Reason.INTERRUPTED
    ]
    retried = [reason for reason in ended if reason in RETRIED]
    return len(retried) > 1 or len(ended) > len(retried)
