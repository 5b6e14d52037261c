"""What a process's allocator really did, event by event, and how that compares with a trace and with our model of the allocator.

A history comes from `torch.cuda.memory._snapshot()` (a card's caching allocator) or, in a dry run, from the profiler's memory events. Nothing here
imports torch. Sizes are compared as the allocator rounds them, to 512 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        pairs = {name: tuple(tuple(pair) for pair in data[name]) for name in ("segments", "marks")}
        rest = {"unmatched": data["unmatched"], "out_of_memory": data["out_of_memory"]}
        return cls(events=tuple(data["events"]), sizes=tuple(data["sizes"]), **pairs, **rest)


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


def align(
    ours: Sequence[int], real: Sequence[int], *, window: int = WINDOW, run: int = RUN
) -> list[tuple[int, int]]:
    """Rows of `ours` and `real` that belong together, both rising.

    Where the sequences differ, the nearest place is taken at which `run` elements agree again, at most `window` elements away; where there is
    none, one element of each is given up.
    """
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(ours) and j < len(real):
        if ours[i] == real[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        i, j = _meeting(ours, real, i, j, window, run)
    return pairs


def _meeting(
    ours: Sequence[int], real: Sequence[int], i: int, j: int, window: int, run: int
) -> tuple[int, int]:
    for distance in range(1, window):
        for ahead in range(distance + 1):
            a, b = i + ahead, j + distance - ahead
            mine, theirs = ours[a : a + run], real[b : b + run]
            if len(mine) and len(theirs) and list(mine) == list(theirs):
                return a, b
    return i + 1, j + 1


def compare(real: History, traced: Trace) -> dict[str, Any]:
    """How far a trace and the allocator's own history agree, from the first batch on.

    Returns:
        `births` and what matched of them, `unmatched_bytes` and the largest differences on both sides, `same_lifetimes` of the matched ones,
        peaks of allocated bytes, `allocator` (the real births and deaths through our model of the allocator, against what it really
        reserved), and `curve`: (our, real) bytes in use at matched births.
    """
    mine, theirs = (
        _births_from(traced.events, _first_input(traced)),
        _births_from(real.events, _after_loading(real)),
    )
    ours, seen = [_rounded(traced.sizes[k]) for k in mine], [_rounded(real.sizes[k]) for k in theirs]
    pairs = align(ours, seen)
    matched_ours, matched_real = {i for i, _ in pairs}, {j for _, j in pairs}
    live_ours, live_real = (
        _live_at_births(traced.events, traced.sizes),
        _live_at_births(real.events, real.sizes),
    )
    curve = [(live_ours[mine[i]], live_real[theirs[j]]) for i, j in pairs]
    modelled = replay(real.events, real.sizes)
    told = replay(traced.events, traced.sizes)
    only_ours = [i for i in range(len(ours)) if i not in matched_ours]
    only_real = [j for j in range(len(seen)) if j not in matched_real]
    return {
        "births": {"ours": len(ours), "real": len(seen), "matched": len(pairs)},
        "unmatched_bytes": {"ours": sum(ours[i] for i in only_ours), "real": sum(seen[j] for j in only_real)},
        "matched_bytes": sum(ours[i] for i, _ in pairs),
        "first_difference": _first_difference(traced, mine, ours, seen, pairs),
        "only_ours": _common((traced.operator(mine[i]), ours[i]) for i in only_ours),
        "only_real": _common((_phase_at(real, theirs[j]), seen[j]) for j in only_real),
        "same_lifetimes": _same_lifetimes(traced, real, [(mine[i], theirs[j]) for i, j in pairs]),
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


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


def _first_input(trace: Trace) -> int:
    return next((mark.index for mark in trace.marks if mark.moment is Moment.INPUT), 0)


def _after_loading(real: History) -> int:
    return next((position for position, phase in real.marks if phase == "trainer"), 0)


def _births_from(events: Sequence[int], start: int) -> list[int]:
    return [event for event in events[start:] if event >= 0]


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


def _phase_at(real: History, birth: int) -> str:
    position, name = real.events.index(birth), "before the first phase"
    for start, phase in real.marks:
        if start > position:
            break
        name = phase
    return name


def _common(differences: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """The differences that hold most bytes, alike ones counted together."""
    counts = Counter(differences)
    largest = sorted(counts.items(), key=lambda item: -item[0][1] * item[1])[:SHOWN]
    return [{"where": where, "bytes": size, "times": times} for (where, size), times in largest]


def _first_difference(
    traced: Trace,
    mine: Sequence[int],
    ours: Sequence[int],
    seen: Sequence[int],
    pairs: Sequence[tuple[int, int]],
) -> dict[str, Any] | None:
    for row in range(min(len(ours), len(seen))):
        if row >= len(pairs) or pairs[row] != (row, row):
            return {
                "birth": row,
                "operator": traced.operator(mine[row]),
                "ours": ours[row],
                "real": seen[row],
            }
    return None


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
