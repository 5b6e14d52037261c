"""Stage *founding*: the nine configurations of the founding table on this card, for some optimizer steps each, beside the figures of the V100 (one epoch of 512 samples)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.files import read_json_object
from autofit.problem.config import Precision, TrialConfig
from benchmarks.evidence.bench import Bench, point, record
from benchmarks.evidence.box import Box
from benchmarks.evidence.fidelity import overall
from benchmarks.evidence.plan import FOUNDING_TABLE, FUSED
from benchmarks.evidence.store import Sheet

TABLE = "hf_docs_v100"
OPTIMS = {"adamw": FUSED}  #: what TrainingArguments' own default is called today


def rows() -> list[Mapping[str, Any]]:
    """The table, as published."""
    tables = read_json_object(FOUNDING_TABLE, what="founding table")["tables"]
    return list(next(table for table in tables if table["name"] == TABLE)["rows"])


def config_of(row: Mapping[str, Any]) -> TrialConfig:
    """A published row as a configuration of today."""
    return TrialConfig(
        per_device_train_batch_size=row["per_device_train_batch_size"],
        gradient_accumulation_steps=row["gradient_accumulation_steps"],
        gradient_checkpointing=row["gradient_checkpointing"],
        precision=Precision(row["precision"]),
        optim=OPTIMS.get(row["optim"], row["optim"]),
    )


def planned(bench: Bench) -> list[str]:
    """Keys of this stage: labels of the configurations."""
    return [config_of(row).label() for row in rows()]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """All rows, in the table's order."""
    for row in rows():
        key = config_of(row).label()
        if sheet.settled(key):
            continue
        if not box.holds(bench.least_seconds):
            return
        with point(sheet, key):
            _run(bench, sheet, box, row, key)


def _run(bench: Bench, sheet: Sheet, box: Box, row: Mapping[str, Any], key: str) -> None:
    workload, config, steps = bench.plan.founding, config_of(row), bench.plan.founding_steps
    reason = bench.problem(workload, config)
    if reason is not None:
        sheet.skip(key, reason)
        return
    result = bench.trial(workload, config, box, optimizer_steps=steps, full_length=True)
    run_of = {} if result.measurement is None else {"long_run": overall(result.measurement, config)}
    record(sheet, key, result, config, published=dict(row), steps=steps, **run_of)
    bench.say(f"{key}: {result.outcome} in {result.seconds:.1f} s")
