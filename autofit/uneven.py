"""Times of batches that differ in size, brought to the size of an epoch's mean batch. Pure.

An epoch takes the sum of its batches' times, so its throughput follows from their mean, not from the median: where lengths differ, a median
forgets the long batches, which take the time. A short trial sees few batches, so its mean is off by what their mean size is off. Both are put right
by a line through (size, time), as a control variate: with slope `b` and the mean size `S` of an epoch,

    adjusted_i = seconds_i - b x (size_i - S)

whose mean estimates the mean time of an epoch, and whose spread is the machine's jitter without the data's. The order of the batches
(`lengths.spread_order`) keeps the mean size of a trial close to `S`, so that what bends the line matters little.
"""

from __future__ import annotations

import functools
import statistics

LEAST_FOR_A_SLOPE = 4
FLOOR = 0.05  #: of the mean: no adjusted time is below it


@functools.lru_cache(maxsize=4096)
def at_mean_size(seconds: tuple[float, ...], sizes: tuple[float, ...], mean_size: float | None) -> tuple[float, ...]:
    """`seconds` of each batch as they would be at the mean size.

    Args:
        seconds: at least one.
        sizes: of the batches, in any one unit, as many.
        mean_size: of an epoch's batches; None = not known, and nothing is changed.
    """
    if mean_size is None or len(seconds) != len(sizes):
        return seconds
    slope = _slope(seconds, sizes)
    floor = FLOOR * statistics.fmean(seconds)
    return tuple(max(floor, t - slope * (size - mean_size)) for t, size in zip(seconds, sizes))


def _slope(seconds: tuple[float, ...], sizes: tuple[float, ...]) -> float:
    """Seconds per unit of size by least squares, between none and twice what goes through the origin; too few batches: none."""
    middle, level = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((size - middle) ** 2 for size in sizes)
    if len(seconds) < LEAST_FOR_A_SLOPE or spread <= 0 or middle <= 0:
        return 0.0
    found = sum((size - middle) * (t - level) for size, t in zip(sizes, seconds)) / spread
    return min(max(0.0, found), 2.0 * level / middle)
