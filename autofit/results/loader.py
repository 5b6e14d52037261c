"""Whether the data loader holds the winner back, and which of its settings to try next. Pure; decided from records alone.

Workers, pinning, prefetching and keeping workers alive are tried one after the other on the winner; what is kept beats what was before it by more than
the tolerance, with intervals that do not overlap. Workers that stay alive save nothing inside an epoch, where trials are: they are kept when
starting them costs more than the tolerance of an epoch, and the trial is not slower. A stream that does not divide itself among workers gets none: each
would give all of its rows, which changes what is learnt.

A loader saves waiting and makes no micro-step shorter: where those of a run are shorter than before, the machine has become faster since, and the run
is counted that much slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autofit.problem.config import Scalar, TrialConfig
from autofit.results.wording import says
from autofit.trials.estimates import counted_of, estimate_of
from autofit.trials.measurement import Interval
from autofit.trials.trial import LOADER_KNOBS, Outcome, Role, TrialRecord

WAIT_SHARE = 0.1  #: of a micro-step, above which the loader counts as holding the training back
WAIT_SECONDS = 0.001  #: per batch: what workers themselves cost; shorter waits are not worth a trial
MAX_WORKERS = 16
WORKERS, PINNED, PREFETCH, PERSISTENT = LOADER_KNOBS


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStep:
    """Where the walk over loader settings stands.

    Attributes:
        best: the winner, with the settings that were kept.
        kept: those settings.
        next: what to run next; None when the walk is over.
        limits: whether the loader held the winner back to begin with.
        share: of a micro-step spent waiting for data, with the winner as the search had it.
    """

    best: TrialConfig
    kept: tuple[tuple[str, Scalar], ...] = ()
    next: TrialConfig | None = None
    limits: bool = False
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Speed, its interval and seconds of a micro-step over the runs that count, and the last record, which tells of the loader."""

    config: TrialConfig
    speed: float
    interval: Interval
    micro_seconds: float
    record: TrialRecord

    @property
    def loader(self) -> Mapping[str, Any]:
        return loader_facts(self.record)


