"""How far the times of one run may be off: the error of each part of a step, and the 95 % interval of the throughput that follows. Pure.

A part of the step (micro-step, fetch, update) enters by its median, or by its mean where batches differ. The variance of a mean is that of its
samples over their number; of a median it is found by drawing from the samples again. Few samples say little of their own variance, so the
interval is Student's, with the degrees of freedom of the parts joined as Welch and Satterthwaite join them. One sample says nothing of its
spread: beside a micro-step of several samples such a part is taken to scatter as that does; where the micro-step itself is one sample,
nothing is known, and the interval holds every speed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BOOTSTRAP_ROUNDS = 200
WIDEST = 300.0  #: half of an interval in logarithms, so that its ends are numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """What is known of the error of one part of a step.

    Attributes:
        variance: of its middle, in seconds squared.
        freedom: degrees of freedom that the variance rests on.
    """

    variance: float
    freedom: float


def part_error(samples: Sequence[float], *, mean: bool) -> PartError | None:
    """The error of the mean of `samples`, or of their median; None where they do not show their spread."""
    count = len(samples)
    if count < 2:
        return None
    if mean or count == 2:
        return PartError(variance=statistics.variance(samples) / count, freedom=count - 1)
    if min(samples) == max(samples):
        return PartError(variance=0.0, freedom=count - 1)
    rng = random.Random(count)
    medians = [statistics.median(rng.choices(samples, k=count)) for _ in range(BOOTSTRAP_ROUNDS)]
    return PartError(variance=statistics.pvariance(medians), freedom=count - 1)


def log_half(parts: Sequence[tuple[float, float, Sequence[float], PartError | None]]) -> float | None:
    """Half of the 95 % interval of the logarithm of a step's time; None where nothing shows its spread.

    Args:
        parts: how often the part comes in a step, its middle, its samples, its error; the micro-step first.
    """
    _, first, samples, known = parts[0]
    if known is None or first <= 0:
        return None
    relative = statistics.stdev(samples) / first if len(samples) > 1 else 0.0
    errors = [(times, error or PartError(variance=(relative * middle) ** 2, freedom=known.freedom)) for times, middle, _, error in parts]
    shares = [(times**2 * error.variance, error.freedom) for times, error in errors]
    whole = math.fsum(share for share, _ in shares)
    if whole <= 0:
        return 0.0
    freedom = whole**2 / math.fsum(share**2 / own for share, own in shares)
    seconds = math.fsum(times * middle for times, middle, _, _ in parts)
    return min(WIDEST, t_quantile(max(1, math.floor(freedom + 1e-9))) * math.sqrt(whole) / seconds)


def t_quantile(degrees_of_freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t (table to 30, normal limit beyond; NIST handbook 1.3.6.7.2)."""
    table = (
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    )  # fmt: skip
    if degrees_of_freedom < 1:
        raise ValueError("at least one degree of freedom is needed")
    return (
        table[degrees_of_freedom - 1] if degrees_of_freedom <= len(table) else 1.96 + 2.4 / degrees_of_freedom
    )
