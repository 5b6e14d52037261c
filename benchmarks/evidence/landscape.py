"""Stage *landscape*: exhaustive grids with raw samples, recorded by autofit's own recorder, one point after the other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.errors import FileFormatError, SearchFailed, UserError, WorkerError
from autofit.problem.space import Space
from autofit.search.recording import GIVEN_UP, record_landscape
from autofit.search.scene import space_of
from autofit.trials.landscape import Landscape
from benchmarks.evidence.bench import TRIAL_SECONDS, Bench, point
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import Problem
from benchmarks.evidence.store import DONE, PARTIAL, Sheet, put_aside

START_SECONDS = 15.0  #: less is not worth starting a fork server and describing a model
DRY_START_SECONDS = 4.0
KEPT_EVERY = 20  #: points after which the row is written; the grid itself is after each


def planned(bench: Bench) -> list[str]:
    """Keys of this stage: one grid each."""
    return [problem.name for problem in bench.plan.problems]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Go on with the first grid that is not whole; the next one begins when it is."""
    for problem in bench.plan.problems:
        if not sheet.settled(problem.name):
            if not box.holds(START_SECONDS if bench.on_cuda else DRY_START_SECONDS):
                return
            with point(sheet, problem.name):
                _record(bench, sheet, box, problem)


def grid_path(bench: Bench, problem: Problem) -> Path:
    """The grid's file in the folder of this run."""
    return bench.folder.file("landscapes", f"{problem.name}.json")


def _record(bench: Bench, sheet: Sheet, box: Box, problem: Problem) -> None:
    spec = problem.spec(bench.device, trial_timeout_seconds=box.timeout(TRIAL_SECONDS))
    space, path = space_of(spec, bench.describe(problem.workload)), grid_path(bench, problem)
    if path.exists() and count(path) == 0:
        put_aside(path)
        sheet.note(f"the grid {path.name} could not be read, and was begun anew")
    told = Told(earlier=sheet.rows.get(problem.name, {}))
    _keep(sheet, problem, space, path, told, None)

    def say(text: str) -> None:
        told.add(text)
        if len(told.messages) % KEPT_EVERY == 0:
            _keep(sheet, problem, space, path, told, None)
            bench.say(f"{problem.name} {text}")

    error: str | None = None
    try:
        record_landscape(
            spec,
            path,
            timeout_seconds=box.left,
            window_seconds=bench.plan.window_seconds,
            say=say,
        )
    except (SearchFailed, UserError, WorkerError) as failure:
        error = failure.message.replace(str(path), path.name)
    finally:
        _keep(sheet, problem, space, path, told, error)


@dataclass(kw_only=True)
class Told:
    """What the recorder says of its points, and when.

    Attributes:
        earlier: the grid's row of earlier calls.
        messages: of this call.
        ends: monotonic seconds at which each came.
    """

    earlier: Mapping[str, Any]
    messages: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, text: str) -> None:
        """One more."""
        self.messages.append(text)
        self.ends.append(time.monotonic())

    def point_seconds(self) -> list[float]:
        """Of all calls; the first point of a call is left out, since it holds the start of the fork server."""
        return [*self.earlier.get("point_seconds", []), *(b - a for a, b in itertools.pairwise(self.ends))]


def _keep(sheet: Sheet, problem: Problem, space: Space, path: Path, told: Told, error: str | None) -> None:
    recorded, seconds = count(path), told.point_seconds()
    sheet.put(
        problem.name,
        DONE if recorded == len(space) else PARTIAL,
        file=f"landscapes/{path.name}",
        recorded_points=recorded,
        space=len(space),
        removals=[{"knob": r.knob, "value": r.value, "reason": r.reason} for r in space.removals],
        point_seconds=seconds,
        median_point_seconds=statistics.median(seconds) if seconds else None,
        messages=[*told.earlier.get("messages", []), *told.messages][-400:],
        left_out=[text for text in told.messages if text.endswith(f"({GIVEN_UP})")],
        error=error,
    )


def count(path: Path) -> int:
    """Points in a grid's file."""
    try:
        return len(Landscape.load(path).points)
    except FileFormatError:
        return 0