def next_step(
    winner: TrialConfig, records: Sequence[TrialRecord], *, cores: int, cuda: bool, tolerance: float
) -> LoaderStep:
    """Return where the walk stands after `records`.

    Args:
        winner: as the search found it.
        records: all trials.
        cores: processors that workers can run on.
        cuda: whether batches are copied to a card (else pinning them has no use).
        tolerance: relative speed difference that does not matter.
    """
    start = _start(winner, records)
    if start is None or not loader_facts(start.record).get("user_data"):
        return LoaderStep(best=winner)
    share = wait_share(start.record)
    if not holds_back(start.record):
        return LoaderStep(best=winner, share=share)
    current, lost = start, set[str]()
    for name, value in _changes(start, cores=cores, cuda=cuda):
        if name in lost or not _applies(name, current, tolerance):
            continue
        config = with_setting(current.config, name, value)
        own = [r for r in records if r.config == config and r.role is Role.LOADER and not r.interrupted]
        if not own:
            return LoaderStep(best=current.config, kept=kept_settings(current.config), next=config, limits=True, share=share)
        run = _run_of(config, own)
        levelled = None if run is None else _levelled(run, current)
        if levelled is not None and _better(levelled, current, name, tolerance):
            current = levelled
        else:
            lost.add(name)
    return LoaderStep(best=current.config, kept=kept_settings(current.config), limits=True, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSettings:
    """Settings of the loader that were faster than the winner without them, and are no part of the answer.

    Attributes:
        settings: by name.
        factor: their speed over the winner's.
        cause: what became of them.
    """

    settings: tuple[tuple[str, Scalar], ...]
    factor: float
    cause: str


def lost_settings(winner: TrialConfig, records: Sequence[TrialRecord]) -> LostSettings | None:
    """The fastest settings that beat the winner beyond the noise; None where it has settings itself, or none did."""
    start = _start(winner, records)
    if start is None or kept_settings(winner):
        return None
    tried = [r.config for r in records if r.role is Role.LOADER and r.outcome is Outcome.COMPLETED]
    runs = [_levelled(run, start) for c in tried if (run := _run_of(c, [r for r in records if r.role is Role.LOADER])) is not None]
    faster = [run for run in runs if run.interval.low > start.interval.high]
    if not faster:
        return None
    best = max(faster, key=lambda run: run.speed)
    ended = [r.failure for r in records if r.config == best.config and r.role is Role.CONFIRMATION and r.failure is not None and not r.interrupted]
    cause = f"in a run at full accumulation and longest length it {says(ended[-1])}" if ended else "it was not confirmed by a run at full accumulation"
    return LostSettings(settings=kept_settings(best.config), factor=best.speed / start.speed, cause=cause)


def gain(winner: TrialConfig, records: Sequence[TrialRecord]) -> float | None:
    """How many times as fast its settings of the loader make the winner; None where it was not measured without."""
    start, run = _start(without_settings(winner), records), _start(winner, records)
    return None if start is None or run is None else _levelled(run, start).speed / start.speed


def holds_back(record: TrialRecord) -> bool:
    """Whether the training waits for data longer than `WAIT_SHARE` of its time, and longer than workers would cost."""
    wait = loader_facts(record).get("wait_seconds") or 0.0
    return bool(wait > WAIT_SECONDS) and wait_share(record) > WAIT_SHARE


def wait_share(record: TrialRecord) -> float:
    """Share of a micro-step, fetching included, that is spent waiting for the loader."""
    wait = loader_facts(record).get("wait_seconds")
    if record.measurement is None or not wait:
        return 0.0
    return float(wait / (wait + record.measurement.t_micro))


def loader_facts(record: TrialRecord) -> Mapping[str, Any]:
    """What the child said of its loader; empty where it said nothing."""
    facts = (record.measurement.facts or {}) if record.measurement is not None else {}
    return facts.get("loader") or {}


def with_setting(config: TrialConfig, name: str, value: Scalar) -> TrialConfig:
    """The configuration with one setting of its loader."""
    return config.but(extra=(*((k, v) for k, v in config.extra if k != name), (name, value)))


def kept_settings(config: TrialConfig) -> tuple[tuple[str, Scalar], ...]:
    """The loader's settings that a configuration makes, in the order in which they are tried."""
    extra = dict(config.extra)
    return tuple((name, extra[name]) for name in LOADER_KNOBS if name in extra)


def without_settings(config: TrialConfig) -> TrialConfig:
    """The configuration as the search had it."""
    return config.but(extra=tuple((name, value) for name, value in config.extra if name not in LOADER_KNOBS))


def window_seconds(winner: TrialConfig, records: Sequence[TrialRecord]) -> float:
    """How long a trial of the loader measures: about eight batches for each worker, whatever their number."""
    run = _run_of(winner, [r for r in records if r.role is not Role.CONFIRMATION])
    if run is None or run.record.measurement is None:
        return 2.0
    return min(8.0, max(2.0, 8 * (run.record.measurement.t_micro + run.record.measurement.t_fetch)))


def _start(winner: TrialConfig, records: Sequence[TrialRecord]) -> _Run | None:
    """The winner as the search had it; where that was one sample, its confirmation says how much its steps scatter."""
    run = _run_of(winner, [r for r in records if r.role is not Role.CONFIRMATION])
    longer = _run_of(winner, [r for r in records if r.role is Role.CONFIRMATION])
    if run is None or run.interval.known or longer is None or not longer.interval.known:
        return run
    return replace(run, interval=Interval(low=min(run.speed, longer.interval.low), high=max(run.speed, longer.interval.high)))


def _run_of(config: TrialConfig, records: Sequence[TrialRecord]) -> _Run | None:
    """What is known of a configuration; None when it is not feasible."""
    own = [r for r in records if r.config == config]
    estimate, told = estimate_of(own), [r for r in own if r.outcome is Outcome.COMPLETED]
    if estimate is None:
        return None
    micro = statistics.fmean(r.measurement.t_micro for r in counted_of(told) if r.measurement is not None)
    return _Run(config=config, speed=estimate.samples_per_second, interval=estimate.interval, micro_seconds=micro, record=told[-1])


def _levelled(run: _Run, before: _Run) -> _Run:
    """The run as it would have been while the machine was no faster than `before`."""
    faster = max(1.0, before.micro_seconds / run.micro_seconds)
    interval = Interval(low=run.interval.low / faster, high=run.interval.high / faster) if run.interval.known else run.interval
    return replace(run, speed=run.speed / faster, interval=interval, micro_seconds=run.micro_seconds * faster)


def _changes(start: _Run, *, cores: int, cuda: bool) -> list[tuple[str, Scalar]]:
    """Every setting worth trying, in order; those of one name stop at the first that does not help."""
    had = int(start.loader.get(WORKERS) or 0)
    most = 0 if start.loader.get("repeats") else min(MAX_WORKERS, max(2, cores))
    changes: list[tuple[str, Scalar]] = [(WORKERS, 2**i) for i in range(1, 6) if had < 2**i <= most]
    if cuda and start.loader.get(PINNED) is False:
        changes.append((PINNED, True))
    if start.loader.get(PREFETCH) is None:
        changes.append((PREFETCH, 4))
    if not start.loader.get(PERSISTENT):
        changes.append((PERSISTENT, True))
    return changes


def _applies(name: str, current: _Run, tolerance: float) -> bool:
    if name == PERSISTENT:
        return _workers(current) > 0 and _start_share(current) > tolerance
    if name == PREFETCH and _workers(current) == 0:
        return False
    return holds_back(current.record)


def _workers(run: _Run) -> int:
    return int(run.loader.get(WORKERS) or 0)


def _start_share(run: _Run) -> float:
    """What starting the workers adds to an epoch, relative to the epoch; 0 where its rows are unknown."""
    rows, first = run.loader.get("rows"), run.loader.get("first_seconds")
    if not rows or not first:
        return 0.0
    return float(first * run.speed / rows)


def _better(run: _Run, current: _Run, name: str, tolerance: float) -> bool:
    if name == PERSISTENT:
        return run.speed * (1 + tolerance) >= current.speed or run.interval.overlaps(current.interval)
    return run.speed > current.speed * (1 + tolerance) and run.interval.low > current.interval.high
