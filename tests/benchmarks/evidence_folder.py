"""A folder of evidence as a card would have left it, made by hand for tests of the report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from autofit.devices.device import Device
from autofit.memory.events import Facts, Moment
from autofit.memory.trace_builder import TraceBuilder
from autofit.problem.config import Precision, TrialConfig
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.units import GIB, MIB
from benchmarks.evidence.history import History
from benchmarks.evidence.store import Folder

CARD = Device(
    kind="cuda",
    name="NVIDIA Imaginary 100",
    total_memory_bytes=32 * GIB,
    free_memory_bytes=31 * GIB,
    context_bytes=GIB,
    compute_capability="9.0",
    precisions=(Precision.FP32, Precision.BF16),
)
IDENTITY = {"device": CARD.name, "torch": "2.11.0", "transformers": "5.17.0"}
SMALL, LARGE = (
    TrialConfig(per_device_train_batch_size=b, gradient_accumulation_steps=8 // b) for b in (2, 8)
)


def measurement(seconds: float, reserved: int) -> Measurement:
    return Measurement(
        micro_step_seconds=(seconds, seconds, seconds),
        fetch_seconds=(0.0,),
        update_seconds=(0.01,),
        memory=Memory(
            peak_allocated_bytes=reserved - 100 * MIB,
            peak_reserved_bytes=reserved,
            context_bytes=GIB,
            device_used_bytes=reserved + GIB,
        ),
        optimizer_steps=2,
    )


def grid() -> Landscape:
    """The large batch is faster and takes 20 GiB."""
    points = (
        Point(config=SMALL, measurement=measurement(0.1, 4 * GIB)),
        Point(config=LARGE, measurement=measurement(0.2, 20 * GIB)),
    )
    return Landscape(points=points, device=CARD, spec={"model": "bert", "effective_batch": 8})


def make(path: Path, *, dry_run: bool = False, device: str = CARD.name) -> Folder:
    """Every kind of row that the report reads."""
    folder = Folder(path, dry_run=dry_run)
    folder.check({**IDENTITY, "device": device, "dry_run": dry_run})
    folder.begin("python -m benchmarks.evidence --out evidence --minutes 25", 25.0)
    facts = folder.sheet("facts")
    facts.put(
        "machine",
        device=CARD.to_json(),
        software={"torch": "2.11.0", "driver": "580.1"},
        missing_packages={"bitsandbytes": "not installed"},
        host={"system": "Linux", "cpus": 16, "memory_bytes": 128 * GIB},
        nvidia_smi={"name": CARD.name},
    )
    facts.put(
        "context",
        steps=[
            {"step": "first tensor", "context_bytes": 500 * MIB, "reserved_bytes": 2 * MIB, "seconds": 0.3}
        ],
        matrix_tflops={"bf16": 700.0},
    )
    facts.put("start forked", import_seconds=4.0, first_word_seconds=[0.02, None], hung=1)
    _tests_and_oom(folder)
    _memory(folder)
    _speed(folder)
    return folder


def _tests_and_oom(folder: Folder) -> None:
    tests = folder.sheet("tests")
    tests.put("tests/gpu/test_a.py::test_good", seconds=1.0)
    tests.fail("tests/gpu/test_a.py::test_bad", "assert 1 == 2")
    tests.put("pytest -m gpu", exit_status=1, failed=["tests/gpu/test_a.py::test_bad"])
    folder.sheet("oom").put(
        "provoked forward",
        phase="forward",
        limit_bytes=3 * GIB,
        error={
            "types": ["torch.OutOfMemoryError"],
            "message": "CUDA out of memory. Tried to allocate 64.00 GiB.",
        },
        judged={"reason": "out_of_memory"},
        at_failure={"reserved_bytes": 2 * GIB},
        after_release={"reserved_bytes": 0},
        usable=True,
    )


def _memory(folder: Folder) -> None:
    sheet = folder.sheet("memory")
    measured = measurement(0.1, 4 * GIB)
    row: dict[str, Any] = {
        "config": SMALL.to_json(),
        "model": "bert",
        "facts": {"task": "x"},
        "outcome": "completed",
    }
    sheet.put("trial bert small", measurement=measured.to_json(), **row)
    peaks = {
        "peak_allocated_bytes": 4 * GIB,
        "peak_reserved_bytes": int(4.4 * GIB),
        "min_capacity_bytes": 4 * GIB,
    }
    sheet.put("predicted bert small", model="bert", config=SMALL.to_json(), predicted=peaks, reason=None)
    sheet.put("native and patched traces", same_births=True, same_events=True)
    builder = TraceBuilder()
    builder.mark(Moment.FORWARD)
    builder.alloc(8 * MIB, "aten.relu.default")
    real = History(events=(0,), sizes=(8 * MIB,), segments=((0, 8 * MIB),), marks=((0, "forward"),))
    folder.file("snapshots", "history-0.json").write_text(json.dumps(real.to_json()))
    packed = gzip.compress(json.dumps(builder.build(Facts(batch=2)).to_json()).encode())
    folder.file("snapshots", "traced-0.json.gz").write_bytes(packed)
    sheet.put("snapshot bert small", files=["history-0.json", "traced-0.json.gz"])
    sheet.close(60.0, ["trial bert small", "trial bert large"])


def _speed(folder: Folder) -> None:
    grid().save(folder.file("landscapes", "bert-8.json"))
    folder.sheet("landscape").put(
        "bert-8", recorded_points=2, space=4, median_point_seconds=1.5, removals=[], error=None
    )
    common = {
        "problem": "bert-8",
        "trials": 7,
        "out_of_memory": 1,
        "seconds": 60.0,
        "device_seconds": 30.0,
        "stopped": "nothing better is left",
        "warnings": ["3 trials failed"],
    }
    for name, limit, config, speed in (("no limit", None, SMALL, 20.0), ("16 GiB", 16 * GIB, SMALL, 20.0)):
        folder.sheet("search").put(
            f"bert-8 {name}",
            limit_bytes=limit,
            label=config.label(),
            best={"config": config.to_json(), "samples_per_second": speed},
            speedup={"defaults": 1.5, "hand_recipe": None},
            confirmed=True,
            **common,
        )
    runs = {
        name: {"samples_per_second": speed} for name, speed in (("trial_before", 19.0), ("trial_after", 21.0))
    }
    long_run = {"samples_per_second": 20.0, "samples_per_second_by_part": [20.0, 19.0]}
    folder.sheet("fidelity").put(
        "long bert small",
        steps=120,
        planned_steps=500,
        long_run=long_run,
        long={"outcome": "completed"},
        **runs,
    )
    published = {"samples_per_second": 8.86, "memory_mib": 14949}
    folder.sheet("founding").put(
        "4x1 fp32",
        published=published,
        steps=32,
        outcome="completed",
        long_run=long_run,
        measurement=measurement(0.1, 10 * GIB).to_json(),
    )
