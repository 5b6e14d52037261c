"""The command line of the evidence: input, stages, and a stage that breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import UserError
from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Measurement
from benchmarks.evidence import __main__ as command
from benchmarks.evidence import store
from benchmarks.evidence.bench import Bench, run_child
from benchmarks.evidence.box import Box, Stopped
from benchmarks.evidence.fidelity import affordable_steps, overall
from benchmarks.evidence.plan import tiny_plan
from benchmarks.evidence.store import Folder, Sheet


class Broken:
    """A stage that records one point and then breaks."""

    def planned(self, bench: Bench) -> list[str]:
        return ["a", "b"]

    def run(self, bench: Bench, sheet: Sheet, box: Box) -> None:
        sheet.put("a")
        raise RuntimeError("the second point")


class Endless(Broken):
    """A stage that does not look at its box."""

    def run(self, bench: Bench, sheet: Sheet, box: Box) -> None:
        sheet.put("a")
        while True:
            pass


class Ended(Broken):
    """A stage in which the run is told to end."""

    def run(self, bench: Bench, sheet: Sheet, box: Box) -> None:
        sheet.put("a")
        raise Stopped("SIGTERM")


def ran(bench: Bench, seconds: float) -> list[command.Done]:
    rows: list[command.Done] = []
    command.run_stage("facts", bench, Box(seconds), seconds, rows)
    return rows


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    folder = Folder(tmp_path / "out", dry_run=True)
    return Bench(folder, tiny_plan(folder.path), "cpu", lambda text: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no --out given"),
        (["--out", "x", "--stages", "facts,nonsense"], "unknown stage 'nonsense'"),
        (["--out", "x", "--minutes", "-1"], "--minutes must be positive"),
        (["--out", "x", "--device", "cpu"], "not cpu"),
        (["--summarise", "/does/not/exist"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("error: ")
    assert message in first


def test_stages_run_in_order_of_worth_whatever_order_was_asked_for() -> None:
    assert command.chosen_stages("founding, facts") == ["facts", "founding"]
    with pytest.raises(UserError):
        command.chosen_stages(",")


def test_a_stage_that_breaks_keeps_its_points_and_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STAGES", {"facts": Broken()})
    (done,) = ran(bench, 5.0)
    sheet = bench.folder.sheet("facts")
    assert (done.done, done.left, done.note) == (1, 1, "broke: RuntimeError: the second point")
    assert sheet.left == ["b"]
    assert "the second point" in sheet.errors[0]


def test_a_stage_that_does_not_come_back_is_cut_off_and_keeps_its_points(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STAGES", {"facts": Endless()})
    (done,) = ran(bench, 0.1)
    assert (done.done, done.left) == (1, 1)
    assert "cut off" in done.note


def test_a_stage_in_which_the_run_was_ended_has_its_row_in_the_table(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STAGES", {"facts": Ended()})
    rows: list[command.Done] = []
    with pytest.raises(Stopped):
        command.run_stage("facts", bench, Box(5.0), 5.0, rows)
    assert [(row.stage, row.done, row.left, row.note) for row in rows] == [("facts", 1, 1, "stopped by SIGTERM")]
    assert bench.folder.sheet("facts").left == ["b"]


def test_a_disk_that_is_full_ends_the_run_with_the_table_of_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Filled(Broken):
        def run(self, bench: Bench, sheet: Sheet, box: Box) -> None:
            sheet.put("a")
            monkeypatch.setattr(store, "write_json", refuse)
            sheet.put("b")

    def refuse(path: Path, data: object) -> None:
        raise UserError(f"cannot write {str(path)!r}: No space left on device")

    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path / "cache"))  # the command sets it for its process, which is that of all tests here
    identity = {"dry_run": True, "device": "cpu", "torch": "2", "transformers": "5"}
    monkeypatch.setattr(command, "STAGES", dict.fromkeys(command.STAGE_NAMES, Filled()))
    monkeypatch.setattr(Bench, "identity", lambda self: identity)
    assert command.main(["--dry-run", "--out", str(tmp_path / "out"), "--stages", "facts,oom", "--minutes", "1"]) == 2
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert [line.split()[:2] for line in said.out.splitlines()[1:3]] == [["facts", "2"], ["oom", "all"]]


def test_two_calls_never_work_in_one_folder(bench: Bench) -> None:
    with bench.folder.held(), pytest.raises(UserError, match="another call works in"), Folder(bench.folder.path, dry_run=True).held():
        pass
    with bench.folder.held():
        pass


def test_the_table_names_stages_that_were_not_begun() -> None:
    row = command.Done(stage="facts", done=4, skipped=0, failed=1, left=1, seconds=17.8, note="")
    lines = command.table([row], ["facts", "oom"], 20.0).splitlines()
    assert lines[1].split() == ["facts", "4", "0", "1", "1", "18"]
    assert lines[2].split() == ["oom", "all", "not", "begun"]


def test_a_child_that_takes_too_long_is_ended_and_what_it_said_is_kept(bench: Bench) -> None:
    status, log = run_child(["sh", "-c", "echo begun; sleep 60"], {"PATH": "/usr/bin:/bin"}, 0.5)
    assert status is None
    assert log == "begun\n"


@pytest.fixture
def long_run() -> Callable[[], Measurement]:
    def make(**more: Any) -> Measurement:
        return Measurement(
            micro_step_seconds=(0.1, 0.1, 0.3, 0.3),
            fetch_seconds=(0.0, 0.1),
            update_seconds=(0.2, 0.2),
            **more,
        )

    return make


def test_a_long_run_is_judged_by_wall_time_and_not_by_the_formula(
    long_run: Callable[[], Measurement],
) -> None:
    config = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    found = overall(long_run(), config)
    assert found["seconds"] == pytest.approx(0.4 + 1.0)
    assert found["samples_per_second"] == pytest.approx(16 / 1.4)
    assert found["samples_per_second_by_part"] == pytest.approx([8 / 0.4, 8 / 1.0])


def test_steps_are_as_many_as_the_box_holds(long_run: Callable[[], Measurement]) -> None:
    config = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    step = 2 * (0.2 + 0.05) + 0.2
    assert affordable_steps(long_run(), config, 100 * step, 500) == 85
    assert affordable_steps(long_run(), config, 1e6, 500) == 500
    assert affordable_steps(long_run(), config, -3.0, 500) == 0
