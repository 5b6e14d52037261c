"""The seam between search and device: a runner takes a configuration and says what became of it.

Two runners stand behind it: `process.ProcessRunner` (a child process and the real Trainer) and
`replay.ReplayRunner` (a recorded landscape). A conformance test holds both to this contract:

- `run` returns, and never raises for anything that a trial does: out of memory, crash, time-out are outcomes.
- An infeasible or failed trial leaves the runner usable.
- The record's config and role are those asked for; completed records have samples of the asked accumulation's kind.
- `close` is idempotent and leaves no child behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Measurement
from autofit.trials.trial import Failure, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """One order to a runner.

    Attributes:
        config: what to run.
        memory_limit_bytes: bytes of the device that the trial may use, context included; None = no limit.
        timeout_seconds: after which the trial is killed; None = none.
        full_length: run at the configuration's own accumulation and the longest batch (confirmation), not the shortest faithful form.
        optimizer_steps: fixed number of optimizer steps; None = as many as the time window needs.
        window_seconds: measured time aimed for.
        seed: of data and model.
        evaluate: evaluate after the last step, at the configuration's `per_device_eval_batch_size` (see `evaluation`).
    """

    config: TrialConfig
    memory_limit_bytes: int | None = None
    timeout_seconds: float | None = None
    full_length: bool = False
    optimizer_steps: int | None = None
    window_seconds: float = 1.0
    seed: int = 0
    evaluate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What became of a request: exactly one of `measurement` and `failure` is present."""

    outcome: Outcome
    measurement: Measurement | None = None
    failure: Failure | None = None
    seconds: float = 0.0


@runtime_checkable
class Runner(Protocol):
    """See the module's docstring."""

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial to its end."""
        ...

    def cancel(self) -> None:
        """End the running trial, from another thread or a signal handler; it returns as INTERRUPTED."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
