"""Peaks predicted against those of PyTorch's own allocator on the hollow device: a dated report, and the rows that the memory tests compare with.

    python -m benchmarks.hollow -- python -m benchmarks.evidence --out DIR --minutes 12 --stages facts,memory
    python -m benchmarks.hollow.memory DIR [DIR ...]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autofit.errors import UserError
from autofit.files import write_json
from autofit.units import MIB
from benchmarks.evidence.plan import ROOT
from benchmarks.evidence.reading import HOLLOW_WARNING, Reading
from benchmarks.evidence.sections_memory import MemoryRow, memory_rows

REPORTS, FIXTURE = ROOT / "benchmarks" / "reports", ROOT / "tests" / "data" / "allocator-rows.json"
COUNTERS = ("peak_allocated_bytes", "peak_reserved_bytes")
CAVEATS = (
    "A card's cuDNN and cuBLAS choose workspaces of their own, which are taken to be empty here: convolutions and cuDNN's attention need more on a card.",
    "The context is a constant here; a card's is measured at the start of every search.",
    "Whether a mask may be left out is answered as for rows without padding; every other data-dependent branch sees zeros.",
    "Of the two that are too high, t5's embedding gradients follow the token ids, which are zeros here; what vit reserves less (2 %) has no explanation yet.",
    "No speed is shown: nothing computes.",
)
COMMANDS = [line for line in (__doc__ or "").splitlines() if line.startswith("    ")]
SOFTWARE = ("torch", "cuda", "transformers", "accelerate", "bitsandbytes", "python")


def report(readings: Sequence[Reading], date: str) -> list[str]:
    """The lines of the report."""
    lines = [f"# Predicted peaks against PyTorch's own CUDA allocator, {date}", "", HOLLOW_WARNING, "", "## Caveats", ""]
    lines += [*(f"- {text}" for text in CAVEATS), "", "## How", "", *(f"    {line.strip()}" for line in COMMANDS), "", "## Errors", "", "Predicted less counted, relative to counted; without the context.", ""]
    lines += ["| software | configurations | allocated: mean, worst | reserved: mean, worst |", "| --- | --- | --- | --- |"]
    for reading in readings:
        rows = compared(reading)
        means = (f"{statistics.fmean(map(abs, errors(rows, c))):.2%}, {max(errors(rows, c), key=abs):+.2%}" for c in COUNTERS)
        lines.append(f"| {software_of(reading)} | {len(rows)} | {' | '.join(means)} |")
    for reading in readings:
        lines += ["", f"## {software_of(reading)}, {reading.device_name}", ""]
        lines += ["| configuration | allocated, MiB | predicted | reserved, MiB | predicted |", "| --- | --- | --- | --- | --- |"]
        lines += [_line(row) for row in compared(reading)]
    return lines


def compared(reading: Reading) -> list[MemoryRow]:
    """Rows with both figures."""
    return [row for row in memory_rows(reading) if row.measured is not None and row.predicted is not None]


def errors(rows: Sequence[MemoryRow], counter: str) -> list[float]:
    """Of one counter."""
    return [found for row in rows if (found := row.error(counter)) is not None]


def software_of(reading: Reading) -> str:
    """`torch 2.13.0+cu130, transformers 5.23.0, ...`."""
    software = reading.row("facts", "machine").get("software") or {}
    return ", ".join(f"{name} {software[name]}" for name in SOFTWARE if name in software)


def _line(row: MemoryRow) -> str:
    cells = [f"{row.model} {row.config.label()}"]
    for counter in COUNTERS:
        cells += [f"{row.measured[counter] / MIB:,.0f}", f"{row.error(counter):+.2%}"]  # type: ignore[index]
    return f"| {' | '.join(cells)} |"


def fixture(readings: Sequence[Reading], date: str) -> dict[str, Any]:
    """Counted peaks by software, for `tests/memory/test_trace_allocator.py`."""
    return {
        "date": date,
        "made_by": "python -m benchmarks.hollow.memory",
        "stacks": [
            {
                "software": dict(reading.row("facts", "machine").get("software") or {}),
                "device": reading.row("facts", "machine").get("device"),
                "rows": [
                    {"key": f"{row.model} {row.config.label()}", **{c: row.measured[c] for c in COUNTERS}}  # type: ignore[index]
                    for row in compared(reading)
                ],
            }
            for reading in readings
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Write report and fixture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hollow.memory", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of `benchmarks.evidence`, on the hollow device")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the report (today)")
    options = parser.parse_args(arguments)
    try:
        readings = [Reading(folder) for folder in options.folders]
        for reading in readings:
            if not reading.device_name.startswith("Hollow") or not compared(reading):
                raise UserError(f"{str(reading.path)!r} holds no rows of a hollow device")
    except UserError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    path = REPORTS / f"{options.date}-allocator.md"
    path.write_text("\n".join(report(readings, options.date)) + "\n", encoding="utf-8")
    write_json(FIXTURE, fixture(readings, options.date))
    print(f"written: {path.relative_to(ROOT)}, {FIXTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
