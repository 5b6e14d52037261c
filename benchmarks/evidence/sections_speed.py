"""Sections of the report about speed: grids, searches, long runs, the founding table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.errors import FileFormatError
from autofit.problem.config import TrialConfig
from autofit.trials.landscape import Landscape
from benchmarks.evidence.reading import Reading, mib, percent
from benchmarks.problems import Problem, true_speed

BEST_ROWS = 8


def grids(reading: Reading) -> dict[str, Landscape]:
    """Problem -> its grid, as far as it was recorded."""
    found = {}
    for path in sorted((reading.path / "landscapes").glob("*.json")):
        try:
            found[path.stem] = Landscape.load(path)
        except FileFormatError:
            continue  # a grid without a point; the sheet says that nothing was recorded
    return found


def landscape(reading: Reading) -> list[str]:
    """Sizes of the grids, seconds per point, and the fastest points of each."""
    sheet, found = reading.sheet("landscape"), grids(reading)
    lines = reading.table(
        ("grid", "points", "of", "out of memory", "seconds per point, median", "not in the space", "left"),
        [
            (
                name,
                len(found[name].points) if name in found else 0,
                row.get("space"),
                sum(p.measurement is None for p in found[name].points) if name in found else None,
                row.get("median_point_seconds"),
                "; ".join(f"{r['knob']} {r['value']}: {r['reason']}" for r in row.get("removals", [])),
                _left(row, found.get(name)),
            )
            for name, row in sheet.rows.items()
        ],
    )
    failed = [f"- {name} {text}" for name, row in sheet.rows.items() for text in row.get("left_out", [])]
    lines += ["What failed for another reason than memory:", "", *failed, ""] if failed else []
    for name, grid in found.items():
        points = sorted((p for p in grid.points if p.measurement is not None), key=true_speed, reverse=True)
        rows = []
        for point in points[:BEST_ROWS]:
            assert point.measurement is not None
            memory = point.measurement.memory
            rows.append(
                (
                    point.config.label(),
                    true_speed(point),
                    mib(memory.peak_allocated_bytes),
                    mib(memory.peak_reserved_bytes),
                )
            )
        lines += [
            f"### {name}: the fastest",
            "",
            *reading.table(("configuration", "samples/s", "allocated MiB", "reserved MiB"), rows),
        ]
    return lines


def _left(row: Mapping[str, Any], grid: Landscape | None) -> str | None:
    """What a grid lacks, by its own points (a kill may have come after the row was written), and why."""
    left = row.get("space", 0) - (0 if grid is None else len(grid.points))
    return None if left <= 0 else f"{left} points" + (f": {row['error']}" if row.get("error") else "")


def regret_of(row: Mapping[str, Any], grid: Landscape | None) -> float | None:
    """Relative loss of a search's answer against the best recorded point under its limit, by the grid's own medians; None without either."""
    if grid is None or "best" not in row:
        return None
    limit = row.get("limit_bytes") or grid.device.total_memory_bytes
    problem = Problem(name="recorded", landscape=grid, memory_limit_bytes=limit)
    config = TrialConfig.from_json(row["best"]["config"])
    return problem.regret(config) if config in problem.truth else None


def search(reading: Reading) -> list[str]:
    """One row per search."""
    found, rows = grids(reading), []
    for key, row in reading.rows("search").items():
        if "nothing_fits" in row:
            rows.append((key, "nothing fits", *[None] * 10))
            continue
        grid = found.get(row["problem"])
        regret = regret_of(row, grid)
        space = reading.sheet("landscape").rows.get(row["problem"], {}).get("space")
        part = "" if grid is None or space in (None, len(grid.points)) else f", {len(grid.points)} of {space} points"
        speedup = row["speedup"]
        rows.append(
            (
                key,
                row["label"],
                row["best"]["samples_per_second"],
                _factor(speedup.get("defaults")),
                _factor(speedup.get("hand_recipe")),
                None if regret is None else f"{100 * regret:.1f} %{part}",
                row["trials"],
                row["out_of_memory"],
                f"{row['seconds']:.0f} of the last call" if row.get("resumed") else row["seconds"],
                row["device_seconds"],
                "yes" if row["confirmed"] else "no",
                row["stopped"],
            )
        )
    headers = (
        "search",
        "answer",
        "samples/s",
        "over defaults",
        "over hand recipe",
        "regret",
        "trials",
        "out of memory",
        "seconds",
        "in trials",
        "confirmed",
        "ended",
    )
    said = [f"- {key}: {text}" for key, row in reading.rows("search").items() for text in row.get("warnings", [])]
    return [*reading.table(headers, rows), *(["What the searches warned of:", "", *said, ""] if said else [])]


def _factor(value: float | None) -> str:
    return "no figure" if value is None else f"{value:.2f} x"


def fidelity(reading: Reading) -> list[str]:
    """Trials against long runs, then confirmations."""
    rows: list[tuple[object, ...]] = []
    for key, row in reading.rows("fidelity", "long ").items():
        if "long_run" not in row:
            rows.append((key, None, None, None, None, None, row.get("outcome")))
            continue
        long = row["long_run"]["samples_per_second"]
        before, after = (row[name].get("samples_per_second") for name in ("trial_before", "trial_after"))
        parts = row["long_run"]["samples_per_second_by_part"]
        steps = f"{row['steps']} of {row['planned_steps']}"
        rows.append(
            (
                key,
                steps,
                long,
                percent(before, long),
                percent(after, long),
                percent(parts[-1], parts[0]),
                row["long"]["outcome"],
            )
        )
    lines = reading.table(
        (
            "configuration",
            "steps",
            "long run samples/s",
            "trial before",
            "trial after",
            "last tenth to first",
            "outcome",
        ),
        rows,
    )
    return [*lines, *_confirmed(reading)]


def _confirmed(reading: Reading) -> list[str]:
    confirmed = [
        (
            key,
            f"{row['steps']} of {row['planned_steps']}",
            row["outcome"],
            row["searched_samples_per_second"],
            percent(row.get("long_run", {}).get("samples_per_second"), row["searched_samples_per_second"]),
            mib(_needed(row)),
            mib(row["limit_bytes"]),
        )
        for key, row in reading.rows("fidelity", "confirm ").items()
    ]
    return [
        "### Winners, confirmed at full length",
        "",
        *reading.table(
            (
                "search",
                "steps",
                "outcome",
                "samples/s searched",
                "confirmed",
                "context + reserved MiB",
                "limit MiB",
            ),
            confirmed,
        ),
    ]


def founding(reading: Reading) -> list[str]:
    """The nine configurations beside the V100's figures."""
    steps = sorted({row["steps"] for row in reading.rows("founding").values() if "steps" in row})
    lines = [f"Runs of {' or '.join(map(str, steps))} optimizer steps of four samples here, an epoch of 512 samples there.", ""] if steps else []
    rows = []
    for key, row in reading.rows("founding").items():
        published = row["published"]
        speed = row.get("long_run", {}).get("samples_per_second")
        used = (row.get("measurement") or {}).get("memory", {}).get("device_used_bytes")
        rows.append(
            (
                key,
                published["samples_per_second"],
                speed,
                None if speed is None else f"{speed / published['samples_per_second']:.1f} x",
                published["memory_mib"],
                mib(used),
                row["outcome"],
            )
        )
    headers = ("configuration", "V100 samples/s", "here", "", "V100 card used MiB", "here", "outcome")
    return [*lines, *reading.table(headers, rows)]


def _needed(row: Mapping[str, Any]) -> int | None:
    memory = (row.get("measurement") or {}).get("memory", {})
    reserved = memory.get("peak_reserved_bytes")
    return None if reserved is None else reserved + (memory.get("context_bytes") or 0)
