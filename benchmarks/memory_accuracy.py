"""How far predictions of training memory are from what was measured: ours beside accelerate, the closed formula, and packages from PyPI.

    python -m benchmarks.memory_accuracy [--report-dir benchmarks/reports] [--workers 2]

The same rows for everyone: the two founding tables (nvidia-smi, bert-large), rows recorded on CUDA devices where there are any, and real training steps of small
models on this machine's CPU. Prints the summary, and writes `<date>-memory-accuracy.md` and `.json`. Under five minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from autofit.files import write_json
from autofit.problem.config import Precision
from autofit.units import MIB
from benchmarks import memory_rows
from benchmarks.memory_methods import METHODS, Method, Question
from benchmarks.memory_notes import (
    CPU_NOTES,
    CPU_RESIDUALS,
    FIRST_NOTES,
    FIRST_RESIDUALS,
    SECOND_NOTES,
    SECOND_RESIDUALS,
)
from benchmarks.memory_report import describe_machine, markdown, summary_lines
from benchmarks.memory_table import Row, Table

OURS, ERA, LATER, TODAY = (
    "autofit",
    "autofit, software of its day",
    "autofit, torch 2",
    "autofit, software of today",
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report-dir", type=Path, default=Path(__file__).parent / "reports")
    parser.add_argument("--workers", type=int, default=2, help="processes that trace at a time")
    options = parser.parse_args()
    begin = time.monotonic()
    methods = [m for m in METHODS if m.version is not None]
    with ProcessPoolExecutor(
        options.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet
    ) as pool:
        tables = [*founding(pool, methods), *recorded(methods), cpu(pool, methods)]
    machine = describe_machine() | {"seconds": round(time.monotonic() - begin)}
    print("\n".join(summary_lines(tables)))
    options.report_dir.mkdir(parents=True, exist_ok=True)
    stem = options.report_dir / f"{datetime.date.today().isoformat()}-memory-accuracy"
    stem.with_suffix(".md").write_text(markdown(tables, methods, machine), encoding="utf-8")
    write_json(stem.with_suffix(".json"), document(tables, methods, machine))
    print(f"\nwritten: {stem}.md and .json ({machine['seconds']} s)")


def document(
    tables: Sequence[Table], methods: Sequence[Method], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """All figures as JSON."""
    return {
        "schema": "autofit/memory-accuracy",
        "version": 1,
        "machine": dict(machine),
        "methods": {
            m.name: {"package": m.package, "version": m.version, "ignores": m.ignores} for m in methods
        },
        "tables": {
            table.key: {
                "title": table.title,
                "summary": {name: table.summary(name) for name in table.methods},
                "constants": dict(table.constants),
                "rows": [
                    {"name": r.name, "measured_bytes": r.measured_bytes, "told_bytes": dict(r.told)}
                    for r in table.rows
                ],
            }
            for table in tables
        },
    }


def founding(pool: ProcessPoolExecutor, methods: Sequence[Method]) -> list[Table]:
    """The two published tables."""
    data = memory_rows.founding_tables()
    first, second = data["hf_docs_v100"], data["second_gpu"]
    era = list(pool.map(functools.partial(memory_rows.of_its_day, era=True), first["rows"]))
    later = list(pool.map(functools.partial(memory_rows.of_its_day, era=False), second["rows"]))
    today = list(pool.map(memory_rows.of_today, [*first["rows"], *second["rows"]]))
    context = first["context_mib"] * MIB
    names = [m.name for m in methods]
    rows = [
        Row(
            name=memory_rows.founding_name(row),
            measured_bytes=row["memory_mib"] * MIB,
            told={ERA: old + context, TODAY: new + context, **_others(methods, _bert_large(row), context)},
        )
        for row, old, new in zip(first["rows"], era, today)
    ]
    return [
        Table(
            key="hf_docs_v100",
            title=f"First founding table: bert-large, {first['gpu']}, nvidia-smi",
            rows=rows,
            methods=(ERA, TODAY, *names),
            notes=FIRST_NOTES,
            residuals=FIRST_RESIDUALS,
        ),
        _second(second["rows"], later, today[len(first["rows"]) :], methods),
    ]


def _second(
    rows: Sequence[Mapping[str, Any]], later: Sequence[int], today: Sequence[int], methods: Sequence[Method]
) -> Table:
    """The table without a known context: each method gets the constant that suits it best."""
    raw = [
        {LATER: a, TODAY: b, **_others(methods, _bert_large(row), 0)} for row, a, b in zip(rows, later, today)
    ]
    measured = [row["memory_mib"] * MIB for row in rows]
    names = (LATER, TODAY, *(m.name for m in methods))
    constants = {name: statistics.median(m - told[name] for m, told in zip(measured, raw)) for name in names}
    return Table(
        key="second_gpu",
        title="Second founding table: bert-large, a GPU that is not named, nvidia-smi summed over two cards",
        rows=[
            Row(
                name=memory_rows.founding_name(dict(row)),
                measured_bytes=m,
                told={name: int(size + constants[name]) for name, size in told.items()},
            )
            for row, m, told in zip(rows, measured, raw)
        ],
        methods=names,
        notes=SECOND_NOTES,
        residuals=SECOND_RESIDUALS,
        constants={name: value / MIB for name, value in constants.items()},
    )


def recorded(methods: Sequence[Method]) -> list[Table]:
    """Rows that `benchmarks.evidence` has recorded on CUDA devices, a table each; none where there are no such files."""
    tables = []
    for data in memory_rows.recorded_tables():
        rows = []
        for raw in data["rows"]:
            needed = (raw["measured"].get("context_bytes") or 0) + raw["measured"]["peak_reserved_bytes"]
            told = raw["predicted"]
            if told is not None:
                ours = (raw["measured"].get("context_bytes") or 0) + told["peak_reserved_bytes"]
                rows.append(
                    Row(name=f"{raw['model']} {raw['config']}", measured_bytes=needed, told={OURS: ours})
                )
        if rows:
            tables.append(
                Table(
                    key=f"recorded {data['device']['name']}",
                    title=f"Recorded on {data['device']['name']} on {data['date']}: context + peak reserved",
                    rows=rows,
                    methods=(OURS,),
                    notes=("The context is the measured one; only our own predictions were recorded.",),
                    residuals=("See the evidence report of that day.",),
                )
            )
    return tables


def cpu(pool: ProcessPoolExecutor, methods: Sequence[Method]) -> Table:
    """Real steps on this CPU: the tracer alone, without context and allocator."""
    from tests.tracing.subjects import ARCHITECTURES
    from tests.tracing.test_exactness import ALL, CONFIGURATIONS

    steps = list(pool.map(_cpu_step, ALL))
    sizes = {name: _sizes(ARCHITECTURES[name]) for name, _ in ALL}
    rows = []
    for (name, how), (measured, traced) in zip(ALL, steps):
        config, n_params = sizes[name]
        options = CONFIGURATIONS[how]
        arguments = options.get("arguments", {})
        text = ARCHITECTURES[name].inputs == "text"
        question = Question(
            config=config,
            n_params=n_params,
            batch=memory_rows.CPU_BATCH,
            seq_len=memory_rows.CPU_LENGTH,  # the images are 64 patches as well
            precision=options.get("precision", Precision.FP32),
            optim=arguments["optim"],
            checkpointing=bool(arguments.get("gradient_checkpointing")),
            accumulates=options.get("accumulation", 1) > 1,
            text=text,
            logits=ARCHITECTURES[name].labels == "tokens",
        )
        rows.append(
            Row(
                name=f"{name}, {how}",
                measured_bytes=measured,
                told={OURS: traced, **_others(methods, question, 0)},
            )
        )
    return Table(
        key="cpu",
        title=f"Real training steps on this machine's CPU: {len(rows)} rows, events of PyTorch's own allocator",
        rows=rows,
        methods=(OURS, *(m.name for m in methods)),
        notes=CPU_NOTES,
        residuals=CPU_RESIDUALS,
    )


def _quiet() -> None:
    """Keep the profiler's chatter off the terminal; what goes wrong comes back as an exception."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _cpu_step(case: tuple[str, str]) -> tuple[int, int]:
    return memory_rows.cpu_step(*case)


def _sizes(architecture: Any) -> tuple[Any, int]:
    import torch

    with torch.device("meta"):
        model = architecture.model()
    return model.config, sum(p.numel() for p in model.parameters())


def _bert_large(row: Mapping[str, Any]) -> Question:
    from transformers import BertConfig

    return Question(
        config=BertConfig(**memory_rows.BERT_LARGE),
        n_params=335_143_938,
        batch=row["per_device_train_batch_size"],
        seq_len=memory_rows.FOUNDING_LENGTH,
        precision=Precision(row["precision"]),
        optim=row["optim"],
        checkpointing=row["gradient_checkpointing"],
        accumulates=row["gradient_accumulation_steps"] > 1,
    )


def _others(methods: Sequence[Method], question: Question, context: int) -> dict[str, int]:
    found = {}
    for method in methods:
        told = method.ask(question)
        if told is not None:
            found[method.name] = told + (0 if method.has_overhead else context)
    return found


if __name__ == "__main__":
    main()
