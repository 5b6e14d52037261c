"""Section of the report about memory: measured against predicted, and allocator histories against traces."""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.errors import FileFormatError
from autofit.files import read_json_object
from autofit.memory.events import VERSION, Trace
from autofit.problem.config import TrialConfig
from benchmarks.evidence import history
from benchmarks.evidence.memory import STEPS
from benchmarks.evidence.reading import Reading, mib, percent

COUNTERS = ("peak_allocated_bytes", "peak_reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One configuration: counters of the trial, and what was predicted.

    Attributes:
        key, model, config, facts: what was run; `facts` are those of the model.
        measured: `Memory` as JSON; None when it did not complete.
        predicted: peaks without the context; None when they could not be traced (`reason` says why) or were not yet.
        context_bytes: of the device, before any trial.
    """

    key: str
    model: str
    config: TrialConfig
    facts: Mapping[str, Any]
    outcome: str
    measured: Mapping[str, Any] | None
    predicted: Mapping[str, int] | None
    reason: str | None
    context_bytes: int

    def error(self, counter: str) -> float | None:
        """Predicted less measured, relative to measured."""
        if self.measured is None or self.predicted is None or not self.measured.get(counter):
            return None
        return self.predicted[counter] / float(self.measured[counter]) - 1.0

    def to_json(self) -> dict[str, Any]:
        """For the fixture of the memory tests."""
        return {
            "model": self.model,
            "facts": dict(self.facts),
            "config": self.config.to_json(),
            "outcome": self.outcome,
            "measured": None if self.measured is None else dict(self.measured),
            "predicted": None if self.predicted is None else dict(self.predicted),
        }


def memory_rows(reading: Reading) -> list[MemoryRow]:
    """Every trial of the stage, with its prediction where there is one."""
    told = reading.rows("memory", "predicted ")
    context = reading.row("facts", "machine").get("device", {}).get("context_bytes", 0)
    return [
        MemoryRow(
            key=key,
            model=row["model"],
            config=TrialConfig.from_json(row["config"]),
            facts=row["facts"],
            outcome=row["outcome"],
            measured=(row.get("measurement") or {}).get("memory"),
            predicted=told.get(key, {}).get("predicted"),
            reason=told.get(key, {}).get("reason"),
            context_bytes=context,
        )
        for key, row in reading.rows("memory", "trial ").items()
    ]


def memory(reading: Reading) -> list[str]:
    """Errors by model, every row, the two histories."""
    rows = memory_rows(reading)
    lines = [
        f"{len(rows)} configurations of {len({row.model for row in rows})} models, {STEPS} optimizer steps each.",
        "",
    ]
    lines += [
        "### Error of the prediction by model",
        "",
        "Predicted less measured, relative to measured. Not counting the context.",
        "",
    ]
    lines += reading.table(
        ("model", "configurations", "counter", "mean of sizes", "worst under", "worst over"), _by_model(rows)
    )
    lines += [
        "### Every configuration",
        "",
        "MiB. The card's use is NVML's, of the whole card, at the end of the trial; its prediction is the context plus predicted reserved.",
        "",
    ]
    lines += reading.table(
        (
            "model",
            "configuration",
            "allocated",
            "predicted",
            "",
            "reserved",
            "predicted",
            "",
            "card used",
            "predicted",
            "smallest capacity predicted",
        ),
        [_row(row) for row in rows],
    )
    return [*lines, *_paths(reading), *_histories(reading)]


def _by_model(rows: list[MemoryRow]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    names = [*dict.fromkeys(row.model for row in rows), "all"]
    for name in names:
        for counter in COUNTERS:
            errors = [
                e for row in rows if name in (row.model, "all") and (e := row.error(counter)) is not None
            ]
            if errors:
                size = f"{100 * statistics.fmean(map(abs, errors)):.2f} %"
                worst = [f"{100 * least:+.1f} %" for least in (min(errors), max(errors))]
                found.append(
                    (name, len(errors), counter.removesuffix("_bytes").replace("_", " "), size, *worst)
                )
    return found


def _row(row: MemoryRow) -> tuple[object, ...]:
    cells: list[object] = [row.model, row.config.label()]
    if row.measured is None:
        return (*cells, row.outcome, *[None] * 8)
    told = row.predicted or {}
    for counter in COUNTERS:
        cells += [
            mib(row.measured[counter]),
            mib(told.get(counter)),
            percent(told.get(counter), row.measured[counter]),
        ]
    used = row.context_bytes + told["peak_reserved_bytes"] if told else None
    return (
        *cells,
        mib(row.measured["device_used_bytes"]),
        mib(used),
        mib(told.get("min_capacity_bytes")) if told else row.reason,
    )


def _paths(reading: Reading) -> list[str]:
    row = reading.row("memory", "native and patched traces")
    if not row:
        return []
    same = (
        "the same births, deaths and sizes"
        if row["same_events"]
        else "the same births, other deaths"
        if row["same_births"]
        else "other births"
    )
    return [
        f"A trace made beside the usable card and one made in a process that sees no card have {same}.",
        "",
    ]


def comparisons(reading: Reading) -> dict[str, dict[str, Any]]:
    """Case -> `history.compare` of its two files."""
    found = {}
    for key, row in reading.rows("memory", "snapshot ").items():
        real_path, traced_path = (reading.path / "snapshots" / name for name in row["files"])
        real = history.History.from_json(read_json_object(real_path, what="history"))
        try:
            data = json.loads(gzip.decompress(traced_path.read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise FileFormatError(f"trace {str(traced_path)!r} cannot be read: {error}") from None
        if data.get("version") == 1:  # of an earlier day: its sizes are as they were taken
            data |= {"version": VERSION, "stairs": []}
        found[key] = history.compare(real, Trace.from_json(data))
    return found


def _histories(reading: Reading) -> list[str]:
    recorder = (
        "the profiler's memory events of a CPU"
        if reading.dry_run
        else "torch's own record of the caching allocator"
    )
    lines = [
        "### Event by event",
        "",
        f"Two optimizer steps; *real* is {recorder}, *ours* the trace. Births are matched by size within each phase.",
        "",
    ]
    for key, found in comparisons(reading).items():
        births, rest = found["births"], found["unmatched_bytes"]
        lines += [f"**{key}**", ""]
        lines += reading.table(
            ("", "ours", "real"),
            [
                ("births in the steps", births["ours"], births["real"]),
                ("of them matched", births["matched"], births["matched"]),
                (
                    "matched births that die between the same births",
                    found["same_lifetimes"],
                    found["same_lifetimes"],
                ),
                ("MiB of births that are not matched", mib(rest["ours"]), mib(rest["real"])),
                (
                    "peak allocated MiB",
                    *map(mib, (found["peak_allocated_bytes"]["ours"], found["peak_allocated_bytes"]["real"])),
                ),
                (
                    "peak reserved MiB",
                    *map(mib, (found["peak_reserved_bytes"]["ours"], found["peak_reserved_bytes"]["real"])),
                ),
                (
                    "peak reserved MiB, the real events through our allocator",
                    mib(found["allocator"]["modelled_reserved_bytes"]),
                    mib(found["allocator"]["real_reserved_bytes"]),
                ),
            ],
        )
        differences = [("ours only", d["where"], d["bytes"], d["times"]) for d in found["only_ours"]]
        differences += [("real only", d["where"], d["bytes"], d["times"]) for d in found["only_real"]]
        lines += reading.table(("side", "where", "bytes", "times"), differences) if differences else []
    return lines
