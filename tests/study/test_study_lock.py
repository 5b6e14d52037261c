"""One search at a time on a study."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.errors import StudyError
from autofit.study import study_lock
from autofit.study.study_lock import held

HOLDER = """
import sys, time
from autofit.study.study_lock import held
with held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""

FORKED = """
import os, sys
from autofit.errors import StudyError
from autofit.study.study_lock import held
begun, end = os.pipe(), os.pipe()
with held(sys.argv[1]):
    if os.fork() == 0:
        os.close(end[1])
        os.write(begun[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    try:
        with held(sys.argv[1]):
            pass
    except StudyError:
        print("held")
with held(sys.argv[1]):
    print("held again")
"""


def test_a_second_search_on_a_study_is_refused_and_a_killed_one_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StudyError, match="is in use by another search"), held(path):
            pass
        with held(tmp_path / "another.journal"):
            pass
        first.kill()
    with held(path):
        pass


def test_nothing_is_left_beside_the_study_and_the_study_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path / "study.journal"):
            assert list(tmp_path.iterdir()) == []


def test_a_job_with_a_temporary_directory_of_its_own_sees_it(tmp_path: Path) -> None:
    with held(tmp_path / "study.journal"):
        (tmp_path / "link").symlink_to("study.journal")
        other = {**os.environ, "TMPDIR": str(tmp_path)}
        for name in ("study.journal", "link"):
            done = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path / name)], env=other, capture_output=True, text=True, timeout=60, check=False)
            assert "in use by another search" in done.stderr


def test_where_there_are_no_such_names_a_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_lock, "_name", lambda path: str(tmp_path / "none" / "socket"))
    with held(tmp_path / "study.journal"):
        pass


def test_where_there_are_no_such_sockets_a_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*kind: int) -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refused)
    with held(tmp_path / "study.journal"):
        pass


def test_a_copy_of_the_process_that_outlives_the_search_does_not_hold_the_study(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "study.journal")], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("held\nheld again\n", "")


def test_a_search_without_a_file_needs_no_lock() -> None:
    with held(None), held(None):
        pass


def test_a_name_that_is_no_unicode_is_held_as_any_other(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/study\xff.journal")
    with held(path), pytest.raises(StudyError, match="is in use by another search"), held(path):
        pass
