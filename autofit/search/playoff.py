"""The play-off: the leaders meet in interleaved rounds until they are separated or tied. Pure; decided from records alone.

The search ran every configuration once, minutes apart, so their order is confused by jitter and by drift. Here the leaders run in turn,
A B C, C B A, ..., and are compared within rounds, where drift is nearly common to them. After some of the rounds (looks)
two configurations are separated when a t interval of their paired differences excludes zero. The confidence is shared out over looks
and all pairs (Bonferroni: the fastest is picked by the same rounds), so that equal configurations are declared tied at least 95 % of the
time however often one looks. What moves a whole run and not its neighbours shows between rounds only: the variance of a difference is what
the rounds show, of all leaders or of the two, whichever is larger, and no smaller than what the samples within the runs say.

Tied configurations are as good as each other: those that leave the mathematics of training as it is come before those that do not, and of these the
one with the lowest memory wins.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autofit.beliefs.speed import Observation
from autofit.problem.config import TrialConfig
from autofit.trials.trial import Outcome, Role, TrialRecord, given_up

CONFIDENCE = 0.95
LEADER_CONFIDENCE = 0.99  #: one run each, minutes apart, is weak evidence against a leader
MAX_LEADERS = 5  #: that begin
MAX_PLAYERS = 8  #: that ever play
LOOKS = (3, 6, 12)  #: rounds after which the leaders are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Where the play-off stands.

    Attributes:
        winner: who wins if it ends now.
        tied: not separated from the fastest, the winner first.
        next_round: in which order to run next; empty when it is over.
        settled: whether the rounds sufficed to say that those tied are as fast as each other, and nothing else is faster.
    """

    winner: TrialConfig
    tied: tuple[TrialConfig, ...]
    next_round: tuple[TrialConfig, ...] = ()
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One completed run: log of samples/s and its standard error from the samples within it."""

    log_speed: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One configuration in the play-off: its run in the search, its rounds, its memory (infinite when unknown)."""

    config: TrialConfig
    search: Run
    rounds: tuple[Run, ...]
    needed_bytes: float

    @property
    def log_speed(self) -> float:
        """Mean over the rounds, or of the search's run before the first."""
        return statistics.fmean(r.log_speed for r in self.rounds) if self.rounds else self.search.log_speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Log speed of one leader less that of another: mean and half of its interval."""

    mean: float
    half: float


def decide(
    records: Sequence[TrialRecord], *, tolerance: float, keeps: Callable[[TrialConfig], bool] | None = None
) -> Verdict:
    """Return who wins, who is tied, and what to run next.

    Args:
        records: all trials of the search and of the play-off so far; at least one configuration must be feasible.
        tolerance: relative speed difference that does not matter: a tie is settled once no larger difference is in doubt.
        keeps: whether a configuration leaves the mathematics of training as it is; None = all do.

    Raises:
        ValueError: no configuration completed.
    """
    leaders = find_leaders(records)
    if not leaders:
        raise ValueError("no configuration completed")
    survivors, looks = _after_looks(leaders)
    tied = sorted(
        survivors,
        key=lambda one: (keeps is not None and not keeps(one.config), one.needed_bytes, -one.log_speed),
    )
    over = (
        len(survivors) == 1
        or looks == len(LOOKS)
        or (looks > 0 and _settled(survivors, looks, len(leaders), tolerance))
    )
    verdict = _settle(tied, tolerance)
    return verdict if over else replace(verdict, next_round=_order(survivors), settled=False)


def _settle(tied: Sequence[Leader], tolerance: float) -> Verdict:
    """The first of `tied` wins among those that are also in their means as fast as the fastest, but for the tolerance: noise can keep
    configurations together that differ by more than a user would give for memory."""
    fastest = max(tied, key=lambda leader: leader.log_speed)
    winner = next(one for one in tied if fastest.log_speed - one.log_speed <= math.log1p(tolerance))
    others = [leader.config for leader in tied if leader is not winner]
    return Verdict(winner=winner.config, tied=(winner.config, *others))


def find_leaders(records: Sequence[TrialRecord]) -> list[Leader]:
    """Feasible configurations that their runs do not separate from the fastest, fastest first, few.

    The fastest of the search may have been lucky: once it has played, those that its search run alone kept out come in and catch up.
    A configuration that failed twice after the search leads no longer (see `given_up`).
    """
    groups: dict[TrialConfig, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda r: r.number):
        groups.setdefault(record.config, []).append(record)
    found = [leader for group in groups.values() if (leader := _leader(group)) is not None]
    found.sort(key=lambda leader: -leader.search.log_speed)
    if not found:
        return []
    best = max(found, key=lambda leader: leader.log_speed)
    standard = Run(log_speed=best.log_speed, error=best.search.error)
    playing = [leader for leader in found if leader.rounds]
    waiting = [leader for leader in found if not leader.rounds and _near(leader.search, standard)]
    room = MAX_LEADERS if not playing else max(0, MAX_PLAYERS - len(playing))
    return sorted(playing + waiting[:room], key=lambda leader: -leader.search.log_speed)


def _leader(group: Sequence[TrialRecord]) -> Leader | None:
    """The runs of one configuration; None when it never completed, was infeasible in any run, or left the play-off."""
    runs = [r for r in group if r.outcome is Outcome.COMPLETED]
    if not runs or given_up(group) or any(r.outcome is Outcome.INFEASIBLE for r in group):
        return None
    first = next((r for r in runs if r.role not in (Role.PLAYOFF, Role.CONFIRMATION)), runs[0])
    # The confirmation runs the winner alone, for longer: what it takes must not change the order among those that are tied.
    alike = [r for r in runs if r.role is not Role.CONFIRMATION] or runs
    needed = [r.measurement.memory.needed_bytes for r in alike if r.measurement is not None]
    return Leader(
        config=first.config,
        search=run_of(first),
        rounds=tuple(run_of(r) for r in runs if r.role is Role.PLAYOFF),
        needed_bytes=max((float(n) for n in needed if n is not None), default=math.inf),
    )


def run_of(record: TrialRecord) -> Run:
    """Log speed of a completed record and its error: each part of the step weighs by its share of the time."""
    assert record.measurement is not None
    seen = Observation.of(record.config, record.measurement)
    accumulation = record.config.gradient_accumulation_steps
    parts = [(accumulation * math.exp(seen.micro.value), seen.micro.error)]
    parts += [(accumulation * math.exp(seen.fetch.value), seen.fetch.error)] if seen.fetch else []
    parts += [(math.exp(seen.update.value), seen.update.error)] if seen.update else []
    seconds = math.fsum(time for time, _ in parts)
    error = math.hypot(*(time / seconds * share for time, share in parts))
    return Run(log_speed=math.log(record.config.effective_batch() / seconds), error=error)


def gap(one: Leader, other: Leader, rounds: int, confidence: float, peers: Sequence[Leader] = ()) -> Gap:
    """Interval of the difference of two leaders over their first `rounds` rounds (at least two), paired.

    Args:
        one, other: compared.
        rounds: how many of their rounds count.
        confidence: of the interval.
        peers: all that played those rounds, whose scatter counts too; these two when empty.
    """
    pairs = list(zip(one.rounds[:rounds], other.rounds[:rounds]))
    differences = [a.log_speed - b.log_speed for a, b in pairs]
    within = statistics.fmean(a.error**2 + b.error**2 for a, b in pairs)
    scatter, freedom = _scatter(peers or (one, other), rounds)
    variance = max(statistics.variance(differences), 2 * scatter, within)
    half = student_quantile(confidence, freedom) * math.sqrt(variance / len(pairs))
    return Gap(mean=statistics.fmean(differences), half=half)


def _scatter(peers: Sequence[Leader], rounds: int) -> tuple[float, int]:
    """Variance of one run when the means of its leader and of its round are taken out, and its degrees of freedom."""
    table = [[run.log_speed for run in peer.rounds[:rounds]] for peer in peers]
    whole = statistics.fmean(map(statistics.fmean, table))
    columns = [statistics.fmean(column) - whole for column in zip(*table)]
    rest = [value - statistics.fmean(row) - shift for row in table for value, shift in zip(row, columns)]
    freedom = (len(table) - 1) * (len(columns) - 1)
    return math.fsum(r**2 for r in rest) / freedom, freedom


@functools.cache
def student_quantile(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, exact: its distribution has a closed form in the angle (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_within(angle: float, freedom: int) -> float:
    """Probability that Student's t lies within +- sqrt(freedom) tan(angle)."""
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def _near(run: Run, fastest: Run) -> bool:
    z = statistics.NormalDist().inv_cdf(0.5 + LEADER_CONFIDENCE / 2)
    return fastest.log_speed - run.log_speed <= z * math.hypot(run.error, fastest.error)


def _after_looks(leaders: Sequence[Leader]) -> tuple[list[Leader], int]:
    """Who is left after the looks that the rounds so far allow, and how many those are."""
    survivors, count = list(leaders), 0
    confidence = _shared_confidence(len(leaders))
    for look in LOOKS:
        if len(survivors) == 1 or any(len(leader.rounds) < look for leader in survivors):
            break
        best = max(survivors, key=lambda s: statistics.fmean(r.log_speed for r in s.rounds[:look]))
        kept = [best]
        for other in survivors:
            if other is not best:
                found = gap(best, other, look, confidence, survivors)
                kept += [other] if found.mean <= found.half else []
        survivors, count = kept, count + 1
    return survivors, count


def _settled(survivors: Sequence[Leader], looks: int, leaders: int, tolerance: float) -> bool:
    """Whether all that is left in doubt is smaller than the tolerance: more rounds would not matter."""
    rounds, confidence = LOOKS[looks - 1], _shared_confidence(leaders)
    best = max(survivors, key=lambda leader: leader.log_speed)
    gaps = [gap(best, other, rounds, confidence, survivors) for other in survivors if other is not best]
    return all(found.mean + found.half <= tolerance for found in gaps)


def _shared_confidence(leaders: int) -> float:
    return 1.0 - (1.0 - CONFIDENCE) / (len(LOOKS) * max(1, math.comb(leaders, 2)))


def _order(survivors: Sequence[Leader]) -> tuple[TrialConfig, ...]:
    """A B C, then C B A, ...: who is behind catches up first, so that an interrupted round is completed."""
    played = min(len(leader.rounds) for leader in survivors)
    behind = [leader for leader in survivors if len(leader.rounds) == played]
    order = sorted(behind, key=lambda leader: leader.config.key(), reverse=played % 2 == 1)
    return tuple(leader.config for leader in order)
