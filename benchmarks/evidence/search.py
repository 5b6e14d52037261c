"""Stage *search*: full searches, as a user would run them, on the problems of the grids and under three memory limits."""

from __future__ import annotations

from pathlib import Path

from autofit.errors import AutofitError, NothingFits, SearchFailed
from autofit.problem.config import TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.results.result import TuneResult
from autofit.trials.trial import Outcome, Role, TrialRecord
from benchmarks.evidence.bench import TRIAL_SECONDS, Bench, Stopwatch, missing
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import Problem
from benchmarks.evidence.store import Sheet

LEAST_SECONDS, DRY_LEAST_SECONDS = 45.0, 3.0  #: a search with less than this proves nothing
SPARED_SECONDS = 5.0  #: of the box, for the end of a search


class Notes:
    """An observer that keeps what a search says, and how each trial ended."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ended: list[str] = []

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """Nothing to keep."""

    def trial_ended(self, record: TrialRecord) -> None:
        """Keep a line."""
        if record.outcome is not Outcome.SKIPPED:
            self.ended.append(
                f"{record.role} {record.config.label()}: {record.outcome} in {record.seconds:.1f} s"
            )

    def note(self, message: str) -> None:
        """Keep it."""
        self.texts.append(message)


def planned(bench: Bench) -> list[str]:
    """Keys of this stage: problem and limit."""
    return [key(problem, limit) for problem in bench.plan.problems for limit in problem.limits]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """All limits of the first problem, then the next one."""
    absent = missing("optuna")
    for problem in bench.plan.problems:
        for limit in problem.limits:
            name = key(problem, limit)
            if sheet.settled(name):
                continue
            if absent:
                sheet.fail(name, "optuna is not installed")
                continue
            if limit is not None and limit > bench.machine.total_memory_bytes:
                sheet.skip(name, "the device has less memory than this limit")
                continue
            if not box.holds(LEAST_SECONDS if bench.on_cuda else DRY_LEAST_SECONDS):
                return
            _search(bench, sheet, box, problem, limit)


def key(problem: Problem, limit: int | None) -> str:
    """Name of one search."""
    return f"{problem.name} {'no limit' if limit is None else f'{limit >> 30} GiB'}"


def result_path(bench: Bench, name: str) -> Path:
    """Where a search's answer is."""
    return bench.folder.file("searches", f"{name.replace(' ', '-')}.json")


def _search(bench: Bench, sheet: Sheet, box: Box, problem: Problem, limit: int | None) -> None:
    name, notes, watch = key(problem, limit), Notes(), Stopwatch()
    spec = _spec(bench, box, problem, limit)
    study = bench.folder.file("studies", f"{name.replace(' ', '-')}.jsonl")
    resumed = study.exists()
    from autofit.search.tuning import run_search  # Optuna, which a machine may lack

    try:
        result = run_search(spec, study=study, observer=notes)
    except AutofitError as error:
        shown = {"notes": notes.texts, "trials_ended": notes.ended, "seconds": watch.seconds}
        if isinstance(error, NothingFits):
            sheet.put(name, limit_bytes=limit, nothing_fits=error.message, **shown)
        else:
            more = error.traceback if isinstance(error, SearchFailed) else error.hint or ""
            sheet.put(name, "failed", error=f"{error.message}\n{more[-2000:]}", **shown)
        return
    path = result_path(bench, name)
    result.save(path)
    sheet.put(
        name,
        limit_bytes=limit,
        problem=problem.name,
        file=f"searches/{path.name}",
        resumed=resumed,
        bounded_seconds=spec.timeout_seconds,
        seconds=watch.seconds,
        notes=notes.texts,
        trials_ended=notes.ended,
        **_summary(result),
    )
    bench.say(
        f"{name}: {result.best.config.label()} {result.best.samples_per_second:.1f} samples/s in {watch.seconds:.0f} s"
    )


def _spec(bench: Bench, box: Box, problem: Problem, limit: int | None) -> SearchSpec:
    room = max(1.0, box.left - SPARED_SECONDS)
    return problem.spec(
        bench.device,
        memory_limit_bytes=limit,
        timeout_seconds=room if bench.plan.search_seconds is None else min(bench.plan.search_seconds, room),
        trial_timeout_seconds=TRIAL_SECONDS,
        trials=bench.plan.search_trials,
    )


def _summary(result: TuneResult) -> dict[str, object]:
    return {
        "best": result.best.to_json(),
        "label": result.best.config.label(),
        "confirmed": result.confirmed,
        "tied": [estimate.config.label() for estimate in result.tied],
        "speedup": dict(result.speedup),
        "baselines": {name: baseline.to_json() for name, baseline in result.baselines.items()},
        "search_seconds": result.cost.seconds,
        "device_seconds": result.cost.device_seconds,
        "trials": result.cost.trials,
        "out_of_memory": result.cost.out_of_memory,
        "stopped": result.stopped,
        "warnings": [warning.message for warning in result.warnings],
    }
