"""The report of `benchmarks.memory_accuracy`: caveats, what answered, then the figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.units import GIB, MIB
from benchmarks.memory_methods import METHODS, PACKAGES, Method
from benchmarks.memory_table import Table

LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes")
LONGEST = 20  #: rows of a table in full; of longer ones the worst are shown, all are in the JSON


def describe_machine() -> dict[str, Any]:
    """Date, processor, memory, versions, commit."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "platform": platform.platform(),
        "software": versions,
        "commit": _commit(),
        "device": "no GPU was used",
    }


def markdown(tables: Sequence[Table], methods: Sequence[Method], machine: Mapping[str, Any]) -> str:
    """The whole report."""
    lines = [f"# Memory: predicted against measured, {machine['date']}", ""]
    lines += ["## Caveats", "", *(f"- {text}" for text in caveats(tables)), ""]
    lines += ["## Summary", "", *summary_table(tables), ""]
    lines += ["## What answered", "", *answering(methods), ""]
    for table in tables:
        lines += table_lines(table)
    software = ", ".join(f"{name} {version}" for name, version in machine["software"].items())
    lines += [
        "## Machine and command",
        "",
        f"{machine['processor']}, {machine['cpus']} CPUs, {machine['memory_gib']} GiB, {machine['platform']}; {software}; commit {machine['commit']}; {machine['seconds']} s.",
        "",
        "    python -m benchmarks.memory_accuracy",
        "",
        f"The other packages: `{PACKAGES}`. All figures in bytes are in the JSON beside this file.",
    ]
    return "\n".join(lines) + "\n"


def caveats(tables: Sequence[Table]) -> list[str]:
    """What the figures do not say, first."""
    gpu = any(table.key.startswith("recorded ") for table in tables)
    device = (
        "Rows recorded on a CUDA device are included; see the evidence report of that day for how."
        if gpu
        else "No GPU took part, and no row was measured on a GPU by us: the GPU rows are thirteen published figures of one model, and the rest are CPU steps."
    )
    return [
        device,
        "Thirteen GPU rows of one architecture at one sequence length say little about other models. Kernels' hidden workspaces, SDPA, bf16 and recent cards are in none of them.",
        "The first table's best column was reached with hindsight (see there). Without it, with today's software and no switch, our figures miss the published ones by more than the nearest of the other methods does. The other methods know no software version, so which of our two columns is their counterpart is open; both are shown, apart.",
        "Peaks are compared with nvidia-smi after training: context + reserved. A method that knows no allocator is compared with the same figure.",
        *(f"`{m.name}` is not installed here and was not asked." for m in METHODS if m.version is None),
    ]


def answering(methods: Sequence[Method]) -> list[str]:
    """Each method with its version and what it cannot know."""
    lines = ["| method | version | ignores | context added |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {m.name} | {m.version} | {m.ignores} | {'no: it has a margin of its own' if m.has_overhead else 'yes'} |"
        for m in methods
    ]
    return lines


def summary_table(tables: Sequence[Table]) -> list[str]:
    """Mean absolute and worst error, per table and method."""
    lines = [
        "| rows | method | answered | mean absolute | mean | worst |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for table in tables:
        for method in table.methods:
            found = table.summary(method)
            if found is not None:
                figures = [
                    _percent(found[name], signed=name != "mean_absolute")
                    for name in ("mean_absolute", "mean", "worst")
                ]
                lines.append(
                    f"| {table.key} | {method} | {found['rows']} of {len(table.rows)} | {' | '.join(figures)} |"
                )
    return lines


def summary_lines(tables: Sequence[Table]) -> list[str]:
    """The same for a terminal."""
    lines = []
    for table in tables:
        lines += ["", table.title]
        for method in table.methods:
            found = table.summary(method)
            if found is not None:
                lines.append(
                    f"  {method:<30} mean abs {_percent(found['mean_absolute'], signed=False):>8}  worst {_percent(found['worst']):>9}  ({found['rows']} rows)"
                )
    return lines[1:]


def table_lines(table: Table) -> list[str]:
    """One table: notes, rows, residuals."""
    lines = [f"## {table.title}", "", *(line for note in table.notes for line in (note, ""))]
    if table.constants:
        fitted = ", ".join(f"{name} {value:.0f}" for name, value in table.constants.items())
        lines += [f"Fitted constants in MiB: {fitted}.", ""]
    rows = list(table.rows)
    if len(rows) > LONGEST:
        first = table.methods[0]
        rows = sorted(rows, key=lambda row: -abs(row.error(first) or 0.0))[:LONGEST]
        exact = sum(abs(row.error(first) or 0.0) < 1e-9 for row in table.rows)
        lines += [
            f"{exact} of {len(table.rows)} rows are exact to the byte ({first}). The {LONGEST} rows with the largest error of {first}; all are in the JSON.",
            "",
        ]
    lines += [
        f"| row | measured MiB | {' | '.join(table.methods)} |",
        f"| --- | ---: |{' ---: |' * len(table.methods)}",
    ]
    for row in rows:
        cells = [_cell(row.told.get(name), row.error(name)) for name in table.methods]
        lines.append(f"| {row.name} | {_mib(row.measured_bytes)} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "What is left, as far as it is known:",
        "",
        *(f"- {text}" for text in table.residuals),
        "",
    ]


def _cell(told: int | None, error: float | None) -> str:
    return "-" if told is None or error is None else f"{_mib(told)} ({_percent(error)})"


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f}" if size >= 100 * MIB else f"{size / MIB:.2f}"


def _percent(value: float, *, signed: bool = True) -> str:
    text = f"{100 * value:+.2f} %" if abs(value) < 0.0995 else f"{100 * value:+.0f} %"
    return text if signed else text.lstrip("+")


def _first(path: str, key: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith(key)), platform.machine()
    )


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"
