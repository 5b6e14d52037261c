"""The allocator's own history of a real trial: autofit's trial code, run with the recording of torch's allocator switched on.

On a CPU (a dry run) the profiler's memory events take the place of the caching allocator's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from autofit.processes.protocol import TrialOrder
from autofit.workload.trial import run_trial
from benchmarks.evidence.history import History, from_snapshot
from benchmarks.evidence.inside.line import Report, serve

MAX_ENTRIES = 2_000_000


class Phases:
    """Stands for a worker's channel: keeps when each phase began."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, str]] = []
        self.phase: str | None = None

    def enter(self, phase: str, *, send: bool = True) -> None:
        """Note the time of a phase."""
        self.phase = phase
        self.marks.append((time.time_ns() // 1000, phase))


class Recording(Protocol):
    """Records what an allocator does."""

    def begin(self) -> None:
        """From here on."""
        ...

    def entries(self) -> list[dict[str, Any]]:
        """What happened, as `from_snapshot` reads it; ends the recording."""
        ...


class CudaRecording:
    """The caching allocator's own record."""

    def begin(self) -> None:
        """Start it; without stack traces, which would cost more than the steps."""
        torch.cuda.init()  # the allocator has no devices before this, and a recording would not reach any
        torch.cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=MAX_ENTRIES
        )

    def entries(self) -> list[dict[str, Any]]:
        """Entries of the one visible card."""
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        return list(traces[0]) if traces else []


class CpuRecording:
    """The profiler's memory events."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(
            profile_memory=True,
            record_shapes=True,
            with_stack=True,
            activities=[torch.profiler.ProfilerActivity.CPU],
        )

    def begin(self) -> None:
        """Start the profiler."""
        self._profile.start()

    def entries(self) -> list[dict[str, Any]]:
        """Allocations and frees in order of time."""
        self._profile.stop()
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        found = []
        for event in _all(results.experimental_event_tree()):
            if event.typed[0] == torch._C._profiler._EventType.Allocation:
                fields = event.typed[1]
                action = "alloc" if fields.alloc_size > 0 else "free_completed"
                found.append(
                    {
                        "action": action,
                        "addr": fields.ptr,
                        "size": abs(fields.alloc_size),
                        "time_us": event.start_time_ns // 1000,
                    }
                )
        return sorted(found, key=lambda entry: entry["time_us"])


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def main(order: Mapping[str, Any], report: Report) -> None:
    """Run the trial of `order["trial"]` and write its history to `order["path"]`."""
    phases = Phases()
    recording: Recording = CpuRecording() if order["device"] == "cpu" else CudaRecording()
    recording.begin()
    measurement = run_trial(TrialOrder.from_json(order["trial"]), phases)  # type: ignore[arg-type]
    entries = recording.entries()
    history: History = from_snapshot(entries, phases.marks)
    with open(order["path"], "w", encoding="utf-8") as handle:
        json.dump(history.to_json(), handle, separators=(",", ":"))
    actions = sorted({entry["action"] for entry in entries})
    report(
        events=len(history.events),
        births=len(history.sizes),
        actions=actions,
        memory=measurement.to_json()["memory"],
    )


if __name__ == "__main__":
    serve(main)
