import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.memory.allocator import CachingAllocator, ExpandableAllocator, OutOfDeviceMemory
from autofit.memory.replay import min_capacity, replay, survives
from tests.memory.traces import MIB, SIZES, births, programs


def mib(*sizes: float) -> list[int]:
    return [int(size * MIB) for size in sizes]


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB less 512 B remain: more than 1 MiB, split off
        (11 * MIB + MIB // 2, 12 * MIB, 12 * MIB),  # half a MiB remains: kept
        (11 * MIB, 12 * MIB, 12 * MIB),  # exactly 1 MiB remains: kept
    ],
)
def test_one_request_is_rounded_and_gets_its_segment(size: int, allocated: int, reserved: int) -> None:
    seen = replay([0], [size])
    assert (seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (allocated, reserved)


def test_no_event_needs_no_memory() -> None:
    seen = replay([], [])
    assert (seen.peak_allocated_bytes, seen.peak_reserved_bytes, seen.peak_event) == (0, 0, -1)


def test_the_smallest_hole_that_holds_the_request_is_taken() -> None:
    # One 20 MiB segment: 4 | 2 | 3 | 2 | rest 9. Holes of 4, 3 and 9; 2.5 goes into 3, then 3.5 into 4, then 9 fits.
    sizes = mib(4, 2, 3, 2, 2.5, 3.5, 9)
    seen = replay([0, 1, 2, 3, ~0, ~2, 4, 5, 6], sizes)
    assert seen.peak_reserved_bytes == 20 * MIB


def test_freed_neighbours_merge() -> None:
    sizes = mib(6, 6, 6, 17)
    assert replay([0, 1, 2, ~0, ~2, ~1, 3], sizes).peak_reserved_bytes == 20 * MIB
    assert replay([0, 1, 2, ~0, ~2, 3], sizes).peak_reserved_bytes == 20 * MIB + 18 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    assert replay([0, ~0, 1], [4 * MIB, 512]).peak_reserved_bytes == 22 * MIB


def test_free_segments_are_given_back_when_the_device_is_full() -> None:
    seen = replay([0, ~0, 1], mib(20, 24), capacity_bytes=30 * MIB)
    assert (seen.retries, seen.peak_reserved_bytes) == (1, 24 * MIB)
    assert replay([0, ~0, 1], mib(20, 24)).peak_reserved_bytes == 44 * MIB


def test_a_segment_in_use_is_not_given_back() -> None:
    events, sizes = [0, 1, ~0, 2], mib(10, 4, 19)
    with pytest.raises(OutOfDeviceMemory) as caught:
        replay([0, 1, ~1, 2], mib(4, 4, 19), capacity_bytes=30 * MIB)
    assert (caught.value.event, caught.value.requested_bytes, caught.value.reserved_bytes) == (
        3,
        19 * MIB,
        20 * MIB,
    )
    assert survives(events, sizes, 40 * MIB) is not None
    assert survives(events, sizes, 38 * MIB) is None


def test_the_peak_is_dated_by_its_event() -> None:
    seen = replay([0, ~0, 1, 2, ~1], mib(3, 2, 2))
    assert (seen.peak_event, seen.peak_allocated_bytes) == (3, 4 * MIB)


def test_expandable_segments_grow_by_pages_and_split_finely() -> None:
    assert replay([0], mib(30), expandable=True).peak_reserved_bytes == 40 * MIB
    assert replay([0], mib(11.5), expandable=True).peak_allocated_bytes == int(11.5 * MIB)
    assert replay([0, 1], mib(30, 9), expandable=True).peak_reserved_bytes == 40 * MIB
    assert replay([0, ~0, 1], mib(30, 50), expandable=True).peak_reserved_bytes == 60 * MIB


def test_expandable_segments_give_back_pages_and_map_elsewhere() -> None:
    # 40 | 4 of 60 MiB mapped; the 40 die; 44 do not fit behind the 4 until the hole's two pages are unmapped.
    events, sizes = [0, 1, ~0, 2], mib(40, 4, 44)
    seen = survives(events, sizes, 60 * MIB, expandable=True)
    assert seen is not None
    assert (seen.retries, seen.peak_reserved_bytes) == (1, 60 * MIB)
    assert survives(events, sizes, 60 * MIB) is None


def test_expandable_segments_fill_a_hole_that_was_unmapped() -> None:
    allocator = ExpandableAllocator()
    allocator.run([0, 1, ~0], mib(40, 4))
    allocator._release()
    assert allocator.reserved * 512 == 20 * MIB
    assert len(allocator._gaps[False]) == 2
    allocator.run([0], mib(40))
    assert allocator.reserved * 512 == 60 * MIB
    assert len(allocator._gaps[False]) == 1


def test_min_capacity_lies_below_reserved_when_segments_can_be_given_back() -> None:
    assert min_capacity([0, ~0, 1], mib(20, 24)) == 24 * MIB


def test_a_hundred_thousand_events_replay_in_half_a_second() -> None:
    events: list[int] = []
    sizes = [(k * 7919 % 4001 + 1) * 4096 for k in range(50_000)]
    for k in range(50_000):
        events.append(k)
        if k >= 500:
            events.append(~(k - 500))
    start = time.process_time()
    replay(events, sizes)
    assert time.process_time() - start < 0.5


@dataclass
class Span:
    size: int
    free: bool


class PlainAllocator:
    """The same rules written for reading, not for speed: segments are lists of spans in address order."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity, self.segments, self.retries = capacity, [], 0
        self.where: dict[int, tuple[list[Span], Span]] = {}
        self.peaks = [0, 0]

    def reserved(self) -> int:
        return sum(span.size for _, spans in self.segments for span in spans)

    def allocated(self) -> int:
        return sum(span.size for _, span in self.where.values())

    def birth(self, key: int, nbytes: int) -> bool:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        holes = [
            (span.size, row, i)
            for row, (kind, spans) in enumerate(self.segments)
            for i, span in enumerate(spans)
            if kind == small and span.free and span.size >= size
        ]
        if not holes:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.capacity is not None and self.reserved() + segment > self.capacity:
                self.retries += 1
                self.segments = [s for s in self.segments if not (len(s[1]) == 1 and s[1][0].free)]
                if self.reserved() + segment > self.capacity:
                    return False
            self.segments.append((small, [Span(segment, True)]))
            self.peaks[1] = max(self.peaks[1], self.reserved())
            holes = [(segment, len(self.segments) - 1, 0)]
        _, row, i = min(holes)
        spans = self.segments[row][1]
        span, rest = spans[i], spans[i].size - size
        if rest >= 512 if small else rest > MIB:
            span.size = size
            spans.insert(i + 1, Span(rest, True))
        span.free = False
        self.where[key] = (spans, span)
        self.peaks[0] = max(self.peaks[0], self.allocated())
        return True

    def death(self, key: int) -> None:
        spans, span = self.where.pop(key)
        span.free = True
        i = next(i for i, other in enumerate(spans) if other is span)
        for left in (i, i - 1):
            if 0 <= left < len(spans) - 1 and spans[left].free and spans[left + 1].free:
                spans[left].size += spans.pop(left + 1).size


def plainly(events: list[int], sizes: list[int], capacity: int | None) -> tuple[int, int, int] | None:
    allocator = PlainAllocator(capacity)
    for event in events:
        if event < 0:
            allocator.death(~event)
        elif not allocator.birth(event, sizes[event]):
            return None
    return (allocator.peaks[0], allocator.peaks[1], allocator.retries)


@given(events=programs(), data=st.data(), part=st.floats(0, 1))
def test_the_fast_allocator_does_what_the_plain_one_does(
    events: list[int], data: st.DataObject, part: float
) -> None:
    n = births(events)
    sizes = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    free = replay(events, sizes)
    assert (free.peak_allocated_bytes, free.peak_reserved_bytes, 0) == plainly(events, sizes, None)
    gap = free.peak_reserved_bytes - free.peak_allocated_bytes
    capacity = (free.peak_allocated_bytes + int(part * gap)) // 512 * 512
    seen = survives(events, sizes, capacity)
    told = None if seen is None else (seen.peak_allocated_bytes, seen.peak_reserved_bytes, seen.retries)
    assert told == plainly(events, sizes, capacity)


@given(events=programs(), data=st.data(), expandable=st.booleans())
def test_min_capacity_lies_between_allocated_and_reserved_and_suffices(
    events: list[int], data: st.DataObject, expandable: bool
) -> None:
    n = births(events)
    sizes = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    seen = replay(events, sizes, expandable=expandable)
    least = min_capacity(events, sizes, expandable=expandable)
    assert seen.peak_allocated_bytes <= least <= seen.peak_reserved_bytes
    assert survives(events, sizes, least, expandable=expandable) is not None


@given(events=programs(), data=st.data(), expandable=st.booleans())
def test_peak_allocated_is_never_below_what_is_alive(
    events: list[int], data: st.DataObject, expandable: bool
) -> None:
    n = births(events)
    sizes = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    alive, peak = 0, 0
    for event in events:
        alive += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, alive)
    seen = replay(events, sizes, expandable=expandable)
    assert peak <= seen.peak_allocated_bytes <= seen.peak_reserved_bytes


@given(events=programs(), data=st.data())
def test_when_all_has_died_all_can_be_given_back(events: list[int], data: st.DataObject) -> None:
    n = births(events)
    sizes = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    dead = {~event for event in events if event < 0}
    allocator = CachingAllocator()
    allocator.run([*events, *(~k for k in range(n) if k not in dead)], sizes)
    assert allocator.allocated == 0
    allocator._release()
    assert allocator.reserved == 0
