"""From a folder of evidence to one dated report with pictures, and the grids and memory rows that the project keeps.

A dry run's report says so in its name, its title and above every table, and nothing of it is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofit.errors import UserError
from autofit.files import write_json
from autofit.trials.landscape import Landscape
from benchmarks.evidence import sections_machine, sections_memory, sections_speed
from benchmarks.evidence.bench import missing
from benchmarks.evidence.plan import ROOT, STAGE_NAMES
from benchmarks.evidence.reading import Reading, without_directories
from benchmarks.evidence.store import FAILED, SKIPPED

REPORTS, LANDSCAPES, FIXTURES = (
    ROOT / "benchmarks" / "reports",
    ROOT / "benchmarks" / "landscapes",
    ROOT / "tests" / "data",
)
Section = Callable[[Reading], list[str]]
SECTIONS: Mapping[str, tuple[str, Section]] = {
    "facts": ("Facts", sections_machine.facts),
    "tests": ("Tests marked gpu", sections_machine.tests),
    "oom": ("Out of memory", sections_machine.oom),
    "memory": ("Memory: measured and predicted", sections_memory.memory),
    "landscape": ("Grids", sections_speed.landscape),
    "search": ("Searches", sections_speed.search),
    "fidelity": ("Trials against long runs", sections_speed.fidelity),
    "founding": ("The founding table on this card", sections_speed.founding),
}
STANDING_CAVEATS = (
    "Models have random weights and synthetic samples of full length: speed and memory do not depend on their values, padding and data loading of a real set are not in here.",
    "The grids were recorded without a limit. A search under a limit may use a configuration whose allocator would have kept more than the limit "
    "had it been allowed to, and which gives back what it can instead: regret against the grid is blank then.",
    "Seconds of a search include tracing. Classes that an earlier stage or search has traced come from the cache, so that the first search of a problem is the slow one.",
    "The founding table's AdamW is today's default, `adamw_torch_fused`; its software was of January 2022.",
    "Memory of the card is NVML's, of all processes, at the end of a trial; where NVML was not there it is what the driver says is not free.",
)


def summarise(
    folder: Path,
    *,
    date: str,
    report_dir: Path | None = None,
    landscape_dir: Path | None = None,
    fixture_dir: Path | None = None,
) -> list[Path]:
    """Write the report; returns every file written, the report first.

    Args:
        folder: of `--out`.
        date: of today, `2026-01-31`.
        report_dir: None = `benchmarks/reports`, for a dry run `report` in its own folder.
        landscape_dir, fixture_dir: for recorded grids and memory rows; None = `benchmarks/landscapes` and `tests/data`. A dry run, or a hollow device, publishes nothing.

    Raises:
        UserError: no evidence in the folder, or a file that cannot be written.
    """
    reading = Reading(folder)
    directory = report_dir or (reading.path / "report" if reading.warning else REPORTS)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the report's folder {str(directory)!r} cannot be made: {error.strerror}") from None
    stem = f"{date}-{'dry-run' if reading.dry_run else 'evidence'}-{reading.slug}"
    drawn: dict[str, list[Path]] = {}
    unpainted = None
    if missing("matplotlib"):
        unpainted = "matplotlib is not installed: there are no pictures."
    else:
        from benchmarks.evidence.plots import pictures

        drawn = pictures(reading, directory, stem)
    path = directory / f"{stem}.md"
    path.write_text("\n".join(report(reading, date, drawn, unpainted)) + "\n", encoding="utf-8")
    published = (
        []
        if reading.warning
        else [
            *publish_grids(reading, landscape_dir or LANDSCAPES),
            *publish_rows(reading, fixture_dir or FIXTURES, date),
        ]
    )
    return [path, *(picture for paths in drawn.values() for picture in paths), *published]


def report(
    reading: Reading, date: str, drawn: Mapping[str, list[Path]], unpainted: str | None = None
) -> list[str]:
    """The lines of the report."""
    title = (
        f"{'DRY RUN on a CPU' if reading.dry_run else f'REHEARSAL on {reading.device_name}'}, {date}: not evidence"
        if reading.warning
        else f"Evidence on CUDA: {reading.device_name}, {date}"
    )
    lines = [f"# {title}", ""]
    lines += [reading.warning, ""] if reading.warning else []
    lines += [
        "## Caveats",
        "",
        *(f"- {text}" for text in caveats(reading)),
        *([f"- {unpainted}"] if unpainted else []),
        "",
    ]
    lines += ["## Machine, versions, commands", "", *sections_machine.machine(reading)]
    for stage in STAGE_NAMES:
        heading, section = SECTIONS[stage]
        lines += [f"## {heading}", ""]
        if not reading.ran(stage):
            lines += ["Not measured.", ""]
            continue
        lines += section(reading)
        for picture in drawn.get(stage, []):
            lines += [f"![{picture.stem}]({picture.name})", ""]
    return [without_directories(line) for line in lines]


def caveats(reading: Reading) -> list[str]:
    """What was not measured, what failed, and what always holds, in this order."""
    found = []
    for stage in STAGE_NAMES:
        if not reading.ran(stage):
            found.append(f"*{stage}* was not run.")
            continue
        sheet = reading.sheet(stage)
        if sheet.left:
            names = ", ".join(sheet.left[:6]) + (", ..." if len(sheet.left) > 6 else "")
            found.append(f"*{stage}*: {len(sheet.left)} left, not at all or not wholly measured ({names}).")
        failures: dict[str, list[str]] = {}
        for key, row in sheet.rows.items():
            if row["state"] == FAILED:
                failures.setdefault("" if stage == "tests" else _why(row), []).append(key)
        for why, failed in failures.items():
            names = f"{', '.join(failed[:6])}{', ...' if len(failed) > 6 else ''}"
            found.append(f"*{stage}*: {len(failed)} failed ({names}){why}.")
        reasons: dict[str, int] = {}
        for row in sheet.rows.values():
            if row["state"] == SKIPPED:
                reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
        found += [f"*{stage}*: {count} skipped: {reason}." for reason, count in reasons.items()]
        found += [f"*{stage}*: {note}." for note in sheet.notes]
        if stage == "landscape":
            lost = [name for name, row in sheet.rows.items() if row.get("recorded_points") and name not in sections_speed.grids(reading)]
            found += [f"*{stage}*: the grid {name} cannot be read." for name in lost]
        if sheet.errors:
            found.append(f"*{stage}* broke: `{sheet.errors[-1].strip().splitlines()[-1][:200]}`.")
    many = f"{reading.machines} machines, or one that was started anew, each with one card of this kind: some differences between stages may be theirs."
    return [*found, many if reading.machines > 1 else "One machine, one card, one day.", *STANDING_CAVEATS]


def _why(row: Mapping[str, Any]) -> str:
    """The first line of what a failed row says."""
    said = row.get("error") or (row.get("failure") or {}).get("message") or ""
    first = next(iter(str(said).strip().splitlines()), "")
    return f": {first[:160].rstrip('.')}" if first else ""


def publish_grids(reading: Reading, directory: Path) -> list[Path]:
    """Copy the recorded grids to where benchmarks and tests read them; each says how much of its space it holds."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, grid in sections_speed.grids(reading).items():
        row = reading.sheet("landscape").rows.get(name, {})
        spec = {**grid.spec, "space_size": row.get("space"), "complete": row.get("space") == len(grid.points)}
        path = directory / f"{reading.slug}-{name}.json"
        Landscape(points=grid.points, device=grid.device, spec=spec, software=grid.software).save(path)
        written.append(path)
    return written


def publish_rows(reading: Reading, directory: Path, date: str) -> list[Path]:
    """Write the memory rows as a fixture of the memory tests; nothing when there are none."""
    rows = [row for row in sections_memory.memory_rows(reading) if row.measured is not None]
    if not rows:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    machine = reading.row("facts", "machine")
    path = directory / f"memory-rows-{reading.slug}.json"
    data = {
        "schema": "autofit/memory-rows",
        "version": 1,
        "date": date,
        "device": machine.get("device"),
        "software": machine.get("software"),
        "rows": [row.to_json() for row in rows],
    }
    write_json(path, data)
    return [path]
