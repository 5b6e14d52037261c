"""What a child made and could not remove itself is removed when it has ended, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autofit.processes.leftovers import PREFIX, Kind, note, remove, sweep


def ended_child() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_what_an_ended_process_made_is_removed_the_last_first(tmp_path: Path) -> None:
    scratch, user = tmp_path / "scratch", tmp_path / "user"
    scratch.mkdir()
    (user / "out" / "data").mkdir(parents=True)
    (user / "kept.txt").write_text("the user's")
    (user / "out" / "data" / "rows\n1").write_text("made")
    (user / "out" / "log").write_text("made")
    for leftover in (
        (Kind.DIRECTORY, str(user / "out")),
        (Kind.DIRECTORY, str(user / "out" / "data")),
        (Kind.FILE, str(user / "out" / "data" / "rows\n1")),
        (Kind.FILE, str(user / "out" / "log")),
        (Kind.FILE, str(user / "out" / "never made")),
    ):
        note(scratch, leftover)
    own = scratch / f"{PREFIX}{os.getpid()}"
    sweep(scratch)
    assert (user / "out" / "log").exists(), "its process still runs"
    own.rename(scratch / f"{PREFIX}{ended_child()}")
    sweep(scratch)
    assert sorted(p.name for p in user.iterdir()) == ["kept.txt"]
    assert list(scratch.iterdir()) == []


def test_a_directory_that_another_process_uses_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint").write_text("of a real run")
    remove([(Kind.DIRECTORY, str(tmp_path / "out"))])
    assert (tmp_path / "out" / "checkpoint").exists()
