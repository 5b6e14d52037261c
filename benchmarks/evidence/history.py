"""What a process's allocator really did, event by event, and how that compares with a trace and with our model of the allocator.

A history comes from `torch.cuda.memory._snapshot()` (a card's caching allocator) or, in a dry run, from the profiler's memory events. Nothing here
imports torch. Sizes are compared as the allocator rounds them, to 512 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from autofit.memory.allocator import UNIT
from autofit.memory.events import Moment, Trace
from autofit.memory.replay import replay

FREED = ("free_completed", "free")
GREW, SHRANK = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
WINDOW, RUN = (
    400,
    4,
)  #: how far two sequences may be apart before they meet again, and for how long they must agree then
SHOWN = 15  #: differences listed
CURVE_POINTS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Births and deaths on a device, as `memory.events.Trace` counts them.

    Attributes:
        events: `k` is the birth of allocation `k`, `~k` its death.
        sizes: bytes, per allocation.
        segments: (position in `events`, bytes that the allocator took from the device, negative when it gave back).
        marks: (position in `events`, phase that begins there).
        unmatched: deaths of storages that were born before the history begins.
        out_of_memory: times that the allocator gave up.
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ()
    marks: tuple[tuple[int, str], ...] = ()
    unmatched: int = 0
    out_of_memory: int = 0

    def to_json(self) -> dict[str, Any]:
        """All columns, as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> History:
        """Inverse of `to_json`."""
        return cls(
            events=tuple(data["events"]),
            sizes=tuple(data["sizes"]),
            segments=tuple((position, size) for position, size in data["segments"]),
            marks=tuple((position, phase) for position, phase in data["marks"]),
            unmatched=data["unmatched"],
            out_of_memory=data["out_of_memory"],
        )


def from_snapshot(entries: Iterable[Mapping[str, Any]], marks: Sequence[tuple[int, str]] = ()) -> History:
    """The history in `_snapshot()["device_traces"][device]`.

    Args:
        entries: `{"action", "addr", "size", "time_us"}` in order.
        marks: (microseconds of the same clock, phase), in order.
    """
    events: list[int] = []
    sizes: list[int] = []
    times: list[int] = []
    segments: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    unmatched = failed = 0
    for entry in entries:
        action = entry["action"]
        if action == "alloc":
            alive[entry["addr"]] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry["size"])
            times.append(entry.get("time_us", 0))
        elif action in FREED:
            number = alive.pop(entry["addr"], None)
            if number is None:
                unmatched += 1
                continue
            events.append(~number)
            times.append(entry.get("time_us", 0))
        elif action in GREW:
            segments.append((len(events), entry["size"]))
        elif action in SHRANK:
            segments.append((len(events), -entry["size"]))
        elif action == "oom":
            failed += 1
    placed = tuple((bisect_right(times, moment), phase) for moment, phase in marks) if any(times) else ()
    return History(
        events=tuple(events),
        sizes=tuple(sizes),
        segments=tuple(segments),
        marks=placed,
        unmatched=unmatched,
        out_of_memory=failed,
    )


