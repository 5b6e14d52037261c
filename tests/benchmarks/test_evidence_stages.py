"""What goes wrong in one point of a stage costs that point only."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import NothingFits, SearchFailed, UserError, WorkerError
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.spec import Workload
from autofit.search import tuning
from benchmarks.evidence import fidelity, gpu_tests, landscape, memory, oom, search
from benchmarks.evidence.bench import Bench
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import full_plan
from benchmarks.evidence.store import DONE, FAILED, Folder, Sheet
from tests.benchmarks.evidence_folder import CARD, LARGE, SMALL, grid


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


@pytest.mark.parametrize("absent", ["pytest_timeout", "xdist"])
def test_pytest_starts_also_where_a_plugin_of_the_projects_options_is_missing(absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "missing", lambda *names: [name for name in names if name == absent])
    words = gpu_tests.command(Sheet(tmp_path / "tests.json", stage="tests", dry_run=False))
    assert words[words.index("-o") + 1] == "addopts="


def test_tests_are_in_the_sheet_while_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)
    monkeypatch.setattr(gpu_tests, "FOLLOWED_SECONDS", 0.01)
    name = "tests/gpu/test_a.py::test_b"

    def pytest_run(words: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
        with open(environment[gpu_tests.LOG_VARIABLE], "a") as log:
            log.write(json.dumps({"test": name, "outcome": "passed", "seconds": 1.0, "text": ""}) + "\n")
        deadline = time.monotonic() + 10.0
        while name not in bench.folder.sheet("tests").rows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert name in bench.folder.sheet("tests").rows
        return 0, ""

    monkeypatch.setattr(gpu_tests, "run_child", pytest_run)
    gpu_tests.run(bench, bench.folder.sheet("tests"), Box(60.0))
    assert bench.folder.sheet("tests").done(gpu_tests.WHOLE)


def test_out_of_memory_that_was_provoked_before_a_kill_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = {"case": "forward", "phase": "forward", "error": {"types": ["torch.OutOfMemoryError"]}}
    bench = stand_after_a_kill(tmp_path, "oom", finding)
    (tmp_path / "inside" / "full_card.jsonl").write_text(json.dumps({"room_bytes": oom.ROOMS[0], "failed_at": None}) + "\n")
    monkeypatch.setattr(oom, "_limits", lambda *_: None)
    sheet = bench.folder.sheet("oom")
    oom.run(bench, sheet, Box(0.0))
    assert set(sheet.rows) == {"provoked forward", "room of 64 MiB"}


@pytest.fixture
def grid_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench with one grid of two points that takes no card."""
    plan = full_plan()
    bench = Bench(Folder(tmp_path, dry_run=False), replace(plan, problems=plan.problems[:1]), "cuda:0", lambda text: None)
    monkeypatch.setattr(bench, "describe", lambda workload: {})
    monkeypatch.setattr(landscape, "space_of", lambda *_: Space(configs=(SMALL, LARGE)))
    return bench


def test_what_is_known_of_a_grid_is_kept_while_it_is_recorded(grid_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid_bench.plan.problems[0]
    kept: list[dict[str, Any]] = []

    def recorder(spec: Any, path: Path, *, say: Any, **_: Any) -> None:
        kept.append(grid_bench.folder.sheet("landscape").rows[problem.name])
        for number in range(landscape.KEPT_EVERY):
            say(f"point {number}")
        kept.append(grid_bench.folder.sheet("landscape").rows[problem.name])

    monkeypatch.setattr(landscape, "record_landscape", recorder)
    landscape.run(grid_bench, grid_bench.folder.sheet("landscape"), Box(60.0))
    assert [row["space"] for row in kept] == [2, 2]
    assert [len(row["point_seconds"]) for row in kept] == [0, landscape.KEPT_EVERY - 1]
    again = grid_bench.folder.sheet("landscape")
    landscape.run(grid_bench, again, Box(60.0))
    assert len(again.rows[problem.name]["point_seconds"]) == 2 * (landscape.KEPT_EVERY - 1)


def test_a_grid_that_cannot_be_read_is_put_aside_and_begun_anew(grid_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid_bench.plan.problems[0]
    path = landscape.grid_path(grid_bench, problem)
    path.write_text('{"schema": "autofit/lands')
    monkeypatch.setattr(landscape, "record_landscape", lambda spec, path, **_: grid().save(path))
    sheet = grid_bench.folder.sheet("landscape")
    landscape.run(grid_bench, sheet, Box(60.0))
    assert sheet.done(problem.name)
    assert sheet.notes == [f"the grid {path.name} could not be read, and was begun anew"]
    assert len(list(path.parent.glob("*.unreadable-*"))) == 1


def test_a_trace_that_the_end_of_the_box_cut_off_is_left_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)
    case = bench.plan.memory[0]

    def cut_off(*_: Any, **__: Any) -> None:
        raise WorkerError("the estimate request ran out of time")

    monkeypatch.setattr(memory, "collect", cut_off)
    sheet = bench.folder.sheet("memory")
    setting: Any = type("Setting", (), {"workload": case.workload})
    memory._predict(bench, sheet, Box(0.0), setting, [case], 1)
    assert not sheet.rows
    assert not sheet.notes


def test_a_model_that_cannot_be_described_costs_its_own_points_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)

    def problem(workload: Workload, config: TrialConfig) -> str:
        if workload.model == "gpt2-medium":
            raise WorkerError("the describe request failed", hint="where")
        return "not here"

    monkeypatch.setattr(bench, "problem", problem)
    cases = {f"trial {case.key}": case for case in bench.plan.memory}
    sheet = bench.folder.sheet("memory")
    memory._trials(bench, sheet, Box(60.0))
    assert {key for key in cases if not sheet.settled(key)} == {key for key, case in cases.items() if case.model == "gpt2-medium"}
    assert "where" in sheet.rows[next(key for key in cases if key.startswith("trial gpt2"))]["error"]


def test_an_answer_that_cannot_be_read_costs_its_own_confirmation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)
    for name in ("a", "b"):
        bench.folder.file("searches", f"{name}.json").write_text("{}")
    sheet = bench.folder.sheet("fidelity")
    fidelity._confirm_all(bench, sheet, Box(60.0))
    assert [row["state"] for row in sheet.rows.values()] == [FAILED, FAILED]


def test_what_went_wrong_in_one_call_is_no_caveat_once_another_has_recorded_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Folder(tmp_path, dry_run=False), full_plan(), "cuda:0", lambda text: None)
    sheets = {name: bench.folder.sheet(name) for name in ("tests", "oom", "search")}
    monkeypatch.setattr(gpu_tests, "run_child", lambda *_: (None, "cut off"))
    gpu_tests.run(bench, sheets["tests"], Box(60.0))
    monkeypatch.setattr(Bench, "machine", CARD)
    monkeypatch.setattr(bench, "inside", lambda *_, **__: [{"status": -9, "log": "killed"}])
    oom._provoked(bench, sheets["oom"], Box(60.0))
    oom._full_card(bench, sheets["oom"], Box(60.0))
    monkeypatch.setattr(search, "missing", lambda *_: ["optuna"])
    search.run(bench, sheets["search"], Box(60.0))
    assert not any(sheet.notes for sheet in sheets.values())
    assert set(sheets["oom"].rows) == set(oom.planned(bench)) - {oom.FITS, oom.EXCEEDS, oom.AFTERWARDS}
    assert set(sheets["search"].rows) == set(search.planned(bench))
    assert not any(sheet.settled(key) for sheet in sheets.values() for key in sheet.rows)
