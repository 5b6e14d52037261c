"""What to try next and when to stop: decisions from beliefs about speed and memory. Pure; Optuna is in `sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.beliefs.posterior import Array
from autofit.beliefs.predict import MemoryBelief, is_memory_failure
from autofit.beliefs.speed import Observation, SpeedModel
from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Interval, t_quantile
from autofit.trials.soundness import departed
from autofit.trials.trial import Outcome, Reason, TrialRecord, given_up
from autofit.units import format_bytes

DRAWS = 384
LEVEL = 0.95
CONTENDERS = 5
#: Completed trials after which the tolerance doubles with each further one: they find less than they cost.
PATIENCE = 10
WIDENING = 1.3  #: of the tolerance, per further trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An untested configuration and what is believed of it.

    Attributes:
        config: never run.
        samples_per_second: predicted median.
        interval: predicted 95 % interval of throughput.
        fit_probability: that it fits under the memory limit.
        beats_probability: that it fits and is faster than the best by more than the tolerance.
    """

    config: TrialConfig
    samples_per_second: float
    interval: Interval
    fit_probability: float
    beats_probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Why the search may stop.

    Attributes:
        statement: one sentence.
        tolerance: relative speed difference that was left in doubt: the asked one, or wider where patience ended.
        best: the configuration it is about.
        untested: configurations that were never run.
        contenders: the closest of them, most dangerous first.
    """

    statement: str
    tolerance: float
    best: TrialConfig
    untested: int
    contenders: tuple[Contender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The next trial, or the end.

    Attributes:
        config: what to try next; None when every configuration was tried or cannot be.
        why: one sentence.
        best: fastest configuration run so far by the model's smoothed belief; None before any completed.
        open: untested configurations that may still beat the best.
        contenders: closest untested configurations.
        certificate: present when nothing is open.
    """

    config: TrialConfig | None
    why: str
    best: TrialConfig | None
    open: int
    contenders: tuple[Contender, ...]
    certificate: Certificate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """All that a decision needs, by position among the configurations.

    Attributes:
        speed: (draws, configs) log samples/s.
        fits: (configs,) probability to fit and to run soundly.
        tested: (configs,) whether it was run, or answered without a run.
        completed: how many configurations completed.
        best: position of the fastest completed one that fits; None before any.
    """

    speed: Array
    fits: Array
    tested: np.ndarray
    completed: int
    best: int | None


