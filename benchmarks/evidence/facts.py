"""Stage *facts*: device, driver, versions, context bytes, clocks, matrix rates, and what starting a trial costs with a CUDA driver present."""

from __future__ import annotations

import os
import platform
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

from autofit.devices import nvml
from autofit.processes.launch import ForkserverLauncher, Launcher, SpawnLauncher, child_environment
from autofit.processes.protocol import Event, Kind, decode_event, encode_request
from benchmarks.evidence.bench import Bench, Stopwatch, missing, point
from benchmarks.evidence.box import Box
from benchmarks.evidence.store import Sheet

FIRST_WORD_SECONDS = 60.0
SPAWNED = 2  #: spawned children; each imports for seconds
PACKAGES = (
    "optuna",
    "bitsandbytes",
    "datasets",
    "pynvml",
    "matplotlib",
    "pytest",
    "hypothesis",
    "pytest_timeout",
)
SMI_FIELDS = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,persistence_mode,mig.mode.current,ecc.mode.current"


def planned(bench: Bench) -> list[str]:
    """Keys of this stage."""
    return ["machine", "context", "start forked", "start spawned", "trials"]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Record what is not there yet."""
    parts = {
        "machine": _machine,
        "context": _context,
        "start forked": _forked,
        "trials": _trials,
        "start spawned": _spawned,
    }
    for key, part in parts.items():
        if not sheet.settled(key) and box.holds(bench.least_seconds):
            with point(sheet, key):
                part(bench, sheet, box)


def _machine(bench: Bench, sheet: Sheet, box: Box) -> None:
    facts = bench.describe()
    absent = missing(*PACKAGES)
    for name in absent:
        sheet.note(f"{name} is not installed here")
    sheet.put(
        "machine",
        device=facts["device"],
        software=facts["software"],
        missing_packages=facts["missing_packages"] | dict.fromkeys(absent, "not installed"),
        optims=facts["optims"],
        host={"system": platform.platform(), "cpus": os.cpu_count(), "memory_bytes": _host_memory()},
        nvml=nvml.conditions(),
        nvidia_smi=_nvidia_smi(),
    )


def _context(bench: Bench, sheet: Sheet, box: Box) -> None:
    *found, end = bench.inside("context", {}, box, most=90.0)
    steps = [line for line in found if "step" in line]
    rates = {line["rate"]: line["tflops"] for line in found if "rate" in line}
    properties = next((line["properties"] for line in found if "properties" in line), None)
    if end["status"] != 0:
        sheet.fail("context", f"status {end['status']} after {steps[-1:]}: {end['log']}")
        return
    sheet.put(
        "context", steps=steps, properties=properties, matrix_tflops=rates, clocks_after=nvml.conditions()
    )


def _forked(bench: Bench, sheet: Sheet, box: Box) -> None:
    watch = Stopwatch()
    server = ForkserverLauncher(child_environment(bench.device, os.environ))
    try:
        server.wait_ready(box.timeout(FIRST_WORD_SECONDS))
        ready = watch.seconds
        seconds = [first_word(server, box) for _ in range(bench.plan.startups)]
    finally:
        server.close()
    sheet.put(
        "start forked",
        import_seconds=server.preload_seconds,
        ready_seconds=ready,
        first_word_seconds=seconds,
        hung=seconds.count(None),
    )


def _spawned(bench: Bench, sheet: Sheet, box: Box) -> None:
    launcher = SpawnLauncher(child_environment(bench.device, os.environ))
    try:
        seconds = [first_word(launcher, box) for _ in range(SPAWNED if bench.on_cuda else 1)]
    finally:
        launcher.close()
    sheet.put("start spawned", first_word_seconds=seconds, hung=seconds.count(None))


def first_word(launcher: Launcher, box: Box) -> float | None:
    """Seconds from launch until a child says that it started, after a parallel operation has run in it; None = it never did."""
    request = encode_request(Kind.DESCRIBE, {"workload": None, "device": "cpu"})
    watch, line, deadline = Stopwatch(), b"", time.monotonic() + box.timeout(FIRST_WORD_SECONDS)
    with tempfile.TemporaryFile() as log:
        child = launcher.launch(request, log)
    try:
        while not line.endswith(b"\n") and time.monotonic() < deadline:
            if select.select([child.answer_fd], [], [], 0.2)[0]:
                data = os.read(child.answer_fd, 1)
                if not data:
                    break
                line += data
        seconds = watch.seconds
    finally:
        child.kill()
        os.close(child.answer_fd)
    event = decode_event(line)
    return seconds if event is not None and event["event"] == Event.STARTED else None


def _trials(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Whole trials of a small model: what each costs beside the steps that it measures."""
    case = bench.plan.limits[0]
    rows = []
    for _ in range(bench.plan.startups):
        if not box.holds(bench.least_seconds):
            break
        result = bench.trial(case.workload, case.config, box, optimizer_steps=2)
        if result.measurement is None:
            sheet.fail("trials", str(result.failure))
            return
        measured = sum(result.measurement.micro_step_seconds) + sum(result.measurement.update_seconds)
        rows.append(
            {
                "seconds": result.seconds,
                "measured_seconds": measured,
                "context_bytes": result.measurement.memory.context_bytes,
            }
        )
    if rows:
        sheet.put("trials", model=case.key, runs=rows, fallback_reason=bench.runner.fallback_reason)


def _nvidia_smi() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    names = SMI_FIELDS.split(",")
    return dict(zip(names, values)) if len(values) == len(names) else {"answer": answer.stdout.strip()[:500]}


def _host_memory() -> Any:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
