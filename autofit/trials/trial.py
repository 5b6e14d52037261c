"""What became of one configuration: outcome, reason, measurement, and the record that is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autofit.errors import UserError
from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Interval, Measurement


class Outcome(StrEnum):
    """Life cycle: a trial is asked for, then ends in exactly one of these. Only `failed` may be retried."""

    COMPLETED = "completed"  #: has a measurement
    INFEASIBLE = "infeasible"  #: ran, and did not fit or ran unsoundly
    SKIPPED = "skipped"  #: never ran: predicted not to fit, dominated, or answered from the record
    FAILED = "failed"  #: a bug, a time-out, a crash: shown to the user as such


class Reason(StrEnum):
    """Why a trial did not complete."""

    OUT_OF_MEMORY = "out_of_memory"
    SUSPECTED_OUT_OF_MEMORY = "suspected_out_of_memory"  #: killed without a word under a limit
    ALLOCATOR_THRASH = "allocator_thrash"
    NON_FINITE_LOSS = "non_finite_loss"
    ALL_STEPS_SKIPPED = "all_steps_skipped"  #: fp16: every optimizer step overflowed
    STEPS_SKIPPED = "steps_skipped"  #: fp16: more overflowed than the search for a scale explains
    DEPARTS_FROM_FP32 = "departs_from_fp32"  #: the precision changes the loss by more than rounding explains
    PREDICTED_TOO_BIG = "predicted_too_big"
    DOMINATED = "dominated"  #: needs at least as much memory as one that did not fit
    KNOB_WITHOUT_EFFECT = "knob_without_effect"  #: the run was not what was asked for
    TIMEOUT = "timeout"
    CRASH = "crash"
    UNREADABLE_ANSWER = "unreadable_answer"
    ERROR = "error"  #: an exception that is not out-of-memory
    UNSUPPORTED = "unsupported"  #: this configuration is refused by the libraries or the kernel
    INTERRUPTED = "interrupted"


class Role(StrEnum):
    """Why a trial was run."""

    DEFAULTS = "defaults"  #: baseline: plain TrainingArguments at this effective batch
    HAND_RECIPE = "hand_recipe"  #: baseline: half precision and the largest power of two that fits
    SEARCH = "search"
    PLAYOFF = "playoff"
    CONFIRMATION = "confirmation"
    LOADER = "loader"  #: the winner again, with other settings of its data loader
    EVALUATION = "evaluation"  #: the winner again, two optimizer steps and then an evaluation


SEARCH_ROLES = (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH)  #: that use up the budget of trials
#: arguments that only trials after the search set
LOADER_KNOBS = (
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
)
EVAL_BATCH = "per_device_eval_batch_size"
AFTER_SEARCH = (*LOADER_KNOBS, EVAL_BATCH)
OUTSIDE = "baseline outside the space"  #: why a trial ran that cannot win
PREPARATION = "script_seconds"  #: among the facts of a script's measurement: how long it took to come to its training
SCRIPT_PHASE = "script"  #: of a trial, while the user's script prepares its training
FAILURES_ALLOWED = 1  #: that a leader may have in play-off and confirmation: with one more it leads no longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial has no measurement.

    Attributes:
        reason: see `Reason`.
        message: one line for the table.
        phase: where it happened (`model`, `forward`, `backward`, `update`, ...), None when unknown.
        traceback: the child's traceback, whole; None when there was none.
        log_tail: last lines the child printed; None when it printed nothing.
        requested_bytes: size of the allocation that failed, where the message names it.
        refused: whether the child said that the input is a mistake of the user.
        hint: what to do about that; None when the message says it all.
    """

    reason: Reason
    message: str
    phase: str | None = None
    traceback: str | None = None
    log_tail: str | None = None
    requested_bytes: int | None = None
    refused: bool = False
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One stored trial.

    Attributes:
        number: Optuna's trial number; unique within a study.
        config: what was asked.
        role: why it was run.
        outcome: see `Outcome`.
        measurement: raw samples; present exactly when completed.
        failure: present exactly when not completed.
        seconds: wall time the trial took, 0.0 when it never ran.
        predicted_bytes: peak predicted before the run (same meaning as `Memory.needed_bytes`), None when not predicted.
        why: the sampler's one sentence.
    """

    number: int
    config: TrialConfig
    role: Role = Role.SEARCH
    outcome: Outcome
    measurement: Measurement | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    predicted_bytes: int | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.COMPLETED) != (self.measurement is not None):
            raise UserError("a trial record has a measurement exactly when it completed")
        if (self.outcome is Outcome.COMPLETED) == (self.failure is not None):
            raise UserError("a trial record has a failure exactly when it did not complete")

    @property
    def interrupted(self) -> bool:
        """Whether it was ended from outside, which says nothing of the configuration."""
        return self.failure is not None and self.failure.reason is Reason.INTERRUPTED

    @property
    def after_search(self) -> bool:
        """Whether it was run on the winner after the search had ended, and says nothing of the space."""
        own = self.role in (Role.LOADER, Role.EVALUATION)
        return own or any(name in AFTER_SEARCH for name, _ in self.config.extra)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput at the configuration's own accumulation (one device); None when not completed."""
        if self.measurement is None:
            return None
        return self.measurement.samples_per_second(
            per_device_train_batch_size=self.config.per_device_train_batch_size,
            gradient_accumulation_steps=self.config.gradient_accumulation_steps,
        )

    @property
    def interval(self) -> Interval | None:
        """95 % interval of `samples_per_second` within this run."""
        if self.measurement is None:
            return None
        return self.measurement.interval(
            per_device_train_batch_size=self.config.per_device_train_batch_size,
            gradient_accumulation_steps=self.config.gradient_accumulation_steps,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON for study files and results."""
        failure = None
        if self.failure is not None:
            failure = {name: getattr(self.failure, name) for name in self.failure.__slots__}
            failure["reason"] = str(self.failure.reason)
        return {
            "number": self.number,
            "config": self.config.to_json(),
            "role": str(self.role),
            "outcome": str(self.outcome),
            "measurement": self.measurement.to_json() if self.measurement else None,
            "failure": failure,
            "seconds": self.seconds,
            "predicted_bytes": self.predicted_bytes,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialRecord:
        """Inverse of `to_json`.

        Raises:
            UserError: not a trial record.
        """
        try:
            failure = data["failure"]
            return cls(
                number=data["number"],
                config=TrialConfig.from_json(data["config"]),
                role=Role(data["role"]),
                outcome=Outcome(data["outcome"]),
                measurement=Measurement.from_json(data["measurement"]) if data["measurement"] else None,
                failure=Failure(**{**failure, "reason": Reason(failure["reason"])}) if failure else None,
                seconds=float(data["seconds"]),
                predicted_bytes=data["predicted_bytes"],
                why=data["why"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a trial record: {error!r}") from None


def given_up(records: Iterable[TrialRecord]) -> frozenset[TrialConfig]:
    """Configurations that failed in play-off and confirmation more than once, for another reason than memory: they lead no longer."""
    later = (r for r in records if r.role in (Role.PLAYOFF, Role.CONFIRMATION))
    failed = Counter(r.config for r in later if r.outcome is Outcome.FAILED and not r.interrupted)
    return frozenset(config for config, times in failed.items() if times > FAILURES_ALLOWED)