class Advisor:
    """Decides over a fixed list of configurations; same records and seed, same advice.

    Args:
        configs: the space.
        speed: belief about speed over the same configurations.
        memory: belief about memory over the same configurations.
        tolerance: relative speed difference that does not matter.
        seed: of the draws.
    """

    def __init__(
        self,
        configs: Sequence[TrialConfig],
        *,
        speed: SpeedModel,
        memory: MemoryBelief,
        tolerance: float,
        seed: int,
    ) -> None:
        self._configs = tuple(configs)
        self._row = {config: row for row, config in enumerate(self._configs)}
        self._speed, self._memory = speed, memory
        self._tolerance, self._seed = tolerance, seed
        self._last: tuple[tuple[int, ...], Beliefs] | None = None

    def beliefs(self, records: Sequence[TrialRecord]) -> Beliefs:
        """Condition both models on the records; interrupted trials and configurations outside the space say nothing."""
        known = sorted(
            (r for r in records if r.config in self._row and not r.interrupted), key=lambda r: r.number
        )
        key = tuple(r.number for r in known)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._conditioned(known))
        return self._last[1]

    def _conditioned(self, known: Sequence[TrialRecord]) -> Beliefs:
        rng = np.random.default_rng([self._seed, len(known)])
        observed = [Observation.of(r.config, r.measurement) for r in known if r.measurement is not None]
        tested = np.zeros(len(self._configs), dtype=bool)
        tested[[self._row[r.config] for r in known if not _may_be_retried(r, known)]] = True
        draws = widened(self._speed.log_speed_draws(observed, DRAWS, rng), len(observed))
        fits = self._memory.update(known, rng) * soundness(self._configs, known)
        # One that completed and then did not fit at full length, trained unsoundly, or failed again and again, is no best.
        left = given_up(known) | {r.config for r in known if r.outcome is Outcome.INFEASIBLE}
        completed = sorted({row for o in observed if fits[row := self._row[o.config]] > 0.0 and o.config not in left})
        best = None
        if completed:
            best = completed[int(np.argmax(draws[:, completed].mean(axis=0)))]
        return Beliefs(speed=draws, fits=fits, tested=tested, completed=len(completed), best=best)

    def likely_fits(self, config: TrialConfig, records: Sequence[TrialRecord], level: float) -> bool | None:
        """Whether `config` fits with at least probability `level`; None while no trial and no forecast says anything."""
        if config not in self._row or not (self._memory.predicted or records):
            return None
        return bool(self.beliefs(records).fits[self._row[config]] >= level)

    def advise(self, records: Sequence[TrialRecord]) -> Advice:
        """Return the most promising untested configuration, and whether the search may end."""
        beliefs = self.beliefs(records)
        untested = np.flatnonzero(~beliefs.tested & (beliefs.fits > 0.0))
        if beliefs.best is None:
            return self._first(beliefs, untested)
        log_gain = beliefs.speed - beliefs.speed[:, [beliefs.best]]
        tolerance = self._tolerance * WIDENING ** max(0, beliefs.completed - PATIENCE)
        beats = beliefs.fits * (log_gain > np.log1p(tolerance)).mean(axis=0)
        open_rows = untested[beats[untested] > 1.0 - LEVEL]
        contenders = self._contenders(beliefs, beats, untested)
        certificate = None
        if not len(open_rows):
            certificate = self._certificate(beliefs.best, len(untested), contenders, tolerance)
        if not len(untested):
            return Advice(
                config=None, why="every configuration that can run was tried", best=self._configs[beliefs.best],
                open=0, contenders=(), certificate=certificate,
            )  # fmt: skip
        pool = open_rows if len(open_rows) else untested
        chosen = int(pool[np.argmax(expected_improvement(beliefs, log_gain, pool))])
        return Advice(
            config=self._configs[chosen],
            why=self._reason(chosen, beliefs, log_gain, float(beats[chosen]), tolerance),
            best=self._configs[beliefs.best],
            open=len(open_rows),
            contenders=contenders,
            certificate=certificate,
        )

    def _first(self, beliefs: Beliefs, untested: np.ndarray) -> Advice:
        """Before anything completed: the fastest by prior among those that most likely fit."""
        if not len(untested):
            return Advice(
                config=None, why="no configuration is left that may fit", best=None, open=0, contenders=(), certificate=None
            )  # fmt: skip
        likely = untested[beliefs.fits[untested] >= min(0.9, beliefs.fits[untested].max() - 1e-9)]
        chosen = int(likely[np.argmax(beliefs.speed[:, likely].mean(axis=0))])
        return Advice(
            config=self._configs[chosen],
            why=f"fastest by prior among those likely to fit ({beliefs.fits[chosen]:.0%})",
            best=None,
            open=len(untested),
            contenders=(),
            certificate=None,
        )

    def _contenders(self, beliefs: Beliefs, beats: Array, untested: np.ndarray) -> tuple[Contender, ...]:
        upper = beliefs.speed.mean(axis=0) + 2 * beliefs.speed.std(axis=0)
        order = sorted(untested, key=lambda row: (-beats[row], -upper[row]))[:CONTENDERS]
        found = []
        for row in order:
            low, middle, high = np.exp(np.quantile(beliefs.speed[:, row], [0.025, 0.5, 0.975]))
            found.append(
                Contender(
                    config=self._configs[row],
                    samples_per_second=float(middle),
                    interval=Interval(low=float(low), high=float(high)),
                    fit_probability=float(beliefs.fits[row]),
                    beats_probability=float(beats[row]),
                )
            )
        return tuple(found)

    def _certificate(
        self, best: int, untested: int, contenders: tuple[Contender, ...], tolerance: float
    ) -> Certificate:
        statement = (
            f"none of the {untested} untested configurations is predicted, at {100 * LEVEL:.0f} %, to fit and to beat "
            f"{self._configs[best].label()}, the best by the cost model, by more than {100 * tolerance:.3g} %"
        )
        if tolerance > self._tolerance:
            statement += f" (widened from {100 * self._tolerance:.3g} %: after {PATIENCE} completed trials each further one has to promise more)"
        if not untested:
            statement = "every configuration that can run was tried"
        return Certificate(
            statement=statement,
            tolerance=tolerance,
            best=self._configs[best],
            untested=untested,
            contenders=contenders,
        )

    def _reason(self, row: int, beliefs: Beliefs, log_gain: Array, beats: float, tolerance: float) -> str:
        gain = np.exp(np.quantile(log_gain[:, row], [0.025, 0.5, 0.975])) - 1
        text = f"predicted {gain[1]:+.0%} against the best ({gain[0]:+.0%} to {gain[2]:+.0%})"
        forecast = self._memory.forecast(self._configs[row])
        if forecast is not None:
            text += f", {format_bytes(forecast.bytes)} needed"
        return f"{text}, fits with {beliefs.fits[row]:.0%}: {beats:.0%} to win by more than {tolerance:.1%}"


