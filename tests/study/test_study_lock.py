"""One search at a time on a study."""

from __future__ import annotations

import errno
import os
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


@pytest.mark.parametrize("name", ["open", "flock"])
def test_where_files_cannot_be_locked_a_search_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(study_lock.os if name == "open" else study_lock.fcntl, name, refuse)
    with held(tmp_path / "study.journal"):
        pass


def test_a_search_without_a_file_needs_no_lock() -> None:
    with held(None), held(None):
        pass


def test_a_name_that_is_no_unicode_is_held_as_any_other(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/study\xff.journal")
    with held(path), pytest.raises(StudyError, match="is in use by another search"), held(path):
        pass
