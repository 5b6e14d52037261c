"""The runner that is real: one child process per trial, watched, timed, and judged by what it said and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autofit.errors import ScriptError, UserError, WorkerError
from autofit.problem.script_command import read_script
from autofit.problem.script_source import early_environment
from autofit.problem.spec import Workload
from autofit.processes import leftovers
from autofit.processes.failure import ExceptionReport
from autofit.processes.judgement import ChildReport, judge
from autofit.processes.launch import Child, ForkserverLauncher, Launcher, SpawnLauncher, child_environment
from autofit.processes.protocol import SCRATCH, Event, Kind, TrialOrder, decode_event, encode_request
from autofit.trials.runner import TrialRequest, TrialResult

START_TIMEOUT_SECONDS = 30.0  #: for a forked child's first word; a dead thread pool never speaks
SPAWN_START_TIMEOUT_SECONDS = 180.0  #: for a spawned child, which imports first
GRACE_SECONDS = 5.0  #: for a child to end after its answer
LOG_TAIL_BYTES = 8000
BAD_FORK = "Cannot re-initialize CUDA in forked subprocess"  #: torch's own words
DEFAULT_TRIAL_TIMEOUT_SECONDS = 600.0


class ProcessRunner:
    """Runs trials of one workload on one device.

    Args:
        workload: what is trained.
        device: `cpu` or `cuda:N`.
        context_bytes: what the device loses before the first tensor (from `describe`).
        method: `forkserver` or `spawn`; the first falls back to the second when a child does not come up.

    `cancel` may be called from another thread or a signal handler.
    """

    def __init__(
        self, workload: Workload, device: str, *, context_bytes: int = 0, method: str = "forkserver"
    ) -> None:
        self.workload = workload
        self.device = device
        self.context_bytes = context_bytes
        self.fallback_reason: str | None = None
        self._environment = child_environment(device, {**os.environ, **_set_by_script(workload)})
        self._directory = Path(tempfile.mkdtemp(prefix="autofit-"))
        self._environment[SCRATCH] = str(self._directory)
        self._cancelled = threading.Event()
        self._closed = False
        self._logs = 0
        self._launcher: Launcher
        if method == "forkserver" and hasattr(os, "fork"):
            self._launcher = ForkserverLauncher(self._environment)
            private = [str(self._directory)]
            private += [str(Path(workload.objects_path).parent)] if workload.objects_path is not None else []
            self._launcher.remove_if_orphaned(private)
        else:
            self._launcher = SpawnLauncher(self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def describe(self, **request: Any) -> dict[str, Any]:
        """Return the facts about device, model and software (see `workload.describe`).

        Raises:
            UserError: the model or device cannot be used, in the child's words.
            WorkerError: the child broke; its traceback is in the message's hint.
        """
        payload = {"workload": self.workload.to_json(), "device": self.device, **request}
        answer = self.ask(Kind.DESCRIBE, payload, timeout=DEFAULT_TRIAL_TIMEOUT_SECONDS)
        modules = answer.get("preload")
        if modules and isinstance(self._launcher, ForkserverLauncher):
            self._launcher.preload(list(modules))
        return answer

    def ask(self, kind: Kind, payload: Mapping[str, Any], *, timeout: float | None) -> dict[str, Any]:
        """Return a child's payload for any request but a trial.

        Raises:
            UserError: the child refused the input.
            WorkerError: the child broke or ran out of time.
        """
        report = self._run_child(encode_request(kind, payload), timeout)
        if report.answer is not None:
            if "user_error" in report.answer:
                raise _refusal(report.answer["user_error"], report.log_tail)
            if "payload" in report.answer:
                return dict(report.answer["payload"])
            raise WorkerError(
                f"the {kind} request failed", hint=ExceptionReport.from_json(report.answer["error"]).traceback
            )
        ending = "ran out of time" if report.timed_out else f"ended with status {report.status}"
        if self.workload.script is not None and not report.cancelled:
            raise ScriptError(f"{self.workload.model} {ending} before it trained", traceback=report.log_tail.strip())
        raise WorkerError(f"the {kind} request {ending}", hint=report.log_tail.strip()[-2000:] or None)

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial to its end; everything that happens in it is an outcome."""
        order = TrialOrder(
            request=request,
            workload=self.workload.to_json(),
            device=self.device,
            context_bytes=self.context_bytes,
        )
        timeout = request.timeout_seconds or DEFAULT_TRIAL_TIMEOUT_SECONDS
        report = self._run_child(encode_request(Kind.TRIAL, order.to_json()), timeout)
        return judge(report, request, device=self.device, timeout=timeout)

    def cancel(self) -> None:
        """End the running trial; the runner stays usable."""
        self._cancelled.set()

    def close(self) -> None:
        """End all children and remove temporary files."""
        if self._closed:
            return
        self._closed = True
        self._launcher.close()
        leftovers.sweep(self._directory, everything=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run_child(self, request: bytes, timeout: float | None) -> ChildReport:
        try:
            return self._run_or_spawn(request, timeout)
        finally:
            leftovers.sweep(self._directory)

    def _run_or_spawn(self, request: bytes, timeout: float | None) -> ChildReport:
        report = self._watch(request, timeout)
        problem = _fork_problem(report)
        if problem is not None and isinstance(self._launcher, ForkserverLauncher):
            self.fallback_reason = f"{problem}; trials are spawned afresh from here on (slower to start)"
            self._launcher.close()
            self._launcher = SpawnLauncher(self._environment)
            report = self._watch(request, timeout)
        return report

    def _watch(self, request: bytes, timeout: float | None) -> ChildReport:
        self._cancelled.clear()
        self._logs += 1
        log_path = self._directory / f"child-{self._logs}.log"
        killed_before = _oom_kills()
        begin = time.monotonic()
        with open(log_path, "wb") as log:
            child = self._launcher.launch(request, log)
        launched = time.monotonic()
        spawned = isinstance(self._launcher, SpawnLauncher)
        watch = _Watch(
            child=child,
            start_deadline=launched + (SPAWN_START_TIMEOUT_SECONDS if spawned else START_TIMEOUT_SECONDS),
            deadline=None
            if timeout is None
            else launched + timeout + (SPAWN_START_TIMEOUT_SECONDS if spawned else 0),
            cancelled=self._cancelled.is_set,
        )
        try:
            watch.run()
        finally:
            child.kill()
            os.close(child.answer_fd)
        tail = _tail(log_path)
        log_path.unlink(missing_ok=True)
        return ChildReport(
            answer=watch.answer,
            started=watch.started,
            phase=watch.phase,
            status=watch.status,
            timed_out=watch.timed_out,
            cancelled=watch.was_cancelled,
            unreadable=watch.unreadable,
            log_tail=tail,
            seconds=time.monotonic() - begin,
            oom_kills=_difference(_oom_kills(), killed_before),
        )


def _set_by_script(workload: Workload) -> dict[str, str]:
    """What the script sets before its imports: in a child the libraries are imported before it begins."""
    command = workload.script
    if command is None or command[0] == "-m":
        return {}
    return early_environment(read_script(command[0]), os.environ)


def _refusal(said: Mapping[str, Any], log_tail: str) -> UserError:
    """The child's refusal as an error; a script's comes with its traceback, or with what it printed last."""
    if "traceback" in said:
        return ScriptError(said["message"], hint=said["hint"], traceback=said["traceback"] or log_tail.strip())
    return UserError(said["message"], hint=said["hint"])


class _Watch:
    """Reads a child's pipe until it has answered and ended, or has to be killed."""

    def __init__(
        self, *, child: Child, start_deadline: float, deadline: float | None, cancelled: Callable[[], bool]
    ) -> None:
        self._child, self._start_deadline, self._deadline, self._cancelled = (
            child,
            start_deadline,
            deadline,
            cancelled,
        )
        self._buffer = b""
        self.answer: dict[str, Any] | None = None
        self.started = self.timed_out = self.was_cancelled = self.unreadable = False
        self.phase: str | None = None
        self.status: int | None = None

    def run(self) -> None:
        open_pipe = True
        grace: float | None = None
        while True:
            now = time.monotonic()
            self.status = self._child.exit_status()
            if self.status is not None:
                if open_pipe:
                    self._drain()
                return
            if self.answer is not None and grace is None:
                grace = now + GRACE_SECONDS
            if grace is not None and now > grace:
                return
            if self._cancelled():
                self.was_cancelled = True
                return
            if self.answer is None and self._overdue(now):
                self.timed_out = True
                return
            open_pipe = self._wait(open_pipe) and open_pipe

    def _overdue(self, now: float) -> bool:
        return (not self.started and now > self._start_deadline) or (
            self._deadline is not None and now > self._deadline
        )

    def _wait(self, open_pipe: bool) -> bool:
        """Wait a moment for news; False when the pipe has ended."""
        wakeup = self._child.wakeup_fd()
        fds = ([self._child.answer_fd] if open_pipe else []) + ([wakeup] if wakeup is not None else [])
        readable, _, _ = select.select(fds, [], [], 0.05 if wakeup is None else 0.2)
        if open_pipe and self._child.answer_fd in readable:
            data = os.read(self._child.answer_fd, 1 << 16)
            self._take(data)
            return bool(data)
        return True

    def _drain(self) -> None:
        os.set_blocking(self._child.answer_fd, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._child.answer_fd, 1 << 16):
                self._take(data)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            event = decode_event(line)
            if event is None:
                self.unreadable = True
            elif event["event"] == Event.STARTED:
                self.started = True
            elif event["event"] == Event.PHASE:
                self.phase = event.get("name")
            else:
                self.answer = event


def _tail(path: Path) -> str:
    with open(path, "rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(0, handle.tell() - LOG_TAIL_BYTES))
        return handle.read().decode(errors="replace")


def _fork_problem(report: ChildReport) -> str | None:
    """What shows that forking does not work here; None when nothing does."""
    if not report.started and not report.cancelled and report.answer is None:
        return f"a forked child did not come up in {START_TIMEOUT_SECONDS:.0f} s"
    error = (report.answer or {}).get("error")
    if error is not None and BAD_FORK in ExceptionReport.from_json(error).traceback:
        return "the fork server had initialised CUDA"
    return None


def _oom_kills() -> int | None:
    """The cgroup's (v2, or v1) count of processes killed for memory; None where there is none to read."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return None


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