def _may_be_retried(record: TrialRecord, records: Sequence[TrialRecord]) -> bool:
    """Whether a trial says nothing yet: it was interrupted, or crashed for the first time."""
    if record.outcome is not Outcome.FAILED or record.failure is None:
        return False
    if record.failure.reason is Reason.INTERRUPTED:
        return True
    again = sum(r.config == record.config and r.outcome is Outcome.FAILED for r in records)
    return record.failure.reason in (Reason.CRASH, Reason.UNREADABLE_ANSWER) and again == 1


def soundness(configs: Sequence[TrialConfig], records: Sequence[TrialRecord]) -> Array:
    """Return (configs,) probability that each runs soundly, from failures that memory does not explain.

    A value of a knob (an optimizer, a precision, ...) that never completed and failed `n` times is trusted with 0.5^n; one that completed
    once is not suspected, and one whose precision departs from fp32 is not trusted at all. The configuration itself is judged by its least trusted value.
    """
    good: set[tuple[str, object]] = set()
    bad: dict[tuple[str, object], int] = {}
    for record in records:
        if record.outcome is Outcome.COMPLETED:
            good.update(record.config.to_json().items())
        elif record.outcome in (Outcome.FAILED, Outcome.INFEASIBLE) and not is_memory_failure(record):
            for value in record.config.to_json().items():
                bad[value] = bad.get(value, 0) + 1
    trust = {value: 0.5**times for value, times in bad.items() if value not in good}
    trust |= {("precision", str(precision)): 0.0 for precision in departed(records)}
    if not trust:
        return np.ones(len(configs))
    return np.array([min(trust.get(value, 1.0) for value in c.to_json().items()) for c in configs])


def widened(draws: Array, trials: int) -> Array:
    """Draws about their mean, wider where few trials have tested the model: Student's t instead of the normal.

    The scale of the misfit is inferred from as many trials as completed; the level is one unknown of them.
    """
    factor = t_quantile(max(1, trials - 1)) / t_quantile(10**6) if trials else 1.0
    middle = draws.mean(axis=0)
    return np.asarray(middle + min(factor, 3.0) * (draws - middle), dtype=np.float64)


def expected_improvement(beliefs: Beliefs, log_gain: Array, rows: np.ndarray) -> Array:
    """Mean relative gain over the best (losses count as 0), times the probability to fit, twice.

    Once because a trial that does not fit gains nothing; once more because it also costs one, and teaches less.
    """
    gain = np.maximum(np.exp(log_gain[:, rows]) - 1.0, 0.0).mean(axis=0)
    return np.asarray(gain * beliefs.fits[rows] ** 2, dtype=np.float64)
