"""What goes wrong in one point of a stage costs that point only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autofit.errors import NothingFits, SearchFailed, UserError, WorkerError
from autofit.search import tuning
from benchmarks.evidence import gpu_tests, search
from benchmarks.evidence.store import DONE, FAILED, Sheet


class Stand:
    """Of a bench: a folder, and nothing that is said."""

    def __init__(self, directory: Path) -> None:
        self.folder = self
        self._directory = directory

    def file(self, *names: str) -> Path:
        path = self._directory.joinpath(*names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def say(self, text: str) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (NothingFits("too large"), DONE),
        (SearchFailed("broken", traceback="where"), FAILED),
        (WorkerError("the child broke", hint="how"), FAILED),
        (UserError("not here"), FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_search_that_ends_in_an_error_is_a_row(
    error: Exception, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tuning, "run_search", refuse)
    monkeypatch.setattr(search, "_spec", lambda *_: None)
    sheet = Sheet(tmp_path / "search.json", stage="search", dry_run=False)
    problem: Any = type("Problem", (), {"name": "bert"})
    search._search(Stand(tmp_path), sheet, None, problem, None)  # type: ignore[arg-type]
    assert sheet.rows["bert no limit"]["state"] == state


@pytest.mark.parametrize(("status", "failed", "state"), [(0, False, DONE), (1, True, DONE), (1, False, FAILED), (5, False, DONE), (4, False, FAILED)])
def test_pytest_that_failed_without_a_test_is_no_run(status: int, failed: bool, state: str, tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "tests.json", stage="tests", dry_run=False)
    if failed:
        sheet.fail("tests/gpu/test_a.py::test_b", "assert")
    gpu_tests.conclude(Stand(tmp_path), sheet, status, "output")  # type: ignore[arg-type]
    assert sheet.rows[gpu_tests.WHOLE]["state"] == state
