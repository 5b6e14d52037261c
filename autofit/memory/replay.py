"""Replays: what the allocator does with a list of births and deaths, and how little memory it can do it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofit.memory.allocator import (
    GRANULE_BYTES,
    UNIT,
    CachingAllocator,
    ExpandableAllocator,
    OutOfDeviceMemory,
)
from autofit.memory.repetition import Repetition

MOST_REPEATS = 8
"""Times that a step is repeated at most; one or two are usual, more come under a tight limit."""
FEWEST_RETRIES, RETRIES_PER_STEP = 2, 0.5
"""From both on, retries are thrash: the run goes on, at the speed of the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay saw.

    Attributes:
        peak_allocated_bytes: most bytes in use, as `torch.cuda.max_memory_allocated` counts them.
        peak_reserved_bytes: most bytes held from the device, as `torch.cuda.max_memory_reserved` counts them.
        retries: times that everything free was given back to make room.
        thrashes: whether it goes on retrying as the last step is repeated.
        peak_event: position of the event at which `peak_allocated_bytes` was first reached; -1 without events.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    thrashes: bool
    peak_event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Three different numbers for three uses, each without the device's context.

    Attributes:
        peak_allocated_bytes: most bytes in use at once: with less than this no allocator can help.
        peak_reserved_bytes: what the allocator holds in the end when it is never short of memory.
        min_capacity_bytes: smallest memory in which it survives, giving back what it can when short, but not in every step.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    min_capacity_bytes: int


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
    again: Repetition | None = None,
) -> Replay:
    """Replay `events` from an empty allocator.

    Args:
        events: `k` is the birth of allocation `k`, `~k` its death.
        sizes: bytes asked for, per allocation.
        capacity_bytes: device memory beside the context; None = without limit.
        expandable: whether `expandable_segments:True` is set.
        again: the part of the events that goes on until free memory has come to rest.

    Raises:
        OutOfDeviceMemory: it does not fit.
    """
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity_bytes)
    end = len(events) if again is None else again.end
    allocator.run(events[:end], sizes)
    before = allocator.retries
    repeats = 0 if again is None else _repeat_to_rest(allocator, events, sizes, again)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated * UNIT,
        peak_reserved_bytes=allocator.peak_reserved * UNIT,
        retries=allocator.retries,
        thrashes=thrashes(allocator.retries - before, repeats),
        peak_event=allocator.peak_event,
    )


def thrashes(retries: int, steps: int) -> bool:
    """Whether `retries` in `steps` optimizer steps are a habit.

    Under a tight limit PyTorch's allocator may rearrange its segments once, in an early step, and then needs no more.
    """
    return retries >= FEWEST_RETRIES and retries >= RETRIES_PER_STEP * steps


def _repeat_to_rest(
    allocator: CachingAllocator, events: Sequence[int], sizes: Sequence[int], again: Repetition
) -> int:
    """Returns how often the step was repeated."""
    step, left = events[again.begin : again.end], [successor for _, successor in again.carried]
    seen: set[object] = set()
    while len(seen) < MOST_REPEATS and (layout := allocator.layout(left)) not in seen:
        seen.add(layout)
        allocator.rename(again.carried)
        allocator.run(step, sizes, first=again.begin)
    return len(seen)


def survives(
    events: Sequence[int],
    sizes: Sequence[int],
    capacity_bytes: int,
    *,
    expandable: bool = False,
    again: Repetition | None = None,
) -> Replay | None:
    """The replay under `capacity_bytes`, or None when it runs out of memory or thrashes."""
    try:
        seen = replay(events, sizes, capacity_bytes=capacity_bytes, expandable=expandable, again=again)
    except OutOfDeviceMemory:
        return None
    return None if seen.thrashes else seen


def min_capacity(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    unlimited: Replay | None = None,
    expandable: bool = False,
    again: Repetition | None = None,
    probes: int = 2,
) -> int:
    """Smallest capacity in bytes in which `events` survive, between peak allocated and peak reserved.

    Survival is not strictly monotone in capacity: a larger device gives segments back later, and what it keeps may be
    in the way. The answer is the low end of the interval below peak reserved in which no probe failed, so it errs on
    the side of more memory. It is exact to 2 MiB, or to a five-hundredth where that is more.

    Args:
        events, sizes: see `replay`.
        unlimited: the replay without a limit, when it is already known.
        expandable, again: see `replay`.
        probes: capacities above a first answer that are tried as well.
    """
    unlimited = unlimited or replay(events, sizes, expandable=expandable, again=again)
    low, top = unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes

    def fits(capacity: int) -> bool:
        return survives(events, sizes, capacity, expandable=expandable, again=again) is not None

    if low >= top:
        return top
    found = low if fits(low) else _bisect(fits, low, top)
    while True:
        step = (top - found) // (probes + 1)
        tries = range(top - step, found, -step) if step >= GRANULE_BYTES else range(0)
        failed = next((c for c in tries if not fits(c)), None)
        if failed is None:
            return found
        found = _bisect(fits, failed, top)


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """A capacity that fits, with one below it that does not; `low` does not, `high` does."""
    tolerance = max(GRANULE_BYTES, high // 512)
    while high - low > tolerance:
        middle = (low + high) // 2 // GRANULE_BYTES * GRANULE_BYTES
        if middle <= low:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
