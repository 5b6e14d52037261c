"""A pytest plugin that writes each test's outcome as soon as it is known, so that a run that is cut off keeps what it has."""

from __future__ import annotations

import json
import os
from typing import Any

from autofit.processes.lifeline import die_with_parent

LOG_VARIABLE, PARENT_VARIABLE = "EVIDENCE_PYTEST_LOG", "EVIDENCE_PARENT"
_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_worst: dict[str, tuple[str, float, str]] = {}


def pytest_configure(config: Any) -> None:
    """End with the process that ordered the tests."""
    die_with_parent(int(os.environ[PARENT_VARIABLE]))


def pytest_runtest_logreport(report: Any) -> None:
    """Collect set-up, call and tear-down of a test; its worst outcome is written at the end."""
    outcome, seconds, text = _worst.get(report.nodeid, ("passed", 0.0, ""))
    if _RANK[report.outcome] > _RANK[outcome]:
        outcome, text = report.outcome, _reason(report)
    _worst[report.nodeid] = (outcome, seconds + report.duration, text)
    if report.when == "teardown":
        outcome, seconds, text = _worst.pop(report.nodeid)
        finding = {"test": report.nodeid, "outcome": outcome, "seconds": seconds, "text": text}
        with open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as handle:
            handle.write(json.dumps(finding) + "\n")


def _reason(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)[-3000:]
