"""The whole way on a CPU: killed in the middle, gone on with, reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.plan import ROOT, STAGE_NAMES
from benchmarks.evidence.reading import DRY_WARNING, Reading
from tests.benchmarks.test_evidence_report import check_warned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MINUTES = "4"  # more than it takes, so that a busy machine leaves nothing out
NO_CARD_NEEDED = {
    "facts": 5,
    "tests": 1,
    "oom": 11,
    "memory": 20,
    "landscape": 1,
    "search": 2,
    "fidelity": 4,
    "founding": 5,
}


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.evidence",
        "--dry-run",
        "--minutes",
        MINUTES,
        "--out",
        str(out),
        *more,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def sheet(out: Path, stage: str) -> dict[str, Any]:
    path = out / f"{stage}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    return found


def kill_in_the_middle(out: Path) -> tuple[int, str]:
    """End a run once its first memory trials are there; returns exit status and table."""
    process = start(out)
    deadline = time.monotonic() + 240
    while len(sheet(out, "memory")["rows"]) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    table, errors = process.communicate(timeout=60)
    assert "stopped by SIGTERM" in errors, errors[-3000:]
    return process.returncode, table


def test_a_run_that_is_killed_goes_on_through_every_stage_to_a_report(tmp_path: Path) -> None:
    out = tmp_path / "evidence"
    status, table = kill_in_the_middle(out)
    assert status == 143
    assert "founding" in table
    assert "not begun" in table
    kept = {stage: sheet(out, stage)["rows"] for stage in ("facts", "oom", "memory")}
    assert len(kept["memory"]) >= 2

    process = start(out)
    table, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:] + table
    for stage in STAGE_NAMES:
        found = sheet(out, stage)
        done = [key for key, row in found["rows"].items() if row["state"] == "done"]
        assert len(done) >= NO_CARD_NEEDED[stage] - (stage == "founding"), (
            stage,
            found["left"],
            errors[-3000:],
        )  # 8-bit may be missing
        assert not found["left"], (stage, errors[-3000:])
        assert found["dry_run"] is True
    for stage, rows in kept.items():
        again = sheet(out, stage)["rows"]
        assert all(again[key] == row for key, row in rows.items() if row["state"] == "done"), (
            f"{stage} lost or repeated a point"
        )
    _check_figures(out)

    summary = subprocess.run(
        [sys.executable, "-m", "benchmarks.evidence", "--summarise", str(out)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    written = [Path(line) for line in summary.stdout.splitlines()]
    assert all(path.is_relative_to(out / "report") for path in written), "a dry run publishes nothing"
    assert len([path for path in written if path.suffix == ".png"]) == 6
    check_warned(written[0].read_text(), "# DRY RUN on a CPU", DRY_WARNING)


def _check_figures(out: Path) -> None:
    """What stages recorded is what they are for."""
    reading = Reading(out)
    assert reading.row("facts", "start forked")["hung"] == 0
    provoked = reading.rows("oom", "provoked ")
    assert {row["judged"]["reason"] for row in provoked.values()} == {"out_of_memory"}
    assert reading.row("oom", "limit: exceeds")["failure"]["reason"] == "out_of_memory"
    assert all(row["predicted"] is not None for row in reading.rows("memory", "predicted ").values())
    (grid,) = reading.rows("landscape").values()
    assert grid["recorded_points"] == grid["space"]
    assert all(row["trials"] >= 1 for row in reading.rows("search").values())
