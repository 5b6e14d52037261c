"""Command line of the evidence; see the package."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autofit.errors import AutofitError, UserError
from benchmarks.evidence import facts, fidelity, founding, gpu_tests, landscape, memory, oom, search
from benchmarks.evidence.bench import Bench, Stopwatch
from benchmarks.evidence.box import Box, BoxExpired, Stopped, box_seconds, grace_seconds, hard_stop, stoppable
from benchmarks.evidence.plan import STAGE_NAMES, full_plan, tiny_plan
from benchmarks.evidence.store import DONE, FAILED, SKIPPED, Folder, Sheet

DRY_MINUTES = 2.9
"""Of a dry run, all stages together, on two slow cores."""


class Stage(Protocol):
    """A module that records one thing."""

    def planned(self, bench: Bench) -> list[str]:
        """Keys of its rows, in order of worth."""
        ...

    def run(self, bench: Bench, sheet: Sheet, box: Box) -> None:
        """Record what is not there yet, as far as the box goes."""
        ...


STAGES: Mapping[str, Stage] = {
    "facts": facts,
    "tests": gpu_tests,
    "oom": oom,
    "memory": memory,
    "landscape": landscape,
    "search": search,
    "fidelity": fidelity,
    "founding": founding,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of one stage: counts of rows, what is left, seconds of this call, and why it ended early."""

    stage: str
    done: int
    skipped: int
    failed: int
    left: int
    seconds: float
    note: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run or summarise, and return the exit code: 0, 1 when a stage broke, 2 for a mistake in the input."""
    options = parser().parse_args(arguments)
    try:
        if options.summarise is not None:
            return summarise_folder(options)
        return record(options)
    except AutofitError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """The options."""
    text = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description="record evidence on a CUDA machine, or report it"
    )
    text.add_argument("--out", metavar="DIR", help="where the JSON goes; an existing folder is gone on with")
    text.add_argument("--minutes", type=float, default=None, help="for all stages together (25)")
    text.add_argument("--stages", metavar="A,B", help=f"only these: {', '.join(STAGE_NAMES)}")
    text.add_argument("--device", default="cuda:0", metavar="NAME", help="cuda:0")
    text.add_argument(
        "--dry-run", action="store_true", help="tiny models on the CPU; its figures mean nothing"
    )
    text.add_argument(
        "--summarise", metavar="DIR", help="write the report of what DIR holds, and publish its grids"
    )
    text.add_argument(
        "--report-dir",
        metavar="DIR",
        help="for the report (benchmarks/reports; a dry run: in its own folder)",
    )
    text.add_argument(
        "--landscape-dir",
        metavar="DIR",
        help="for recorded grids (benchmarks/landscapes); never for a dry run's",
    )
    text.add_argument(
        "--fixture-dir", metavar="DIR", help="for the memory rows (tests/data); never for a dry run's"
    )
    return text


def record(options: argparse.Namespace) -> int:
    """Run the stages."""
    if options.out is None:
        raise UserError("no --out given", hint="name a folder for the JSON, or --summarise one")
    chosen = chosen_stages(options.stages)
    minutes = options.minutes if options.minutes is not None else DRY_MINUTES if options.dry_run else 25.0
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes must be positive, got {minutes}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are bundled presets
    folder = Folder(options.out, dry_run=options.dry_run)
    if options.dry_run:
        os.environ["AUTOFIT_CACHE_DIR"] = str(folder.path / "cache")
    plan = tiny_plan(folder.file("models", "x").parent) if options.dry_run else full_plan()
    watch = Stopwatch()
    bench = Bench(folder, plan, "cpu" if options.dry_run else checked(options.device), teller(watch))
    rows: list[Done] = []
    stopped: str | None = None
    try:
        with stoppable(), folder.held():
            folder.check(_identity(bench))
            folder.begin(shown_command(options, minutes), minutes)
            for position, name in enumerate(chosen):
                left = minutes * 60 - watch.seconds
                seconds = box_seconds(left, [plan.shares[other] for other in chosen[position:]])
                run_stage(name, bench, Box(seconds), grace_seconds(seconds, left), rows)
    except Stopped as signal_name:
        stopped = str(signal_name)
        print(f"stopped by {stopped}: what was recorded is kept", file=sys.stderr)
    except UserError:  # a full disk, say: what was recorded before it is worth its table
        if rows:
            print(table(rows, chosen, watch.seconds))
        raise
    finally:
        bench.reset()
    print(table(rows, chosen, watch.seconds))
    return 143 if stopped else int(any(row.note.startswith("broke") for row in rows))


def _identity(bench: Bench) -> dict[str, object]:
    try:
        return bench.identity()
    except UserError as error:
        raise UserError(error.message, hint="--dry-run goes through every stage on the CPU") from None


def shown_command(options: argparse.Namespace, minutes: float) -> str:
    """The command for the report; of the folder only its name, which is all that matters elsewhere."""
    words = [
        "python",
        "-m",
        "benchmarks.evidence",
        "--out",
        Path(options.out).name,
        "--minutes",
        f"{minutes:g}",
    ]
    words += ["--stages", options.stages] if options.stages else []
    words += ["--dry-run"] if options.dry_run else ["--device", options.device]
    return shlex.join(words)


def checked(device: str) -> str:
    """`cuda:N`; a CPU gives no evidence.

    Raises:
        UserError: another device.
    """
    if not device.startswith("cuda"):
        raise UserError(
            f"evidence is about CUDA devices, not {device}",
            hint="--dry-run goes through every stage on the CPU",
        )
    return "cuda:0" if device == "cuda" else device


def chosen_stages(text: str | None) -> list[str]:
    """Names from `--stages`, in order of worth.

    Raises:
        UserError: an unknown name.
    """
    wanted = list(STAGE_NAMES) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in STAGES]
    if unknown or not wanted:
        raise UserError(
            f"unknown stage {', '.join(unknown) or text!r}", hint=f"choose from {', '.join(STAGE_NAMES)}"
        )
    return [name for name in STAGE_NAMES if name in wanted]


def run_stage(name: str, bench: Bench, box: Box, grace: float, rows: list[Done]) -> None:
    """Run one stage within its box; whatever happens in it, its sheet is closed, `rows` tells of it, and the next stage can go on."""
    stage, sheet, watch, note = STAGES[name], bench.folder.sheet(name), Stopwatch(), ""
    bench.say(f"{name}: {box.seconds:.0f} s")
    try:
        try:
            with hard_stop(box.seconds + grace):
                sheet.plan(stage.planned(bench))
                stage.run(bench, sheet, box)
        except BoxExpired:
            note = "a point was cut off at the end of the box"
            bench.reset()
        except Stopped as signal_name:
            note = f"stopped by {signal_name}"
            raise
        except Exception as error:  # one stage's bug must not cost the others their time; it is kept, shown, and the exit code tells
            note = f"broke: {type(error).__name__}: {str(error)[:200]}"
            sheet.broke(traceback.format_exc())
            bench.reset()
        finally:
            sheet.close(watch.seconds, stage.planned(bench))
    finally:
        states = [row["state"] for row in sheet.rows.values()]
        rows.append(
            Done(
                stage=name,
                done=states.count(DONE),
                skipped=states.count(SKIPPED),
                failed=states.count(FAILED),
                left=len(sheet.left),
                seconds=watch.seconds,
                note=note,
            )
        )


def table(rows: Sequence[Done], chosen: Sequence[str], seconds: float) -> str:
    """What was done and what is left, for the end of a call."""
    ran = {row.stage: row for row in rows}
    lines = [["stage", "done", "skipped", "failed", "left", "seconds", ""]]
    for name in chosen:
        row = ran.get(name)
        if row is None:
            lines.append([name, "", "", "", "all", "", "not begun"])
        else:
            lines.append(
                [
                    name,
                    str(row.done),
                    str(row.skipped),
                    str(row.failed),
                    str(row.left),
                    f"{row.seconds:.0f}",
                    row.note,
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([*text, f"{seconds:.0f} s in all; the same command goes on with what is left"])


def teller(watch: Stopwatch) -> Callable[[str], None]:
    """Progress to stderr, with the seconds since the start."""

    def say(text: str) -> None:
        print(f"[{watch.seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def summarise_folder(options: argparse.Namespace) -> int:
    """Write the report."""
    from benchmarks.evidence.summarise import summarise

    optional = {
        name: Path(value)
        for name in ("report_dir", "landscape_dir", "fixture_dir")
        if (value := getattr(options, name)) is not None
    }
    for path in summarise(Path(options.summarise), date=time.strftime("%Y-%m-%d", time.gmtime()), **optional):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
