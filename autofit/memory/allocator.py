"""A model of PyTorch's caching allocator for CUDA, fed with births and deaths.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings, one stream, no graph capture:

- sizes are rounded up to 512 B; up to 1 MiB is *small* and lives in segments of 2 MiB, up to 10 MiB in segments of
  20 MiB, larger requests get a segment of their own, rounded up to 2 MiB;
- a request takes the smallest free block that holds it, the lowest address among equals; the rest of the block is
  split off if it is at least 512 B (small) or more than 1 MiB (large), else the request keeps the whole block;
- a freed block merges with free neighbours of its segment;
- when the device has no room for a new segment, all wholly free segments are given back and the request is tried
  once more; then it is out of memory.

`ExpandableAllocator` models `expandable_segments:True`: one growing address range per pool, mapped in pages of 2 MiB
(small) or 20 MiB (large), split from 512 B on, and given back page by page.

Not modelled: several streams, the addresses that cudaMalloc really returns (here each new segment lies above the
last), `max_split_size_mb`, garbage collection thresholds, and the pages the driver keeps for itself. Addresses and
sizes are counted in units of 512 B inside; a free block is one integer, size above address, so that a sorted list of
them answers best fit by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

UNIT = 512
SMALL = (1 << 20) // UNIT
SMALL_SEGMENT = (2 << 20) // UNIT
LARGE_SEGMENT = (20 << 20) // UNIT
OWN_SEGMENT = (10 << 20) // UNIT
ROUND_LARGE = (2 << 20) // UNIT
GRANULE_BYTES = 2 << 20
"""What the driver hands out is a multiple of this."""

_SHIFT = 40
_ADDRESS = (1 << _SHIFT) - 1
_GUARD = 1  # unused units between segments: neighbours of different segments never touch
_RANGE = 1 << 34  # units of address space of an expandable segment (8 TiB)


class OutOfDeviceMemory(Exception):
    """The replay ran out of memory.

    Args:
        requested_bytes: size of the request that failed.
        reserved_bytes: what the allocator held after it had given back all it could.
        event: position of the request among the events; None outside `replay`.
    """

    def __init__(self, *, requested_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes requested with {reserved_bytes} bytes reserved")
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.event: int | None = None


class CachingAllocator:
    """The allocator with its default settings.

    Args:
        capacity_bytes: device memory that it may hold; None = without limit.
    """

    splits_large_from = SMALL + 1

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity = None if capacity_bytes is None else capacity_bytes // UNIT
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self.peak_event = -1
        self._small: list[int] = []
        self._large: list[int] = []
        self._free_starts: dict[int, int] = {}  # start of a free block -> its size
        self._free_ends: dict[int, int] = {}  # end of a free block -> its start
        self._segments: dict[int, int] = {}  # start -> size
        self._placed: dict[int, tuple[int, int]] = {}  # allocation -> start and size of its block
        self._top = 0

    def run(self, events: Sequence[int], sizes: Sequence[int], *, first: int = 0) -> None:
        """Replay `events` (`k` is the birth of allocation `k`, `~k` its death) after those replayed before.

        Args:
            sizes: bytes asked for, per allocation.
            first: position of the first event, for `peak_event` and for errors.

        Raises:
            OutOfDeviceMemory: a request does not fit, even after everything free was given back.
        """
        small, large = self._small, self._large
        starts, ends = self._free_starts, self._free_ends
        placed = self._placed
        allocated, peak = self.allocated, self.peak_allocated
        large_rest = self.splits_large_from
        for index, event in enumerate(events, first):
            if event >= 0:
                size = (sizes[event] + 511) >> 9 or 1
                pool, rest_from = (small, 1) if size <= SMALL else (large, large_rest)
                i = self._find(pool, size)
                if i < len(pool):
                    block = pool.pop(i)
                    start, have = block & _ADDRESS, block >> _SHIFT
                    del starts[start]
                else:
                    start, have = self._grow_or_raise(pool, size, index)
                rest = have - size
                if rest >= rest_from:
                    begin = start + size
                    starts[begin] = rest
                    ends[begin + rest] = begin
                    insort(pool, rest << _SHIFT | begin)
                    have = size
                else:
                    ends.pop(start + have, None)
                placed[event] = (start, have)
                allocated += have
                if allocated > peak:
                    peak, self.peak_event = allocated, index
            else:
                start, size = placed.pop(~event)
                allocated -= size
                self._free(start, size, small if size <= SMALL else large)
        self.allocated, self.peak_allocated = allocated, peak

    def rename(self, pairs: Iterable[tuple[int, int]]) -> None:
        """From now on the death of `a` ends the life of `b`, for each pair (`a`, `b`)."""
        moved = [(a, self._placed.pop(b)) for a, b in pairs]
        self._placed.update(moved)

    def layout(self, allocations: Iterable[int]) -> tuple[object, ...]:
        """Where large free blocks and the large ones of `allocations` lie; small ones wander in segments that are there anyhow."""
        placed = (self._placed[a] for a in allocations)
        return tuple(self._large), tuple(block for block in placed if block[1] > SMALL)

    def _find(self, pool: list[int], size: int) -> int:
        """Row of the best block in `pool`; `len(pool)` when none holds `size` units."""
        return bisect_left(pool, size << _SHIFT)

    def _free(self, start: int, size: int, pool: list[int]) -> None:
        starts, ends = self._free_starts, self._free_ends
        after = starts.pop(start + size, 0)
        if after:
            del pool[bisect_left(pool, after << _SHIFT | (start + size))]
            size += after
        before = ends.pop(start, -1)
        if before >= 0:
            grown = starts[before]
            del pool[bisect_left(pool, grown << _SHIFT | before)]
            start, size = before, size + grown
        starts[start] = size
        ends[start + size] = start
        insort(pool, size << _SHIFT | start)

    def _grow_or_raise(self, pool: list[int], size: int, index: int) -> tuple[int, int]:
        block = self._grow(pool, size)
        if block is None:
            self.retries += 1
            self._release()
            block = self._grow(pool, size)
        if block is None:
            error = OutOfDeviceMemory(requested_bytes=size * UNIT, reserved_bytes=self.reserved * UNIT)
            error.event = index
            raise error
        return block

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _grow(self, pool: list[int], size: int) -> tuple[int, int] | None:
        """A new block of at least `size` units that is in no pool, as (start, size); None without room."""
        segment = segment_units(size)
        if not self._reserve(segment):
            return None
        start, self._top = self._top, self._top + segment + _GUARD
        self._segments[start] = segment
        return start, segment

    def _release(self) -> None:
        """Give every wholly free segment back to the device."""
        for pool in (self._large, self._small):
            kept = []
            for block in pool:
                start, size = block & _ADDRESS, block >> _SHIFT
                if self._segments.get(start) == size:
                    del self._segments[start], self._free_starts[start], self._free_ends[start + size]
                    self.reserved -= size
                else:
                    kept.append(block)
            pool[:] = kept


class ExpandableAllocator(CachingAllocator):
    """The allocator under `expandable_segments:True`.

    A pool is one address range; parts of it are mapped (used or free), the others are gaps. Growth maps pages at the
    lowest gap with enough room, together with a free block that lies right before it.
    """

    splits_large_from = 1

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        large_base = _RANGE + _GUARD
        self._gaps: dict[bool, dict[int, int]] = {True: {0: _RANGE}, False: {large_base: _RANGE}}
        self._base = {True: 0, False: large_base}

    def _find(self, pool: list[int], size: int) -> int:
        # A block with a gap behind it counts as large as it could grow, so that others are preferred.
        i = bisect_left(pool, size << _SHIFT)
        gaps = self._gaps[pool is self._small]
        while i + 1 < len(pool) and _growable(pool[i + 1], gaps) < _growable(pool[i], gaps):
            i += 1
        return i

    def _grow(self, pool: list[int], size: int) -> tuple[int, int] | None:
        small = pool is self._small
        gaps, page = self._gaps[small], SMALL_SEGMENT if small else LARGE_SEGMENT
        start = self._room(gaps, size)
        have = self._take(pool, start)
        while have < size:
            gap = start + have
            room = gaps[gap]
            mapped = -(-min(size - have, room) // page) * page
            if not self._reserve(mapped):
                if have:
                    self._put(pool, start, have)
                return None
            del gaps[gap]
            if mapped < room:
                gaps[gap + mapped] = room - mapped
            have += mapped + self._take(pool, gap + mapped)
        return start, have

    def _room(self, gaps: dict[int, int], size: int) -> int:
        """Lowest address at which free blocks and gaps together span `size` units."""
        for gap in sorted(gaps):
            start = self._free_ends.get(gap, gap)
            end = gap
            while end - start < size:
                span = gaps.get(end, 0) or self._free_starts.get(end, 0)
                if not span:
                    break
                end += span
            if end - start >= size:
                return start
        raise AssertionError("an expandable segment has run out of addresses")

    def _take(self, pool: list[int], start: int) -> int:
        """Take the free block at `start` out of its pool; returns its size, 0 when there is none."""
        size = self._free_starts.pop(start, 0)
        if size:
            del self._free_ends[start + size]
            del pool[bisect_left(pool, size << _SHIFT | start)]
        return size

    def _put(self, pool: list[int], start: int, size: int) -> None:
        self._free_starts[start] = size
        self._free_ends[start + size] = start
        insort(pool, size << _SHIFT | start)

    def _release(self) -> None:
        """Unmap every page that lies wholly inside a free block."""
        for small, pool in ((False, self._large), (True, self._small)):
            page, base = SMALL_SEGMENT if small else LARGE_SEGMENT, self._base[small]
            for block in list(pool):
                start, size = block & _ADDRESS, block >> _SHIFT
                first = base + -(-(start - base) // page) * page
                last = base + (start + size - base) // page * page
                if last <= first:
                    continue
                self._take(pool, start)
                if first > start:
                    self._put(pool, start, first - start)
                if start + size > last:
                    self._put(pool, last, start + size - last)
                self.reserved -= last - first
                self._gaps[small] = _merged({**self._gaps[small], first: last - first})


def _growable(block: int, gaps: dict[int, int]) -> int:
    start, size = block & _ADDRESS, block >> _SHIFT
    return size + gaps.get(start + size, 0)


def _merged(gaps: dict[int, int]) -> dict[int, int]:
    merged: dict[int, int] = {}
    last = -1
    for start in sorted(gaps):
        if last >= 0 and last + merged[last] == start:
            merged[last] += gaps[start]
        else:
            merged[start], last = gaps[start], start
    return merged


def segment_units(size: int) -> int:
    """Units of the segment that a request of `size` units makes the allocator ask the device for."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE
