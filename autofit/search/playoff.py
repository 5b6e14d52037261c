"""The play-off: the leaders meet in interleaved rounds until they are separated or tied. Pure; decided from records alone.

The search ran every configuration once, minutes apart, so their order is confused by jitter and by drift. Here the leaders run in turn,
A B C, C B A, ..., and are compared within rounds, where drift is nearly common to them. After some of the rounds (looks)
two configurations are separated when a t interval of their paired differences excludes zero. The confidence is shared out over looks
and all pairs (Bonferroni: the fastest is picked by the same rounds), so that equal configurations are declared tied at least 95 % of the
time however often one looks. What moves a whole run and not its neighbours shows between rounds only, and is not assumed beside them: the variance of
a difference is what the rounds show, of all leaders or of the two, whichever is larger, and no smaller than what the samples within the runs say.

Of those tied that are also in the mean as fast as the fastest, but for the tolerance, those that leave the mathematics of training as it is come before
those that do not. The fastest of them wins, unless one with lower memory is surely no more than the tolerance slower than any other: memory is
no reason to take a chance with speed. The rounds end when that much is sure of the winner, or when what another could be expected to gain
is not worth them.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autofit.beliefs.speed import Observation
from autofit.problem.config import TrialConfig
from autofit.trials.trial import Outcome, Role, TrialRecord, given_up

CONFIDENCE = 0.95
LEADER_CONFIDENCE = 0.99  #: one run each, minutes apart, is weak evidence against a leader
MAX_LEADERS = 5  #: that begin
MAX_PLAYERS = 8  #: that ever play
LOOKS = (3, 6, 12)  #: rounds after which the leaders are compared
WORTH_A_ROUND = 0.25  #: of the tolerance: the winner's expected loss below which no more rounds are played
ONE_SIGMA = math.erf(math.sqrt(0.5))  #: confidence of an interval of one standard error to either side
SEARCH_WEIGHT = 1e-3  #: of a run in the search beside one in a round: it decides only between those that no round compares
ROUNDED = 9  #: decimals of a levelled log speed, of which the last digits are arithmetic: equal runs are equally fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Where the play-off stands.

    Attributes:
        winner: who wins if it ends now.
        tied: not separated from the fastest, the winner first.
        next_round: in which order to run next; empty when it is over.
        settled: whether the rounds sufficed: the winner loses nothing that matters against any other, or all rounds were played.
    """

    winner: TrialConfig
    tied: tuple[TrialConfig, ...]
    next_round: tuple[TrialConfig, ...] = ()
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One completed run: log of samples/s and its standard error, with what such runs are taken to drift; `jitter` is without: what its samples show."""

    log_speed: float
    error: float
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One configuration in the play-off.

    Attributes:
        config: which.
        search: its run in the search.
        rounds: its runs in the play-off by turn: two that ran in the same turn ran next to each other (see `_turns`).
        needed_bytes: memory; infinite when unknown.
        log_speed: by all runs of all leaders, without what their rounds had in common (see `_levelled`), on the level of the search.
    """

    config: TrialConfig
    search: Run
    rounds: Mapping[int, Run]
    needed_bytes: float
    log_speed: float


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
        tolerance: relative speed difference that does not matter.
        keeps: whether a configuration leaves the mathematics of training as it is; None = all do.

    Raises:
        ValueError: no configuration completed.
    """
    leaders = find_leaders(records)
    if not leaders:
        raise ValueError("no configuration completed")
    survivors, looks = _after_looks(leaders)
    sure = [one for one in survivors if looks and _surely_near(one, survivors, looks, len(leaders), tolerance)]
    winner = _choose(survivors, sure, tolerance, keeps)
    ranked = sorted(survivors, key=lambda one: (one is not winner, -one.log_speed))
    verdict = Verdict(winner=winner.config, tied=tuple(one.config for one in ranked))
    over = len(survivors) == 1 or looks == len(LOOKS) or winner in sure
    if not over and looks:
        granted = {o.config: tolerance for o in survivors if keeps is not None and keeps(winner.config) and not keeps(o.config)}
        over = _expected_loss(winner, survivors, LOOKS[looks - 1], granted) <= WORTH_A_ROUND * tolerance
    return verdict if over else replace(verdict, next_round=_order(survivors), settled=False)


def _choose(
    survivors: Sequence[Leader], sure: Sequence[Leader], tolerance: float, keeps: Callable[[TrialConfig], bool] | None
) -> Leader:
    """The winner among those that are not separated; `sure` are at most the tolerance slower than any other."""
    fastest = max(survivors, key=lambda leader: leader.log_speed)
    near = [one for one in survivors if fastest.log_speed - one.log_speed <= math.log1p(tolerance)]
    pool = [one for one in near if keeps is None or keeps(one.config)] or near
    first = max(pool, key=lambda leader: (leader.log_speed, -leader.needed_bytes))
    return min((one for one in pool if one is first or one in sure), key=lambda one: (one.needed_bytes, -one.log_speed))


def find_leaders(records: Sequence[TrialRecord]) -> list[Leader]:
    """Feasible configurations that their runs do not separate from the fastest, fastest first, few.

    The fastest of the search may have been lucky: once it has played, those that its search run alone kept out come in and catch up.
    A configuration that failed twice after the search leads no longer (see `given_up`).
    """
    groups: dict[TrialConfig, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda r: r.number):
        groups.setdefault(record.config, []).append(record)
    turns = _turns(records)
    found = [leader for group in groups.values() if (leader := _leader(group, turns)) is not None]
    found.sort(key=lambda leader: -leader.search.log_speed)
    if not found:
        return []
    found = _levelled(found)
    best = max(found, key=lambda leader: leader.log_speed)
    standard = replace(best.search, log_speed=best.log_speed)
    playing = [leader for leader in found if leader.rounds]
    waiting = [leader for leader in found if not leader.rounds and _near(leader.search, standard)]
    room = MAX_LEADERS if not playing else max(0, MAX_PLAYERS - len(playing))
    return sorted(playing + waiting[:room], key=lambda leader: -leader.search.log_speed)


def _turns(records: Sequence[TrialRecord]) -> dict[int, int]:
    """Number of a completed run in the play-off -> its turn. Nobody runs twice in one; who joins late, or had to run again, is in the turn of its neighbours."""
    turns, last, now = dict[int, int](), dict[TrialConfig, int](), 0
    for record in sorted(records, key=lambda r: r.number):
        if record.role is Role.PLAYOFF and record.outcome is Outcome.COMPLETED:
            now = max(now, last.get(record.config, -1) + 1)
            turns[record.number] = last[record.config] = now
    return turns


def _leader(group: Sequence[TrialRecord], turns: Mapping[int, int]) -> Leader | None:
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
        rounds={turns[r.number]: run_of(r) for r in runs if r.role is Role.PLAYOFF},
        needed_bytes=max((float(n) for n in needed if n is not None), default=math.inf),
        log_speed=run_of(first).log_speed,
    )


def _levelled(leaders: Sequence[Leader]) -> list[Leader]:
    """The leaders with their speeds by least squares: each run is its leader's speed and its round's drift.

    A round that was not finished, or that somebody joined later, compares those only that ran in it: a mean over each leader's own rounds
    would take the drift between rounds for a difference of speed. Who has not played has the speed of the search: no round says anything of it.
    """
    played = [leader for leader in leaders if leader.rounds]
    column = {turn: len(played) + place for place, turn in enumerate(sorted({turn for leader in played for turn in leader.rounds}))}
    rows: list[tuple[int, int | None, float]] = [(i, None, leader.search.log_speed) for i, leader in enumerate(played)]
    rows += [(i, turn, run.log_speed) for i, leader in enumerate(played) for turn, run in leader.rounds.items()]
    design, seen = np.zeros((len(rows), len(played) + len(column))), np.zeros(len(rows))
    for row, (leader, turn, value) in enumerate(rows):
        weight = SEARCH_WEIGHT if turn is None else 1.0
        design[row, leader] = weight
        if turn is not None:
            design[row, column[turn]] = weight
        seen[row] = weight * value
    solution = iter(np.linalg.lstsq(design, seen, rcond=None)[0] if played else ())
    return [replace(one, log_speed=round(float(next(solution)), ROUNDED)) if one.rounds else one for one in leaders]


def run_of(record: TrialRecord) -> Run:
    """Log speed of a completed record and its error: each part of the step weighs by its share of the time."""
    assert record.measurement is not None
    seen = Observation.of(record.config, record.measurement)
    accumulation = record.config.gradient_accumulation_steps
    parts = [(accumulation, seen.micro), (accumulation, seen.fetch), (1, seen.update)]
    known = [(times * math.exp(part.value), part) for times, part in parts if part is not None]
    seconds = math.fsum(time for time, _ in known)
    return Run(
        log_speed=math.log(record.config.effective_batch() / seconds),
        error=math.hypot(*(time / seconds * part.error for time, part in known)),
        jitter=math.hypot(*(time / seconds * part.jitter for time, part in known)),
    )


def gap(one: Leader, other: Leader, rounds: int, confidence: float, peers: Sequence[Leader] = ()) -> Gap:
    """Interval of the difference of two leaders over the first `rounds` turns in which both ran (at least two), paired.

    Args:
        one, other: compared.
        rounds: how many of their turns count.
        confidence: of the interval.
        peers: whose scatter counts too, as far as they ran in all of those turns.
    """
    turns = _met(one, other)[:rounds]
    differences = [one.rounds[turn].log_speed - other.rounds[turn].log_speed for turn in turns]
    within = statistics.fmean(one.rounds[turn].jitter ** 2 + other.rounds[turn].jitter ** 2 for turn in turns)
    beside = [peer for peer in peers if all(turn in peer.rounds for turn in turns)]
    scatter, freedom = _scatter(beside or (one, other), turns)
    variance = max(statistics.variance(differences), 2 * scatter, within)
    half = student_quantile(confidence, freedom) * math.sqrt(variance / len(turns))
    return Gap(mean=statistics.fmean(differences), half=half)


def _met(one: Leader, other: Leader) -> list[int]:
    """The turns in which both ran."""
    return sorted(one.rounds.keys() & other.rounds.keys())


def _scatter(peers: Sequence[Leader], turns: Sequence[int]) -> tuple[float, int]:
    """Variance of one run when the means of its leader and of its turn are taken out, and its degrees of freedom."""
    table = [[peer.rounds[turn].log_speed for turn in turns] for peer in peers]
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
    """Who is separated from nobody faster after the looks that the turns so far allow, and how many looks all of those have had at each other."""
    confidence = _shared_confidence(len(leaders))
    survivors = [one for one in leaders if not any(_is_slower(one, other, confidence, leaders) for other in leaders if other is not one)]
    survivors = survivors or [max(leaders, key=lambda one: one.log_speed)]
    return survivors, min((_looks(one, other) for one, other in itertools.combinations(survivors, 2)), default=0)


def _looks(one: Leader, other: Leader) -> int:
    """How many looks two leaders have had at each other."""
    return sum(len(_met(one, other)) >= look for look in LOOKS)


def _is_slower(one: Leader, other: Leader, confidence: float, leaders: Sequence[Leader]) -> bool:
    """Whether a look has separated `one` from `other`, which is faster."""
    found = (gap(other, one, look, confidence, leaders) for look in LOOKS[: _looks(one, other)])
    return any(seen.mean > seen.half for seen in found)


def _surely_near(one: Leader, others: Sequence[Leader], looks: int, leaders: int, tolerance: float) -> bool:
    """Whether `one` is at most the tolerance slower than each of `others`."""
    rounds, confidence = LOOKS[looks - 1], _shared_confidence(leaders)
    gaps = (gap(other, one, rounds, confidence, others) for other in others if other is not one)
    return all(found.mean + found.half <= math.log1p(tolerance) for found in gaps)


def _expected_loss(one: Leader, others: Sequence[Leader], rounds: int, granted: Mapping[TrialConfig, float]) -> float:
    """Relative speed that `one` is expected to lose against the fastest, at most: the sum over `others` of what each may be faster.

    For a normal difference of mean m and deviation s that is s (phi(m/s) + m/s Phi(m/s)), the opportunity cost of ranking and selection
    (Chick and Inoue, Operations Research 49, 2001). `granted` is how much faster one may be at no loss.
    """
    normal, loss = statistics.NormalDist(), 0.0
    for other in others:
        if other is not one:
            found = gap(other, one, rounds, ONE_SIGMA, others)
            mean, deviation = found.mean - granted.get(other.config, 0.0), max(found.half, 1e-12)
            loss += deviation * normal.pdf(mean / deviation) + mean * normal.cdf(mean / deviation)
    return loss


def _shared_confidence(leaders: int) -> float:
    return 1.0 - (1.0 - CONFIDENCE) / (len(LOOKS) * max(1, math.comb(leaders, 2)))


def _order(survivors: Sequence[Leader]) -> tuple[TrialConfig, ...]:
    """A B C, then C B A, ...: who has not run in the last turn does so first, and who joined late does not run alone through those before."""
    last = max((turn for leader in survivors for turn in leader.rounds), default=-1)
    behind = [leader for leader in survivors if last not in leader.rounds]
    turn = last if 0 < len(behind) < len(survivors) else last + 1
    order = sorted(behind or survivors, key=lambda leader: leader.config.key(), reverse=turn % 2 == 1)
    return tuple(leader.config for leader in order)
