"""What every stage works with: the machine, its runner (autofit's own), trials as rows, and scripts that look inside a process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autofit.devices.device import Device
from autofit.errors import AutofitError
from autofit.problem.config import TrialConfig
from autofit.problem.space import Capabilities, checkpointing_problem, optim_problem, precision_problem
from autofit.problem.spec import Workload
from autofit.processes.launch import child_environment
from autofit.processes.process import ProcessRunner
from autofit.search.scene import capabilities_of
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Outcome, Reason
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import ROOT, Plan
from benchmarks.evidence.store import DONE, FAILED, Folder, Sheet

NO_MODEL = Workload(model="none")
TRIAL_SECONDS = 90.0  #: no short trial may take longer
TAIL = 4000


class Bench:
    """One machine during one call.

    Args:
        folder: where sheets and files go.
        plan: what is to be run.
        device: `cuda:0` or `cpu`.
        say: told of every point.
    """

    def __init__(self, folder: Folder, plan: Plan, device: str, say: Callable[[str], None]) -> None:
        self.folder, self.plan, self.device, self.say = folder, plan, device, say
        self._runner: ProcessRunner | None = None
        self._described: dict[Workload, dict[str, Any]] = {}

    @property
    def on_cuda(self) -> bool:
        """Whether figures are a GPU's."""
        return self.device != "cpu"

    @property
    def least_seconds(self) -> float:
        """What a trial takes at least: with less than this left, none is begun."""
        return 6.0 if self.on_cuda else 2.0

    @property
    def runner(self) -> ProcessRunner:
        """One fork server for all trials of all models; started when it is first needed."""
        if self._runner is None:
            self._runner = ProcessRunner(NO_MODEL, self.device)
        return self._runner

    def describe(self, workload: Workload | None = None) -> dict[str, Any]:
        """A child's facts about machine and software, and about the model of `workload`.

        Raises:
            UserError: no such device or model.
            WorkerError: the child broke, or took longer than two minutes.
        """
        key = workload or NO_MODEL
        if key not in self._described:
            self.runner.workload = key
            with self._watched(120.0):
                self._described[key] = (
                    self.runner.describe() if workload else self.runner.describe(workload=None)
                )
            self.runner.context_bytes = self._described[key]["device"]["context_bytes"]
        return self._described[key]

    @property
    def machine(self) -> Device:
        """The device."""
        return Device.from_json(self.describe()["device"])

    def identity(self) -> dict[str, Any]:
        """What must agree between calls on one folder."""
        facts = self.describe()
        software = facts["software"]
        return {
            "dry_run": self.folder.dry_run,
            "device": facts["device"]["name"],
            "torch": software.get("torch"),
            "transformers": software.get("transformers"),
        }

    def trial(
        self,
        workload: Workload,
        config: TrialConfig,
        box: Box,
        *,
        most: float = TRIAL_SECONDS,
        **request: Any,
    ) -> TrialResult:
        """One trial by autofit's own runner; its model's modules are imported by the fork server before it."""
        self.describe(workload)
        self.runner.workload = workload
        return self.runner.run(TrialRequest(config=config, timeout_seconds=box.timeout(most), **request))

    def problem(self, workload: Workload, config: TrialConfig) -> str | None:
        """Why `config` cannot run here; None when it can."""
        found: Capabilities = capabilities_of(self.describe(workload))
        return (
            precision_problem(config.precision, found)
            or optim_problem(config.optim, found)
            or checkpointing_problem(config.gradient_checkpointing, found)
        )

    def inside(
        self, script: str, payload: Mapping[str, Any], box: Box, *, most: float = 120.0
    ) -> list[dict[str, Any]]:
        """Run `inside.<script>` in a process of its own and return its findings; those it made before it was ended count too.

        The last line is `{"status", "log"}`: exit status (None = ended for taking too long) and the end of its output.
        """
        out = self._said(script)
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.evidence.inside.{script}"]
        message = json.dumps({**payload, "device": self.device, "out": str(out), "parent": os.getpid()})
        status, log = run_child([*command, message], self.environment(), box.timeout(most))
        return [*findings(out), {"status": status, "log": log}]

    def left_behind(self, script: str) -> list[dict[str, Any]]:
        """What `inside.<script>` had found when it last ran, for a call that follows one that was killed."""
        return findings(self._said(script))

    def _said(self, script: str) -> Path:
        return self.folder.file("inside", f"{script}.jsonl")

    def environment(self) -> dict[str, str]:
        """Of a child that is no trial: as a trial's, with this repository importable."""
        env = child_environment(self.device, os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        return env

    def reset(self) -> None:
        """End the runner; the next stage gets a fresh one."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self.runner.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def findings(log: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that a child writes, without one that it did not end; none where there is no file."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_child(command: list[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """(exit status, end of its output) of a command in its own process group; None when it took longer than `seconds`."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output[-TAIL:]
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            output, _ = process.communicate()
            return None, output[-TAIL:]
        except BaseException:
            _kill_group(process.pid)
            raise


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def outcome_row(result: TrialResult, config: TrialConfig) -> dict[str, Any]:
    """A trial as a row: raw samples, counters, and the throughput that follows."""
    row: dict[str, Any] = {
        "config": config.to_json(),
        "outcome": str(result.outcome),
        "seconds": result.seconds,
    }
    if result.measurement is not None:
        row["measurement"] = result.measurement.to_json()
        row["samples_per_second"] = result.measurement.samples_per_second(
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
    if result.failure is not None:
        failure = result.failure
        row["failure"] = {name: getattr(failure, name) for name in failure.__slots__}
        row["failure"]["reason"] = str(failure.reason)
    return row


def record(sheet: Sheet, key: str, result: TrialResult, config: TrialConfig, **more: Any) -> bool:
    """Put a trial into a sheet; whether it ended as a trial should (completed, or not fitting)."""
    fine = result.outcome is not Outcome.FAILED
    unsupported = result.failure is not None and result.failure.reason is Reason.UNSUPPORTED
    sheet.put(key, DONE if fine or unsupported else FAILED, **outcome_row(result, config), **more)
    return result.outcome is Outcome.COMPLETED


@contextlib.contextmanager
def point(sheet: Sheet, key: str) -> Iterator[None]:
    """A model that cannot be described, or a file that cannot be read, costs its own point only. Any other exception is a bug, and breaks the stage."""
    try:
        yield
    except AutofitError as error:
        sheet.fail(key, f"{error.message}\n{(error.hint or '')[-2000:]}")


def missing(*packages: str) -> list[str]:
    """Those of `packages` that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._begin
