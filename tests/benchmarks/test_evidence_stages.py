"""What goes wrong in one point of a stage costs that point only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import NothingFits, SearchFailed, UserError, WorkerError
from autofit.search import tuning
from benchmarks.evidence import gpu_tests, oom, search
from benchmarks.evidence.bench import Bench
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import full_plan
from benchmarks.evidence.store import DONE, FAILED, Folder, Sheet


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


def stand_after_a_kill(tmp_path: Path, script: str, *lines: dict[str, Any]) -> Bench:
    """Of a call that was killed: the lines that a child had written, the last one torn."""
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)
    log = bench.folder.file("inside", f"{script}.jsonl")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half": {}')
    return bench


def test_tests_that_had_passed_before_a_kill_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"test": "tests/gpu/test_a.py::test_b", "outcome": "passed", "seconds": 1.0, "text": ""}
    bench = stand_after_a_kill(tmp_path, "tests", passed)
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_tests, "run_child", lambda words, *_: (commands.append(words), (0, ""))[1])
    sheet = bench.folder.sheet("tests")
    gpu_tests.run(bench, sheet, Box(60.0))
    assert sheet.done(passed["test"])
    assert passed["test"] in commands[0]


def test_out_of_memory_that_was_provoked_before_a_kill_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = {"case": "forward", "phase": "forward", "error": {"types": ["torch.OutOfMemoryError"]}}
    bench = stand_after_a_kill(tmp_path, "oom", finding)
    (tmp_path / "inside" / "full_card.jsonl").write_text(json.dumps({"room_bytes": oom.ROOMS[0], "failed_at": None}) + "\n")
    monkeypatch.setattr(oom, "_limits", lambda *_: None)
    sheet = bench.folder.sheet("oom")
    oom.run(bench, sheet, Box(0.0))
    assert set(sheet.rows) == {"provoked forward", "room of 64 MiB"}
