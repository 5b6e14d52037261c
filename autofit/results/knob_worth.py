"""What each knob was worth, from the measured trials alone. Pure.

Two views. `knob_worths`: the best speed measured with each value of a knob; nothing is held constant, so it says what giving up a value would
have cost at best, among what was tried. `waterfall`: how the speed of a baseline became the speed of the winner, knob by knob.

The waterfall walks from the baseline to the winner over measured configurations that mix only the two's values, in as many steps as
there are such configurations. A step of one knob is *measured*. A step of several knobs is split by a fit of all measured trials,

    log(speed) = constant + sum over knobs of effect(knob, value),    batch: slope * log2(batch) + bend * log2(batch)^2,

`bend` only where at least four batch sizes and one trial to spare allow it. Its shares are averaged over all orders in which the knobs of the step could be changed (Shapley). The step's total
is measured, every mixture inside it comes from the additive fit; so the average is the fitted effect plus an equal part of what the fit misses.
Knobs that the trials always changed together cannot be told apart, and are not: they stay one share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from autofit.beliefs.predict import is_memory_failure
from autofit.problem.config import Precision, Scalar, TrialConfig
from autofit.results.result import Estimate, TuneResult, by_config, estimates
from autofit.trials.soundness import departed
from autofit.trials.trial import Outcome, Reason, TrialRecord

BATCH = "per_device_train_batch_size"
SIZES_FOR_BEND = 4
NEGLIGIBLE = 1e-8

Array = npt.NDArray[np.float64]


class Evidence(StrEnum):
    """Where a share comes from."""

    MEASURED = "measured"  #: two measured configurations that differ in nothing else
    FITTED = "fitted"  #: a part of a measured step, split by the additive fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueWorth:
    """The best that was measured with one value of a knob.

    Attributes:
        value: of the knob; None where an extra is not set.
        best: the fastest feasible configuration with this value; None when none completed.
        relative: its speed as a share of the winner's; None when none completed.
        completed, misfits, unsound: configurations with this value that completed, did not fit, or fitted and trained unsoundly.
        departed: that completed, in a precision that was found to depart from fp32.
    """

    value: Scalar
    best: Estimate | None
    relative: float | None
    completed: int
    misfits: int
    unsound: int
    departed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobWorth:
    """A knob that took more than one value in trials that ran; values fastest first."""

    knob: str
    values: tuple[ValueWorth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One knob from one value to another."""

    knob: str
    before: Scalar
    after: Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What changing one knob, or several that cannot be told apart, did to the speed: it was multiplied by `factor`."""

    changes: tuple[Change, ...]
    factor: float
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From a baseline to the winner: the product of the shares is `end` over `start`.

    Attributes:
        baseline: its name among the result's baselines.
        start, end: measured.
        shares: in the order of the walk.
        fitted_trials: configurations that the fit rests on; 0 when nothing was fitted.
        miss: typical relative error of the fit on them; None when none is left to check it, or nothing was fitted.
    """

    baseline: str
    start: Estimate
    end: Estimate
    shares: tuple[Share, ...]
    fitted_trials: int = 0
    miss: float | None = None


def knobs_of(config: TrialConfig) -> dict[str, Scalar]:
    """Knob -> value; accumulation follows from the batch size, so it is not a knob."""
    values = config.to_json()
    del values["gradient_accumulation_steps"]
    return values


def measured(result: TuneResult) -> dict[str, Estimate]:
    """Configuration key -> what is known of it, for all that fit; the winner and the baselines as the result has them."""
    told = [result.best, *(b.estimate for b in result.baselines.values() if b.estimate is not None)]
    return {**estimates(result.trials), **{e.config.key(): e for e in told}}


def knob_worths(result: TuneResult, found: Mapping[str, Estimate] | None = None) -> tuple[KnobWorth, ...]:
    """Return the best measured speed per value of each knob that took more than one value.

    Args:
        result: the search.
        found: `measured(result)`, where it is at hand.
    """
    found = measured(result) if found is None else found
    ran = list(by_config([r for r in result.trials if r.outcome is not Outcome.SKIPPED]).values())
    unsound = departed(result.trials)
    names = dict.fromkeys(name for group in ran for name in knobs_of(group[0].config))
    worths = []
    for name in names:
        values = dict.fromkeys(knobs_of(group[0].config).get(name) for group in ran)
        if len(values) > 1:
            each = [_value_worth(name, value, found, ran, result.best, unsound) for value in values]
            each.sort(key=lambda w: (-(w.relative or 0.0), str(w.value)))
            worths.append(KnobWorth(knob=name, values=tuple(each)))
    return tuple(worths)


