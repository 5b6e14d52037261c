"""Judge what a child process reported: out of memory, suspected of it, unsupported, or a bug.

Three questions in this order: the exception's type, the wording of its message (the table `failure_wordings.ROWS`, one row per wording with the place where it
was read), and the exit status of a child that said nothing. A wording that other causes share is out of memory only when something else says that memory
was short; what nothing speaks for stays an error with its traceback. Texts that users write themselves (a missing key, a file name) are never read as
wordings. Not covered: which rank of several was the first to fail; out of memory in any of them decides, and that is the caller's to combine.
"""

from __future__ import annotations

import builtins
import errno
import re
import signal
from dataclasses import dataclass

from autofit.processes.exception_report import MAX_MESSAGE, clip
from autofit.processes.exception_report import ExceptionLink as ExceptionLink
from autofit.processes.exception_report import ExceptionReport as ExceptionReport
from autofit.processes.exception_report import describe_exception as describe_exception
from autofit.processes.failure_wordings import ROWS, Needs, On, Verdict
from autofit.trials.trial import Failure, Reason
from autofit.units import MIB

FULL_FRACTION = 0.9  #: of the limit reserved: the device counts as full
LOW_FREE_BYTES = 256 * MIB  #: less than a cuBLAS handle with its workspace and a small tensor need


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known beside the exception or the exit status.

    Attributes:
        limit_set: whether the trial ran under a memory limit of ours.
        device_kind: `cpu` (the limit is an rlimit on the process) or an accelerator (a limit on its allocator only).
        reserved_fraction: of the limit that was reserved at the end; None when not known.
        free_bytes: memory left on the device at the end; None when not known.
        oom_kill_delta: growth of the cgroup's `oom_kill` counter during the trial; None when there is none.
        exit_status: how the child ended after it had answered: exit code, negative for a signal; None when not known.
        log_tail: the end of what the child printed.
        phase: the last phase the child named.
    """

    limit_set: bool = False
    device_kind: str = "cpu"
    reserved_fraction: float | None = None
    free_bytes: int | None = None
    oom_kill_delta: int | None = None
    exit_status: int | None = None
    log_tail: str | None = None
    phase: str | None = None

    def memory_was_short(self, reserved_fraction: float | None = None) -> bool:
        """Whether anything but the error itself says that memory ran out.

        Known counters decide; a limit of ours counts only where nothing was counted. An assertion that failed in a kernel speaks against it:
        every later call then fails with an unrelated wording.

        Args:
            reserved_fraction: as the child saw it, better than this object's own.
        """
        if self.oom_kill_delta or (
            self.exit_status is not None and _signal_of(self.exit_status) == signal.SIGKILL
        ):
            return True
        if _KERNEL_ASSERTION.search(self.log_tail or ""):
            return False
        fraction = self.reserved_fraction if reserved_fraction is None else reserved_fraction
        known = [] if fraction is None else [fraction >= FULL_FRACTION]
        known += [] if self.free_bytes is None else [self.free_bytes < LOW_FREE_BYTES]
        return any(known) if known else self.limit_set

    @property
    def rlimit_set(self) -> bool:
        """Whether every allocation of the process was limited, and so a failing thread or a crash is explained."""
        return bool(self.oom_kill_delta) or (self.limit_set and self.device_kind == "cpu")


_KERNEL_ASSERTION = re.compile(r"device-side assert|Assertion `[^`\n]*` failed")


#: The messages of these say what a user's program looked for, so no wording is sought in them.
_USER_TEXT = frozenset(
    f"builtins.{name}"
    for name in (
        "LookupError",
        "NameError",
        "AttributeError",
        "SyntaxError",
        "ValueError",
        "TypeError",
        "AssertionError",
        "Warning",
    )
)
_RANK = (
    Reason.OUT_OF_MEMORY,
    Reason.INTERRUPTED,
    Reason.SUSPECTED_OUT_OF_MEMORY,
    Reason.UNSUPPORTED,
    Reason.ERROR,
)
_REQUESTED = re.compile(
    r"(?:tried to (?:allocate|mmap)|unable to (?:allocate|mmap)|trying to allocate|calloc(?: async)?|memory allocating|invalid buffer size:)"
    r" ([\d.]+) ?(bytes|B|[KMGTP]i?B)\b",
    re.IGNORECASE,
)


def classify_exception(report: ExceptionReport, evidence: Evidence) -> Failure:
    """Judge an exception: out of memory anywhere in its chain decides, else the gravest verdict, else it is an error."""
    short = evidence.memory_was_short(report.reserved_fraction)
    links = report.links or (ExceptionLink(types=("unknown",), message="an exception without description"),)
    judged = [(_judge(link, evidence, short), link) for link in links]
    reason, link = min(judged, key=lambda pair: _RANK.index(pair[0]))
    return Failure(
        reason=reason,
        message=_one_line(link.headline),
        phase=report.phase or evidence.phase,
        traceback=report.traceback or None,
        log_tail=evidence.log_tail or None,
        requested_bytes=requested_bytes(link.message),
    )


def classify_exit(status: int | None, evidence: Evidence) -> Failure:
    """Judge a child that ended without an answer. A child that we killed ourselves (time-out, cancel) must not come here.

    Args:
        status: exit code; negative for a signal, or 128 + signal as a shell says it; None when the child never ended by itself.
    """
    log = evidence.log_tail or ""
    number = _signal_of(status) if status is not None else None
    for row in ROWS:
        if row.on is On.LOG and (match := re.search(row.pattern, log)):
            reason = _settle(row.verdict, evidence, evidence.memory_was_short())
            if reason is not Reason.ERROR:
                return _ending(reason, _line_around(log, match.start()), evidence)
    last = _last_words(log)
    if last is not None:
        told = classify_exception(ExceptionReport(links=(last,), traceback=log), evidence)
        if told.reason is not Reason.ERROR or (number is None and status == 1):
            return told
    if number is None:
        return _judge_code(status, evidence)
    return _judge_signal(number, evidence)


def requested_bytes(text: str) -> int | None:
    """Size of the allocation that `text` says has failed; None when it names none. Allocators mean powers of 1024, `GB` as well."""
    match = _REQUESTED.search(text)
    if match is None:
        return None
    power = 0 if match[2].lower() in ("bytes", "b") else " KMGTP".index(match[2][0].upper())
    return int(float(match[1].rstrip(".")) * 1024**power)


def _judge(link: ExceptionLink, evidence: Evidence, short: bool) -> Reason:
    if link.errno == errno.ENOMEM:
        return Reason.OUT_OF_MEMORY
    for row in ROWS:
        if row.on is On.TYPE and any(re.fullmatch(row.pattern, name) for name in link.types):
            return _settle(row.verdict, evidence, short)
    if link.errno is not None or not _USER_TEXT.isdisjoint(link.types):
        return Reason.ERROR
    for row in ROWS:
        if row.on is On.MESSAGE and re.search(row.pattern, link.message, re.IGNORECASE):
            return _settle(row.verdict, evidence, short)
    return Reason.ERROR


def _settle(verdict: Verdict, evidence: Evidence, short: bool) -> Reason:
    met = {Needs.NOTHING: True, Needs.RLIMIT: evidence.rlimit_set, Needs.SHORTAGE: short}[verdict.needs]
    return verdict.reason if met else verdict.otherwise


def _judge_signal(number: signal.Signals, evidence: Evidence) -> Failure:
    name = number.name
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return _ending(Reason.INTERRUPTED, f"ended by {name}, which this program did not send", evidence)
    if number == signal.SIGKILL and (evidence.limit_set or evidence.memory_was_short()):
        counted = ", and the kernel counted a kill for lack of memory" if evidence.oom_kill_delta else ""
        return _ending(Reason.SUSPECTED_OUT_OF_MEMORY, f"killed by {name} without a word{counted}", evidence)
    memory_like = number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
    if memory_like and (evidence.rlimit_set or evidence.memory_was_short()):
        return _ending(Reason.SUSPECTED_OUT_OF_MEMORY, f"died of {name} while memory was limited", evidence)
    return _ending(Reason.CRASH, f"died of {name}", evidence)


def _judge_code(status: int | None, evidence: Evidence) -> Failure:
    if status is None:
        return _ending(Reason.UNREADABLE_ANSWER, "gave no answer and did not end", evidence)
    if status == 0:
        return _ending(Reason.UNREADABLE_ANSWER, "ended in order but gave no answer", evidence)
    # The dynamic loader ends a process with 127 when it cannot allocate; its text may be lost with it.
    if status == 127 and (evidence.rlimit_set or evidence.memory_was_short()):
        return _ending(
            Reason.SUSPECTED_OUT_OF_MEMORY, "ended with exit code 127 while memory was limited", evidence
        )
    return _ending(Reason.CRASH, f"ended with exit code {status} and no answer", evidence)


def _ending(reason: Reason, message: str, evidence: Evidence) -> Failure:
    return Failure(
        reason=reason,
        message=_one_line(message),
        phase=evidence.phase,
        log_tail=evidence.log_tail or None,
        requested_bytes=requested_bytes(message),
    )


def _signal_of(status: int) -> signal.Signals | None:
    """The signal behind an exit status (`-9`, or `137` from a shell); None for an ordinary code."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def _last_words(log: str) -> ExceptionLink | None:
    """The exception that ended the process, as Python or the C++ runtime printed it at the end of the log."""
    what = re.findall(r"(?m)^  what\(\):  (.*)$", log)
    if what:
        return ExceptionLink(types=("terminate",), message=clip(what[-1], MAX_MESSAGE))
    _, found, rest = log.rpartition("Traceback (most recent call last):")
    match = re.search(r"(?m)^([A-Za-z_][\w.]*)(?:: (.*(?:\n.+){0,4}))?$", rest) if found else None
    if match is None:
        return None
    kind = getattr(builtins, match[1], None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        types = tuple(f"builtins.{t.__name__}" for t in kind.__mro__ if t is not object)
    else:
        types = (match[1],)
    number = re.match(r"\[Errno (\d+)\]", match[2] or "")
    return ExceptionLink(
        types=types,
        message=clip((match[2] or "").strip(), MAX_MESSAGE),
        errno=int(number[1]) if number else None,
    )


def _line_around(text: str, position: int) -> str:
    end = text.find("\n", position)
    return text[text.rfind("\n", 0, position) + 1 : end if end >= 0 else len(text)]


def _one_line(text: str, limit: int = 200) -> str:
    line = text.strip().partition("\n")[0].rstrip()
    return line if len(line) <= limit else line[: limit - 3] + "..."
