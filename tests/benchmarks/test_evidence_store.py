"""Sheets and folders: whole after every point, resumable, and of one machine."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path

import pytest

from autofit.errors import FileFormatError, UserError
from benchmarks.evidence.store import FAILED, PARTIAL, Folder, Sheet, is_dry_run

IDENTITY = {"dry_run": False, "device": "Test Card", "torch": "2.11.0", "transformers": "5.17.0"}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "evidence", dry_run=False)


def test_a_point_is_on_disk_as_soon_as_it_is_put(folder: Folder) -> None:
    folder.sheet("memory").put("a", bytes=7)
    assert folder.sheet("memory").rows["a"]["bytes"] == 7
    assert folder.sheet("memory").rows["a"]["state"] == "done"


def test_done_and_skipped_points_are_settled_failed_and_partial_ones_are_tried_again(folder: Folder) -> None:
    sheet = folder.sheet("memory")
    sheet.put("done")
    sheet.skip("skipped", "no card")
    sheet.fail("failed", "boom")
    sheet.put("partial", PARTIAL)
    again = folder.sheet("memory")
    assert [key for key in again.rows if again.settled(key)] == ["done", "skipped"]
    assert again.rows["failed"]["state"] == FAILED
    assert not again.done("skipped")


def test_closing_notes_what_is_left_and_adds_up_the_time(folder: Folder) -> None:
    sheet = folder.sheet("oom")
    sheet.put("a")
    sheet.close(2.0, ["a", "b"])
    folder.sheet("oom").close(3.0, ["a", "b", "c"])
    found = folder.sheet("oom")
    assert found.left == ["b", "c"]
    assert found.seconds == 5.0


def test_what_is_left_is_known_at_any_time_also_to_who_reads_after_a_kill(folder: Folder) -> None:
    sheet = folder.sheet("oom")
    sheet.plan(["a", "b", "c"])
    sheet.put("a")
    sheet.fail("b", "no exception")
    assert folder.sheet("oom").left == ["b", "c"]


def test_one_stage_never_touches_the_sheet_of_another(folder: Folder) -> None:
    folder.sheet("facts").put("a")
    before = (folder.path / "facts.json").read_bytes()
    folder.sheet("oom").put("b")
    assert (folder.path / "facts.json").read_bytes() == before


def test_an_unreadable_sheet_is_put_aside_and_said(folder: Folder) -> None:
    (folder.path / "oom.json").write_text('{"schema": "autofit/evid')
    sheet = folder.sheet("oom")
    assert not sheet.rows
    assert (folder.path / "oom.json").exists(), "who only reads changes nothing"
    sheet.put("a")
    assert "could not be read: evidence file 'oom.json' is not JSON" in folder.sheet("oom").notes[0]
    assert str(folder.path) not in folder.sheet("oom").notes[0]
    assert len(list(folder.path.glob("oom.unreadable-*"))) == 1
    assert list(folder.sheet("oom").rows) == ["a"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "autofit/result"}, "its schema is 'autofit/result'"),
        ({"version": 9}, "version 9"),
        ({"dry_run": None}, "whether it is a dry run"),
        ({"rows": []}, "its rows are not objects"),
        ({"rows": {"a": 3}}, "its rows are not objects"),
        ({"rows": {"a": {"state": "lost"}}}, "its rows are not objects"),
        ({"rows": {"a": {"state": "skipped"}}}, "skipped for no reason"),
        ({"notes": "none"}, "its notes are not texts"),
        ({"left": [1]}, "its left are not texts"),
        ({"seconds": "2"}, "its seconds are no number"),
    ],
)
def test_a_file_that_is_only_half_a_sheet_is_unreadable_and_no_folder_of_evidence(
    folder: Folder, change: dict[str, object], said: str
) -> None:
    folder.check(IDENTITY)
    path = folder.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileFormatError, match=said):
        is_dry_run(folder.path)
    assert said in folder.sheet("run").notes[0]


def test_a_folder_that_does_not_say_where_it_was_recorded_holds_no_evidence(folder: Folder) -> None:
    folder.sheet("run").put("call 1", command="benchmarks.evidence", minutes=1.0)
    with pytest.raises(FileFormatError, match="on what it was recorded"):
        is_dry_run(folder.path)


def test_the_same_sentence_is_noted_once(folder: Folder) -> None:
    sheet = folder.sheet("search")
    sheet.note("optuna is not installed")
    sheet.note("optuna is not installed")
    assert folder.sheet("search").notes == ["optuna is not installed"]


def test_a_folder_is_of_one_machine_and_one_set_of_versions(folder: Folder) -> None:
    folder.check(IDENTITY)
    folder.check(dict(IDENTITY))
    with pytest.raises(UserError, match="recorded with device Test Card, this is Other"):
        folder.check({**IDENTITY, "device": "Other"})
    with pytest.raises(UserError, match="torch"):
        folder.check({**IDENTITY, "torch": "2.13.0"})


def test_a_file_system_that_cannot_lock_folders_is_written_to(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder.held():
        folder.sheet("facts").put("machine")
    assert folder.sheet("facts").settled("machine")


def test_a_dry_run_and_a_run_never_share_a_sheet(folder: Folder) -> None:
    folder.sheet("facts").put("a")
    with pytest.raises(UserError, match="is no dry run"):
        Sheet(folder.path / "facts.json", stage="facts", dry_run=True)


def test_calls_are_numbered(folder: Folder) -> None:
    assert folder.begin("python -m benchmarks.evidence", 9.0) == "call 1"
    assert folder.begin("python -m benchmarks.evidence", 9.0) == "call 2"


def test_whether_a_folder_is_a_dry_run_is_read_from_it(folder: Folder, tmp_path: Path) -> None:
    folder.check(IDENTITY)
    assert is_dry_run(folder.path) is False
    with pytest.raises(FileFormatError, match="does not exist"):
        is_dry_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(FileFormatError, match="no evidence"):
        is_dry_run(tmp_path)