def waterfall(result: TuneResult, found: Mapping[str, Estimate] | None = None) -> Waterfall | None:
    """Return the way from the plain defaults (where they did not run: the hand recipe) to the winner; None without either.

    Args:
        result: the search.
        found: `measured(result)`, where it is at hand.
    """
    found = measured(result) if found is None else found
    for name in ("defaults", "hand_recipe"):
        baseline = result.baselines.get(name)
        if baseline is not None and baseline.estimate is not None:
            return _walk(name, baseline.estimate, result.best, list(found.values()))
    return None


def _value_worth(
    knob: str,
    value: Scalar,
    found: Mapping[str, Estimate],
    ran: Sequence[Sequence[TrialRecord]],
    winner: Estimate,
    departing: Collection[Precision],
) -> ValueWorth:
    having = [group for group in ran if knobs_of(group[0].config).get(knob) == value]
    completed = [e for e in found.values() if knobs_of(e.config).get(knob) == value]
    best = max(completed, key=lambda e: e.samples_per_second) if completed else None
    if value == knobs_of(winner.config).get(knob):
        best = winner  # among ties the winner stands for its values, whichever came out ahead by noise
    return ValueWorth(
        value=value,
        best=best,
        relative=None if best is None else best.samples_per_second / winner.samples_per_second,
        completed=len(completed),
        misfits=sum(any(map(is_memory_failure, group)) for group in having),
        unsound=sum(any(_unsound(r) for r in group) for group in having),
        departed=sum(group[0].config.precision in departing and not all(r.outcome is Outcome.FAILED or is_memory_failure(r) for r in group) for group in having),
    )


def _unsound(record: TrialRecord) -> bool:
    """Whether a trial ran, fitted, and must not win; a precision that departs is counted by itself."""
    own = record.failure is not None and record.failure.reason is not Reason.DEPARTS_FROM_FP32
    return record.outcome is Outcome.INFEASIBLE and own and not is_memory_failure(record)


def _walk(name: str, start: Estimate, end: Estimate, found: Sequence[Estimate]) -> Waterfall:
    changes = _changes(start.config, end.config)
    chain = _longest_chain(_corners(start.config, end.config, changes, found), frozenset(changes))
    shares: list[Share] = []
    fit: _Fit | None = None
    for (before, slower), (after, faster) in itertools.pairwise(chain):
        log_total = math.log(faster.samples_per_second / slower.samples_per_second)
        step = [changes[knob] for knob in changes if knob in after - before]
        if len(step) > 1:
            fit = fit or _Fit(found)
            shares += _split(step, log_total, fit, _at(start.config, end.config, before))
        else:
            shares.append(Share(changes=tuple(step), factor=math.exp(log_total), evidence=Evidence.MEASURED))
    fitted = fit is not None and any(s.evidence is Evidence.FITTED for s in shares)
    return Waterfall(
        baseline=name,
        start=start,
        end=end,
        shares=tuple(shares),
        fitted_trials=len(found) if fitted else 0,
        miss=fit.miss if fit is not None and fitted else None,
    )


def _changes(start: TrialConfig, end: TrialConfig) -> dict[str, Change]:
    before, after = knobs_of(start), knobs_of(end)
    return {
        knob: Change(knob=knob, before=before.get(knob), after=after.get(knob))
        for knob in dict.fromkeys([*before, *after])
        if before.get(knob) != after.get(knob)
    }


def _at(start: TrialConfig, end: TrialConfig, changed: frozenset[str]) -> dict[str, Scalar]:
    """The knobs' values when those in `changed` have the end's values."""
    before, after = knobs_of(start), knobs_of(end)
    names = dict.fromkeys([*before, *after])
    return {knob: (after if knob in changed else before).get(knob) for knob in names}


Corner = tuple[frozenset[str], Estimate]


