"""Searches on simulated landscapes, with a hand on the runner: what is asked of it, and what goes wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import optuna

from autofit.beliefs.predict import MemoryForecast, MemoryModel
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.terms import Finding, Terms
from autofit.search.search import Check, Search
from autofit.study.journal import open_study
from autofit.study.sampler import make_sampler
from autofit.study.study import TrialStudy
from autofit.trials.landscape import Landscape
from autofit.trials.observer import Observer
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord

SAMPLERS = ("auto", "tpe", "random", "grid")
BEFORE_PLAYOFF = (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH)
INFEASIBLE = (
    Reason.OUT_OF_MEMORY,
    Reason.SUSPECTED_OUT_OF_MEMORY,
    Reason.ALLOCATOR_THRASH,
    Reason.NON_FINITE_LOSS,
)

#: (request, how many went before it) -> its result; None = as the landscape says
Script = Callable[[TrialRequest, int], TrialResult | None]


@dataclass
class Clock:
    """Seconds that pass only while trials run."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedRunner:
    """A replay that keeps what was asked of it, and in which a script decides what goes wrong.

    A trial that would take longer than its time-out ends there.
    """

    def __init__(
        self, landscape: Landscape, script: Script | None, clock: Clock, seconds: float | None
    ) -> None:
        self._replay, self._script, self._clock, self._seconds = (
            ReplayRunner(landscape),
            script,
            clock,
            seconds,
        )
        self.requests: list[TrialRequest] = []

    def run(self, request: TrialRequest) -> TrialResult:
        before = len(self.requests)
        self.requests.append(request)
        result = self._script(request, before) if self._script is not None else None
        if result is None:
            result = self._replay.run(request)
        if self._seconds is not None:
            result = replace(result, seconds=self._seconds)
        limit = request.timeout_seconds
        if limit is not None and result.seconds > limit:
            result = failed(Reason.TIMEOUT, f"no answer within {limit:.0f} s", seconds=limit)
        self._clock.now += result.seconds
        return result

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(kw_only=True)
class Play:
    """One search that can be run, and all that it leaves."""

    search: Search
    study: TrialStudy
    raw: optuna.Study
    runner: ScriptedRunner
    clock: Clock
    landscape: Landscape
    finding: Finding | None = field(default=None)

    def run(self) -> Finding:
        self.finding = self.search.run()
        return self.finding

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        return tuple(self.study.records)

    @property
    def requests(self) -> list[TrialRequest]:
        return self.runner.requests

    def asked(self, *roles: Role) -> list[TrialConfig]:
        """Configurations of the records that ran in these roles, in order."""
        return [r.config for r in self.records if r.role in roles and r.outcome is not Outcome.SKIPPED]


def prepare(
    landscape: Landscape,
    *,
    sampler: str = "auto",
    limit: int | None = None,
    memory: MemoryModel | None = None,
    path: Path | None = None,
    script: Script | None = None,
    seconds: float | None = None,
    observer: Observer | None = None,
    check: Check | None = None,
    seed: int = 0,
    **terms: Any,
) -> Play:
    """A search over all of `landscape`.

    Args:
        limit: bytes; None = all of the device.
        path: study file; None = in memory.
        script: what goes wrong.
        seconds: that each trial takes; None = as recorded.
        check: asked of the winner; None = nothing is checked.
        terms: further fields of `Terms`.
    """
    space = Space(configs=tuple(point.config for point in landscape.points))
    limit = landscape.device.total_memory_bytes if limit is None else limit
    asked = make_sampler(sampler, space=space, seed=seed, memory_limit_bytes=limit, memory=memory)
    raw = open_study(path, sampler=asked, identity={"landscape": "simulated"})
    clock = Clock()
    study = TrialStudy(raw, space, clock=clock)
    runner = ScriptedRunner(landscape, script, clock, seconds)
    fields: dict[str, Any] = {
        "effective_batch": landscape.effective_batch,
        "memory_limit_bytes": limit,
        "native_precisions": landscape.device.precisions,
        "baselines_outside_space": False,
        "seed": seed,
    }
    search = Search(
        terms=Terms(**{**fields, **terms}),
        space=space,
        study=study,
        runner=runner,
        memory=memory,
        observer=observer,
        check=check,
        clock=clock,
    )
    return Play(search=search, study=study, raw=raw, runner=runner, clock=clock, landscape=landscape)


def play(landscape: Landscape, **options: Any) -> Play:
    """`prepare`, run to its end."""
    prepared = prepare(landscape, **options)
    prepared.run()
    return prepared


def failed(reason: Reason, message: str | None = None, *, seconds: float = 1.0, **more: Any) -> TrialResult:
    """A trial that ended for `reason`."""
    outcome = Outcome.INFEASIBLE if reason in INFEASIBLE else Outcome.FAILED
    failure = Failure(reason=reason, message=message or reason.value, **more)
    return TrialResult(outcome=outcome, failure=failure, seconds=seconds)


def needed_bytes(landscape: Landscape) -> dict[TrialConfig, int]:
    """Configuration -> device bytes that it takes, context included."""
    found = {}
    for point in landscape.points:
        assert point.measurement is not None
        reserved = point.measurement.memory.peak_reserved_bytes
        assert reserved is not None
        found[point.config] = reserved + landscape.device.context_bytes
    return found


def speeds(landscape: Landscape) -> dict[TrialConfig, float]:
    """Configuration -> recorded samples per second."""
    return {
        p.config: p.measurement.samples_per_second(
            per_device_train_batch_size=p.config.per_device_train_batch_size,
            gradient_accumulation_steps=p.config.gradient_accumulation_steps,
        )
        for p in landscape.points
        if p.measurement is not None
    }


def fastest_that_fits(landscape: Landscape, limit: int) -> TrialConfig:
    """What an exhaustive search would find."""
    needed = needed_bytes(landscape)
    return max(
        (item for item in speeds(landscape).items() if needed[item[0]] <= limit), key=lambda item: item[1]
    )[0]


@dataclass
class Oracle:
    """A memory model: the landscape's own bytes times `factor`, give or take `error`."""

    needs: Mapping[TrialConfig, int]
    factor: float = 1.0
    error: float = 0.02

    def needed(self, config: TrialConfig) -> MemoryForecast | None:
        middle = self.factor * self.needs[config]
        return MemoryForecast(
            low_bytes=int(middle * (1 - self.error)),
            bytes=int(middle),
            high_bytes=int(middle * (1 + self.error)),
        )
