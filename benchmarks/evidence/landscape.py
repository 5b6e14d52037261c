"""Stage *landscape*: exhaustive grids with raw samples, recorded by autofit's own recorder, one point after the other."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path

from autofit.errors import FileFormatError, SearchFailed, UserError
from autofit.problem.space import Space
from autofit.search.recording import GIVEN_UP, record_landscape
from autofit.search.scene import space_of
from autofit.trials.landscape import Landscape
from benchmarks.evidence.bench import TRIAL_SECONDS, Bench
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import Problem
from benchmarks.evidence.store import DONE, PARTIAL, Sheet, put_aside

START_SECONDS = 15.0  #: less is not worth starting a fork server and describing a model
DRY_START_SECONDS = 4.0


def planned(bench: Bench) -> list[str]:
    """Keys of this stage: one grid each."""
    return [problem.name for problem in bench.plan.problems]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Go on with the first grid that is not whole; the next one begins when it is."""
    for problem in bench.plan.problems:
        if not sheet.settled(problem.name):
            if not box.holds(START_SECONDS if bench.on_cuda else DRY_START_SECONDS):
                return
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
    ends: list[float] = [time.monotonic()]
    messages: list[str] = []

    def say(text: str) -> None:
        ends.append(time.monotonic())
        messages.append(text)
        if len(messages) % 20 == 0:
            bench.say(f"{problem.name} {text}")

    _keep(sheet, problem, space, path, [], [], None)  # a grid that is killed is in the table too
    error: str | None = None
    try:
        record_landscape(
            spec,
            path,
            timeout_seconds=box.left,
            window_seconds=bench.plan.window_seconds,
            say=say,
        )
    except (SearchFailed, UserError) as failure:
        error = failure.message.replace(str(path), path.name)
    finally:
        _keep(sheet, problem, space, path, ends, messages, error)


def _keep(
    sheet: Sheet,
    problem: Problem,
    space: Space,
    path: Path,
    ends: list[float],
    messages: list[str],
    error: str | None,
) -> None:
    recorded = count(path)
    row = sheet.rows.get(problem.name, {})
    seconds = [
        b - a for a, b in itertools.pairwise(ends[1:])
    ]  # the first one holds the start of the fork server
    points = [*row.get("point_seconds", []), *seconds]
    sheet.put(
        problem.name,
        DONE if recorded == len(space) else PARTIAL,
        file=f"landscapes/{path.name}",
        recorded_points=recorded,
        space=len(space),
        removals=[{"knob": r.knob, "value": r.value, "reason": r.reason} for r in space.removals],
        point_seconds=points,
        median_point_seconds=statistics.median(points) if points else None,
        messages=[*row.get("messages", []), *messages][-400:],
        left_out=[text for text in messages if text.endswith(f"({GIVEN_UP})")],
        error=error,
    )


def count(path: Path) -> int:
    """Points in a grid's file."""
    try:
        return len(Landscape.load(path).points)
    except FileFormatError:
        return 0
