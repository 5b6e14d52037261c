"""The rows that memory predictions are held against: published nvidia-smi figures, and real CPU steps made here and now. Runs in child processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autofit.problem.config import Precision, TrialConfig

ROOT = Path(__file__).parents[1]
BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
FOUNDING_LENGTH, CPU_BATCH, CPU_LENGTH = 512, 8, 64
V100 = "7.0"


def founding_tables() -> dict[str, dict[str, Any]]:
    """Name -> table of `tests/data/founding-measurements.json`."""
    data = json.loads((ROOT / "tests" / "data" / "founding-measurements.json").read_text(encoding="utf-8"))
    return {table["name"]: table for table in data["tables"]}


def recorded_tables() -> list[dict[str, Any]]:
    """Rows measured on a CUDA device by `benchmarks.evidence`, one document per device; empty until there was one."""
    return [
        json.loads(p.read_text(encoding="utf-8"))
        for p in sorted((ROOT / "tests" / "data").glob("memory-rows-*.json"))
    ]


def founding_name(row: dict[str, Any]) -> str:
    """`bs4`, `bs1 acc4 ckpt fp16 adafactor`."""
    parts = [f"bs{row['per_device_train_batch_size']}"]
    parts += [f"acc{row['gradient_accumulation_steps']}"] if row["gradient_accumulation_steps"] > 1 else []
    parts += ["ckpt"] if row["gradient_checkpointing"] else []
    parts += [row["precision"]] if row["precision"] != "fp32" else []
    parts += [row["optim"]] if row["optim"] != "adamw" else []
    return " ".join(parts)


def of_its_day(row: dict[str, Any], era: bool) -> int:
    """Peak reserved bytes of a founding row: with the software of January 2022 (`era`), or torch 2 with eager attention and per-parameter AdamW."""
    from autofit.memory.replay import replay
    from tests.tracing.era import trace_row

    trace = trace_row(row, era=era)
    return replay(trace.events, trace.sizes).peak_reserved_bytes


def of_today(row: dict[str, Any]) -> int:
    """Peak reserved bytes of the row's TrainingArguments with the software installed here: what `autofit estimate --attn eager` says."""
    from autofit.memory.replay import replay
    from autofit.memory.request import TraceRequest
    from autofit.problem.spec import Workload
    from autofit.tracing.run import trace

    config = TrialConfig(
        per_device_train_batch_size=row["per_device_train_batch_size"],
        gradient_accumulation_steps=row["gradient_accumulation_steps"],
        gradient_checkpointing=row["gradient_checkpointing"],
        precision=Precision(row["precision"]),
        optim={"adamw": "adamw_torch_fused"}.get(row["optim"], row["optim"]),
    )
    request = TraceRequest(
        workload=Workload(model="bert-large-uncased", seq_len=FOUNDING_LENGTH, attn_implementation="eager"),
        config=config,
        batch=row["per_device_train_batch_size"],
        compute_capability=V100,
    )
    seen = trace(request, costs=False)
    return replay(seen.events, seen.sizes).peak_reserved_bytes


def cpu_step(name: str, how: str) -> tuple[int, int]:
    """(measured, traced) peak bytes of two real optimizer steps of a small model on this CPU, its parameters included."""
    from autofit.tracing.record import trace_step
    from tests.tracing.subjects import (
        ARCHITECTURES,
        make_subject,
        model_bytes,
        real_peak,
        settings_for,
        traced_peak,
    )
    from tests.tracing.test_exactness import CONFIGURATIONS

    architecture = ARCHITECTURES[name]
    settings = settings_for(
        batch=CPU_BATCH, length=CPU_LENGTH, device_type="cpu", costs=False, **CONFIGURATIONS[how]
    )
    trace = trace_step(make_subject(architecture, batch=CPU_BATCH, length=CPU_LENGTH, device="cpu"), settings)
    measured = real_peak(architecture, settings, batch=CPU_BATCH, length=CPU_LENGTH)
    loaded = model_bytes(trace)
    return measured + loaded, traced_peak(trace) + loaded
