"""A recorded landscape as a device: the second runner behind the seam (see `runner`).

Samples are drawn from the recorded lists, so the noise is the recorded one; a point does not fit when context + peak reserved exceeds the
limit of the request, or when it was recorded as out of memory. Nothing is run, so `timeout_seconds` never strikes;
`seconds` is what the drawn steps would have taken on the device, without the start of a process.
"""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Self

from autofit.problem.config import TrialConfig
from autofit.trials.landscape import Landscape, Point
from autofit.trials.landscape import recorded as as_recorded
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Failure, Outcome, Reason
from autofit.units import format_bytes

WARMUP_STEPS = 1  #: optimizer steps that a real trial drops


class ReplayRunner:
    """See the module's docstring.

    Args:
        landscape: the recorded grid.
        seed: of the draws; same seed and same requests in the same order, same results.
    """

    def __init__(self, landscape: Landscape, seed: int = 0) -> None:
        self._points = {point.config: point for point in landscape.points}
        self._context = landscape.device.context_bytes
        self._random = random.Random(seed)
        self._cancelled = threading.Event()

    def run(self, request: TrialRequest) -> TrialResult:
        """Draw one trial."""
        self._cancelled.clear()
        point = self._points.get(request.config)
        if point is None:
            return _failed(
                Outcome.FAILED, Reason.UNSUPPORTED, f"{request.config.label()} is not in the landscape"
            )
        misfit = self._misfit(point, request.memory_limit_bytes)
        if misfit is not None:
            return TrialResult(outcome=Outcome.INFEASIBLE, failure=misfit)
        assert point.measurement is not None
        measurement = self._drawn(point.measurement, point.runs, request)
        if self._cancelled.is_set():
            return _failed(Outcome.FAILED, Reason.INTERRUPTED, "interrupted")
        return TrialResult(
            outcome=Outcome.COMPLETED,
            measurement=measurement,
            seconds=_device_seconds(measurement, request.config),
        )

    def cancel(self) -> None:
        """End the running draw."""
        self._cancelled.set()

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _misfit(self, point: Point, limit: int | None) -> Failure | None:
        """Why the point is out of memory under `limit` (the allocation that failed: what is missing); None when it fits."""
        if point.measurement is None:
            return Failure(reason=Reason.OUT_OF_MEMORY, message="recorded as out of memory")
        reserved = point.measurement.memory.peak_reserved_bytes
        if limit is None or reserved is None or reserved + self._context <= limit:
            return None
        needed = reserved + self._context
        message = (
            f"out of memory (replayed): {format_bytes(needed)} needed, the limit is {format_bytes(limit)}"
        )
        return Failure(reason=Reason.OUT_OF_MEMORY, message=message, requested_bytes=needed - limit)

    def _drawn(self, recorded: Measurement, runs: int, request: TrialRequest) -> Measurement:
        """As many samples as one run has, from all of them."""

        def draw(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(self._random.choices(values, k=max(1, len(values) // runs))) if values else ()

        recorded, memory = as_recorded(recorded), recorded.memory
        steps = max(1, len(recorded.update_seconds) // runs) + WARMUP_STEPS
        return Measurement(
            micro_step_seconds=draw(recorded.micro_step_seconds),
            fetch_seconds=draw(recorded.fetch_seconds),
            update_seconds=draw(recorded.update_seconds),
            sizes=recorded.sizes,
            memory=Memory(
                peak_allocated_bytes=memory.peak_allocated_bytes,
                peak_reserved_bytes=memory.peak_reserved_bytes,
                context_bytes=self._context,
                device_used_bytes=memory.device_used_bytes,
                host_peak_bytes=memory.host_peak_bytes,
                alloc_retries=memory.alloc_retries,
            ),
            optimizer_steps=request.optimizer_steps or steps,
            tokens_per_sample=recorded.tokens_per_sample,
            facts={"replayed": True},
        )


def _device_seconds(measurement: Measurement, config: TrialConfig) -> float:
    """Time of the drawn steps and of one warm-up step of at most two micro-steps."""
    warmup = min(2, config.gradient_accumulation_steps) * measurement.t_micro + measurement.t_update
    drawn = sum(measurement.micro_step_seconds) + sum(measurement.update_seconds)
    return drawn + len(measurement.micro_step_seconds) * measurement.t_fetch + WARMUP_STEPS * warmup


def _failed(outcome: Outcome, reason: Reason, message: str) -> TrialResult:
    return TrialResult(outcome=outcome, failure=Failure(reason=reason, message=message))