def compare(real: History, traced: Trace) -> dict[str, Any]:
    """How far a trace and the allocator's own history agree over the training steps.

    Both are cut into the phases of each micro-step; within a phase, births of equal size are matched in order.

    Returns:
        `births` and what matched of them, the bytes of the rest and the differences that hold most of them, `same_lifetimes` of the matched ones,
        peaks of both, `allocator` (the real births and deaths through our model of the allocator, against what it really reserved), and
        `curve`: (our, real) bytes in use at matched births.
    """
    ours, theirs = traced_phases(traced), real_phases(real)
    pairs: list[tuple[int, int]] = []
    only_ours: list[tuple[str, int]] = []
    only_real: list[tuple[str, int]] = []
    for phase in dict.fromkeys([*ours, *theirs]):
        mine, other = ours.get(phase, []), theirs.get(phase, [])
        found = match([_rounded(traced.sizes[k]) for k in mine], [_rounded(real.sizes[k]) for k in other])
        pairs += [(mine[i], other[j]) for i, j in found]
        left, right = {i for i, _ in found}, {j for _, j in found}
        only_ours += [
            (f"{phase[0]}: {traced.operator(k)}", _rounded(traced.sizes[k]))
            for i, k in enumerate(mine)
            if i not in left
        ]
        only_real += [(phase[0], _rounded(real.sizes[k])) for j, k in enumerate(other) if j not in right]
    live_ours, live_real = (
        _live_at_births(traced.events, traced.sizes),
        _live_at_births(real.events, real.sizes),
    )
    curve = [(live_ours[mine], live_real[other]) for mine, other in pairs]
    told, modelled = replay(traced.events, traced.sizes), replay(real.events, real.sizes)
    return {
        "phases": {"ours": len(ours), "real": len(theirs)},
        "births": {
            "ours": sum(map(len, ours.values())),
            "real": sum(map(len, theirs.values())),
            "matched": len(pairs),
        },
        "matched_bytes": sum(_rounded(traced.sizes[mine]) for mine, _ in pairs),
        "unmatched_bytes": {
            "ours": sum(size for _, size in only_ours),
            "real": sum(size for _, size in only_real),
        },
        "only_ours": _common(only_ours),
        "only_real": _common(only_real),
        "same_lifetimes": _same_lifetimes(traced, real, pairs),
        "peak_allocated_bytes": {
            "ours": told.peak_allocated_bytes,
            "real": max(live_real.values(), default=0),
        },
        "peak_reserved_bytes": {"ours": told.peak_reserved_bytes, "real": _peak_reserved(real)},
        "allocator": {
            "modelled_reserved_bytes": modelled.peak_reserved_bytes,
            "real_reserved_bytes": _peak_reserved(real),
        },
        "largest_gap_bytes": max((abs(a - b) for a, b in curve), default=0),
        "curve": curve[:: max(1, len(curve) // CURVE_POINTS)],
    }


def match(ours: Sequence[int], real: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of equal elements in both sequences, rising in both."""
    blocks = SequenceMatcher(None, ours, real, autojunk=False).get_matching_blocks()
    return [(block.a + k, block.b + k) for block in blocks for k in range(block.size)]


Phase = tuple[str, int]
"""`forward`, `backward` or `update`, and the micro-step it belongs to, counted over all optimizer steps."""


def traced_phases(trace: Trace) -> dict[Phase, list[int]]:
    """Births of a trace by phase; what comes before the first forward (the model) is left out."""
    starts = [(mark.index, _MOMENTS[mark.moment]) for mark in trace.marks if mark.moment in _MOMENTS]
    return _by_phase(trace.events, starts)


def real_phases(real: History) -> dict[Phase, list[int]]:
    """As `traced_phases`, of a history."""
    return _by_phase(
        real.events, [(position, _NAMES[name]) for position, name in real.marks if name in _NAMES]
    )


_MOMENTS = {
    Moment.FORWARD: "forward",
    Moment.BACKWARD: "backward",
    Moment.CLIP: "update",
    Moment.UPDATE: "update",
    Moment.ZERO: "update",
    Moment.INPUT: "update",
}
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "fetch": "update",
}  #: as a trial names its phases


def _by_phase(events: Sequence[int], starts: Sequence[tuple[int, str]]) -> dict[Phase, list[int]]:
    found: dict[Phase, list[int]] = {}
    micro_step = -1
    ends = [*(position for position, _ in starts[1:]), len(events)]
    for (position, name), end in zip(starts, ends):
        micro_step += name == "forward"
        if micro_step >= 0:
            found.setdefault((name, micro_step), []).extend(
                event for event in events[position:end] if event >= 0
            )
    return found


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


def _live_at_births(events: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Allocation -> rounded bytes in use right after its birth."""
    level, found = 0, {}
    for event in events:
        if event >= 0:
            level += _rounded(sizes[event])
            found[event] = level
        else:
            level -= _rounded(sizes[~event])
    return found


def _peak_reserved(real: History) -> int | None:
    """Most bytes taken from the device; None where the history has no segments (a CPU)."""
    level = peak = 0
    for _, size in real.segments:
        level += size
        peak = max(peak, level)
    return peak or None


def _common(differences: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """The differences that hold most bytes, alike ones counted together."""
    counts = Counter(differences)
    largest = sorted(counts.items(), key=lambda item: -item[0][1] * item[1])[:SHOWN]
    return [{"where": where, "bytes": size, "times": times} for (where, size), times in largest]


def _same_lifetimes(traced: Trace, real: History, pairs: Sequence[tuple[int, int]]) -> int:
    """How many matched allocations die between the same two matched births in both."""
    ours = _deaths(traced.events, {mine: row for row, (mine, _) in enumerate(pairs)})
    theirs = _deaths(real.events, {other: row for row, (_, other) in enumerate(pairs)})
    return sum(ours.get(row) == theirs.get(row) for row in range(len(pairs)))


def _deaths(events: Sequence[int], rows: Mapping[int, int]) -> dict[int, int]:
    """Row of a matched allocation -> number of matched births before its death; missing = it lives to the end."""
    born, found = 0, {}
    for event in events:
        if event >= 0:
            born += event in rows
        elif ~event in rows:
            found[rows[~event]] = born
    return found