def _corners(
    start: TrialConfig, end: TrialConfig, changes: Mapping[str, Change], found: Sequence[Estimate]
) -> list[Corner]:
    """Measured configurations that have either the start's or the end's value of every knob, by the set that is changed."""
    corners = []
    for estimate in found:
        values = knobs_of(estimate.config)
        changed = frozenset(k for k, change in changes.items() if values.get(k) == change.after)
        wanted = _at(start, end, changed)
        if all(values.get(k) == wanted.get(k) for k in {**values, **wanted}):
            corners.append((changed, estimate))
    return sorted(corners, key=lambda c: (len(c[0]), sorted(c[0])))


def _longest_chain(corners: Sequence[Corner], goal: frozenset[str]) -> list[Corner]:
    """The longest walk over growing sets, from none to all changed; of equal ones, the first in the order of the corners."""
    best: dict[frozenset[str], list[Corner]] = {}
    for corner in corners:
        ways = [chain for changed, chain in best.items() if changed < corner[0]]
        best[corner[0]] = [*max(ways, key=len), corner] if ways else [corner]
    return best[goal]


def _split(step: Sequence[Change], log_total: float, fit: _Fit, start: Mapping[str, Scalar]) -> list[Share]:
    """Shares of one step of several knobs; those that the trials cannot tell apart stay together."""
    contrasts = {change.knob: fit.contrast(start, change) for change in step}
    known = [change for change in step if fit.estimable(contrasts[change.knob])]
    rest = [change for change in step if change not in known]
    players = [(change,) for change in known] + ([tuple(rest)] if rest else [])
    if len(players) == 1:
        return [Share(changes=tuple(step), factor=math.exp(log_total), evidence=Evidence.MEASURED)]
    effects = [
        fit.effect(sum((contrasts[c.knob] for c in player), np.zeros(fit.width))) for player in players
    ]
    part = (log_total - math.fsum(effects)) / len(players)
    return [
        Share(changes=player, factor=math.exp(effect + part), evidence=Evidence.FITTED)
        for player, effect in zip(players, effects, strict=True)
    ]


class _Fit:
    """Least squares of log speed on the knobs of `found`."""

    def __init__(self, found: Sequence[Estimate]) -> None:
        rows = [knobs_of(e.config) for e in found]
        names = dict.fromkeys(name for row in rows for name in row if name != BATCH)
        self._levels = [
            (name, value) for name in names for value in dict.fromkeys(row.get(name) for row in rows)
        ]
        self._bend = len({row[BATCH] for row in rows}) >= SIZES_FOR_BEND
        if self._bend and _freedom(np.array([self._row(row) for row in rows])) < 1:
            self._bend = False
        self._design = np.array([self._row(row) for row in rows])
        speeds = np.log([e.samples_per_second for e in found])
        inverse = np.linalg.pinv(self._design, rcond=1e-10)
        self._solution = inverse @ speeds
        self._projection = inverse @ self._design
        freedom = _freedom(self._design)
        rest = speeds - self._design @ self._solution
        self.miss = math.expm1(math.sqrt(float(rest @ rest) / freedom)) if freedom > 0 else None

    @property
    def width(self) -> int:
        """Unknowns of the fit."""
        return int(self._design.shape[1])

    def contrast(self, start: Mapping[str, Scalar], change: Change) -> Array:
        """Return (width,) the difference that `change` makes in the design."""
        return np.asarray(self._row({**start, change.knob: change.after}) - self._row(start))

    def estimable(self, contrast: Array) -> bool:
        """Whether the trials determine this difference."""
        return bool(
            np.abs(contrast - contrast @ self._projection).max()
            < NEGLIGIBLE * max(1.0, np.abs(contrast).max())
        )

    def effect(self, contrast: Array) -> float:
        """The fitted difference of log speed."""
        return float(contrast @ self._solution)

    def _row(self, values: Mapping[str, Scalar]) -> Array:
        batch = values[BATCH]
        assert isinstance(batch, int)
        doublings = math.log2(batch)
        bend = [doublings**2] if self._bend else []
        return np.array([1.0, doublings, *bend, *(float(values.get(n) == v) for n, v in self._levels)])


def _freedom(design: Array) -> int:
    """Trials that are left to check a fit."""
    return len(design) - int(np.linalg.matrix_rank(design))
