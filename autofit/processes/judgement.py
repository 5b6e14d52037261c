"""What became of a trial, judged from what its child said and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.errors import UserError
from autofit.processes.failure import Evidence, ExceptionReport, classify_exception, classify_exit
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.soundness import unsound
from autofit.trials.trial import Failure, Outcome, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """All that is known of a child that has ended.

    Attributes:
        answer: its answer line, None when it gave none.
        started: whether it said that it started.
        phase: the last phase it named.
        status: exit code, negative for a signal; None when it was killed by us before it ended.
        timed_out, cancelled: why we killed it.
        unreadable: it wrote something that is not our protocol.
        log_tail: the end of its output.
        seconds: from launch to end.
        oom_kills: processes that the kernel killed for memory meanwhile in this cgroup; None when it does not count.
    """

    answer: Mapping[str, Any] | None
    started: bool
    phase: str | None
    status: int | None
    timed_out: bool
    cancelled: bool
    unreadable: bool
    log_tail: str
    seconds: float
    oom_kills: int | None = None


def judge(report: ChildReport, request: TrialRequest, *, device: str, timeout: float) -> TrialResult:
    """Turn what a child said and how it ended into an outcome."""
    failure: Failure | None
    evidence = Evidence(
        limit_set=request.memory_limit_bytes is not None,
        device_kind=device.partition(":")[0],
        log_tail=report.log_tail,
        phase=report.phase,
        oom_kill_delta=report.oom_kills,
        exit_status=report.status if report.answer is not None else None,
    )
    if report.answer is not None and "payload" in report.answer:
        return _judge_measurement(report)
    if report.answer is not None and "user_error" in report.answer:
        failure = _judge_refusal(report.answer, evidence)
    elif report.answer is not None:
        failure = classify_exception(ExceptionReport.from_json(report.answer["error"]), evidence)
    elif report.cancelled:
        failure = Failure(reason=Reason.INTERRUPTED, message="interrupted", phase=report.phase)
    elif report.timed_out:
        failure = Failure(
            reason=Reason.TIMEOUT,
            message=f"no answer within {timeout:.0f} s",
            phase=report.phase,
            log_tail=report.log_tail or None,
        )
    elif report.unreadable:
        failure = Failure(
            reason=Reason.UNREADABLE_ANSWER,
            message="the child's answer could not be read",
            phase=report.phase,
            log_tail=report.log_tail or None,
        )
    else:
        failure = classify_exit(report.status, evidence)
    return TrialResult(outcome=outcome_of(failure), failure=failure, seconds=report.seconds)


def _judge_refusal(answer: Mapping[str, Any], evidence: Evidence) -> Failure:
    """A mistake of the user, unless the error behind it was out of memory."""
    failure = classify_exception(ExceptionReport.from_json(answer["error"]), evidence)
    if failure.reason is Reason.OUT_OF_MEMORY:
        return failure
    said = answer["user_error"]
    return Failure(
        reason=Reason.ERROR,
        message=said["message"],
        phase=evidence.phase,
        traceback=said.get("traceback") or None,
        refused="traceback" not in said,
        hint=said.get("hint"),
    )


INFEASIBLE_REASONS = frozenset(
    {
        Reason.OUT_OF_MEMORY,
        Reason.SUSPECTED_OUT_OF_MEMORY,
        Reason.ALLOCATOR_THRASH,
        Reason.NON_FINITE_LOSS,
        Reason.ALL_STEPS_SKIPPED,
        Reason.STEPS_SKIPPED,
        Reason.DEPARTS_FROM_FP32,
    }
)


def outcome_of(failure: Failure) -> Outcome:
    """Infeasible for what a smaller or other configuration cures; failed for bugs, crashes and time-outs."""
    return Outcome.INFEASIBLE if failure.reason in INFEASIBLE_REASONS else Outcome.FAILED


def _judge_measurement(report: ChildReport) -> TrialResult:
    assert report.answer is not None
    try:
        measurement = Measurement.from_json(report.answer["payload"])
    except UserError as error:
        failure = Failure(
            reason=Reason.UNREADABLE_ANSWER, message=error.message, log_tail=report.log_tail or None
        )
        return TrialResult(outcome=Outcome.FAILED, failure=failure, seconds=report.seconds)
    problem = unsound(measurement)
    if problem is not None:
        return TrialResult(outcome=outcome_of(problem), failure=problem, seconds=report.seconds)
    return TrialResult(outcome=Outcome.COMPLETED, measurement=measurement, seconds=report.seconds)
