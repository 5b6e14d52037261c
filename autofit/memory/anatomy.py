"""What the memory is made of at its peak, and what the program is doing then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.memory.allocator import UNIT
from autofit.memory.events import Kind, Moment, Trace
from autofit.memory.repetition import repetition_of
from autofit.memory.replay import Replay, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Bytes at the peak of allocated memory.

    Attributes:
        kinds: bytes in use by what they hold, each storage rounded up to 512 B; kinds without any are left out.
        slack_bytes: what the allocator holds beyond that when all is over (rounding, fragments, cached segments).
        context_bytes: what the device loses before the first tensor.
        moment, step, micro_step: where the peak is.
        operator: the operator whose output or workspace makes it.
        operator_bytes: size of that storage.
    """

    kinds: Mapping[Kind, int]
    slack_bytes: int
    context_bytes: int
    moment: Moment
    step: int
    micro_step: int
    operator: str
    operator_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the device's driver sees in use: the peak of reserved memory and the context."""
        return sum(self.kinds.values()) + self.slack_bytes + self.context_bytes

    def parts(self) -> list[tuple[str, int, float]]:
        """Name, bytes and share of `total_bytes`, in a fixed order, nothing left out that has bytes."""
        rows = [(str(kind), self.kinds.get(kind, 0)) for kind in Kind]
        rows += [("allocator_slack", self.slack_bytes), ("context", self.context_bytes)]
        total = self.total_bytes or 1
        return [(name, size, size / total) for name, size in rows if size]

    def to_json(self) -> dict[str, Any]:
        """The parts with their shares, and the peak's place, as JSON."""
        return {
            "parts": {name: {"bytes": size, "share": round(share, 6)} for name, size, share in self.parts()},
            "peak": {
                "moment": str(self.moment),
                "step": self.step,
                "micro_step": self.micro_step,
                "operator": self.operator,
                "operator_bytes": self.operator_bytes,
            },
        }


def dissect(
    trace: Trace,
    *,
    context_bytes: int = 0,
    expandable: bool = False,
    seen: Replay | None = None,
    reserved_bytes: int | None = None,
) -> Anatomy:
    """Take a trace apart at its peak of allocated memory.

    Args:
        trace: births and deaths, with sizes of the batch in question.
        context_bytes: what the device loses before the first tensor.
        expandable: whether `expandable_segments:True` is set.
        seen: the trace's replay without a limit, when it is already known.
        reserved_bytes: peak reserved bytes to account for, when not the replay's own.
    """
    seen = seen or replay(trace.events, trace.sizes, expandable=expandable, again=repetition_of(trace))
    if seen.peak_event < 0:
        raise ValueError("the trace has no allocation")
    saved = saved_activations(trace)
    kinds: dict[Kind, int] = {}
    for k in _alive_after(trace, seen.peak_event):
        kind = Kind.SAVED_ACTIVATIONS if k in saved else trace.kinds[k]
        kinds[kind] = kinds.get(kind, 0) + -(-trace.sizes[k] // UNIT) * UNIT
    mark, peak = trace.mark_at(seen.peak_event), trace.events[seen.peak_event]
    reserved = seen.peak_reserved_bytes if reserved_bytes is None else max(reserved_bytes, sum(kinds.values()))
    return Anatomy(
        kinds={kind: kinds[kind] for kind in Kind if kind in kinds},
        slack_bytes=reserved - sum(kinds.values()),
        context_bytes=context_bytes,
        moment=mark.moment,
        step=mark.step,
        micro_step=mark.micro_step,
        operator=trace.operator(peak),
        operator_bytes=trace.sizes[peak],
    )


def saved_activations(trace: Trace) -> set[int]:
    """Allocations that a forward leaves for its backward.

    Those are the storages without another name, born in a forward, that are alive when the next backward begins: what
    autograd keeps, the outputs (logits) and the loss.
    """
    saved: set[int] = set()
    born: set[int] = set()
    marks, upcoming, forward = trace.marks, 0, False
    for index, event in enumerate(trace.events):
        while upcoming < len(marks) and marks[upcoming].index <= index:
            moment = marks[upcoming].moment
            if moment == Moment.BACKWARD:
                saved |= born
            forward = moment == Moment.FORWARD
            if not forward:
                born.clear()
            upcoming += 1
        if event < 0:
            born.discard(~event)
        elif forward and trace.kinds[event] == Kind.TEMPORARIES:
            born.add(event)
    return saved


def _alive_after(trace: Trace, index: int) -> set[int]:
    alive: set[int] = set()
    for event in trace.events[: index + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return alive
