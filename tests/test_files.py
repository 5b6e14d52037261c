"""JSON files are read with a one-line error, written whole or not at all, and checked before work is spent."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import FileFormatError
from autofit.files import check_writable, read_json_object, write_json
from tests.refusals import refused

AS_ROOT = os.geteuid() == 0


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    data = {"schema": "x", "n": 1.5, "text": "größe", "list": [None, True]}
    write_json(tmp_path / "a.json", data)
    assert read_json_object(tmp_path / "a.json", what="result") == data
    assert (tmp_path / "a.json").read_text().endswith("}\n")


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with refused("^result file '.*none.json' does not exist$", kind=FileFormatError):
        read_json_object(tmp_path / "none.json", what="result")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with refused("^result file .* cannot be read: Is a directory$", kind=FileFormatError):
        read_json_object(tmp_path, what="result")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: "),
        (b"{", "is not JSON: "),
        (b"not json", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b"[1, 2]", "holds a list, not an object$"),
        (b"null", "holds a NoneType, not an object$"),
        (b"\xff\xfe\x00", "cannot be read: .*utf-8"),
        (b"\x80\x04K\x01.", "cannot be read: .*utf-8"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with refused(f"^landscape file '.*a.json' {message}", kind=FileFormatError):
        read_json_object(path, what="landscape")
    assert path.read_bytes() == content


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_refused_in_one_line(content: bytes) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    try:
        found = read_json_object(f"/proc/self/fd/{read_end}", what="result")
    except FileFormatError as error:
        with refused("^result file ", kind=FileFormatError):
            raise error
    else:
        assert isinstance(found, dict)
    finally:
        os.close(read_end)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_a_path_that_no_file_can_have_is_refused(path: str) -> None:
    with refused("^result file .* cannot be read: ", kind=FileFormatError):
        read_json_object(path, what="result")
    with refused("^cannot write "):
        write_json(path, {})
    with refused("^output .* cannot be written: "):
        check_writable(path, what="output")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"new": math.nan})
    assert read_json_object(path, what="result") == {"old": 1}
    assert os.listdir(tmp_path) == ["best.json"]


def test_a_missing_directory_is_refused_by_the_write_too(tmp_path: Path) -> None:
    with refused("^cannot write '.*none/best.json': No such file or directory$"):
        write_json(tmp_path / "none" / "best.json", {})


def test_a_written_file_has_the_users_own_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "a.json", {})
    finally:
        assert os.umask(before) == 0o027, "the umask is as it was"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "real" / "best.json")
    write_json(link, {"n": 1})
    write_json(link, {"n": 2})
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "best.json").read_text()) == {"n": 2}


def test_a_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe, what="output")
        write_json(pipe, {"n": 1})
        assert json.loads(os.read(reader, 1000)) == {"n": 1}
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_can_be_written_is_not_touched_by_the_check(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json", what="output")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old.json").write_text("as it was")
    check_writable(tmp_path / "old.json", what="output")
    assert (tmp_path / "old.json").read_text() == "as it was"


def test_what_cannot_be_written_is_refused_before_work_is_spent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("^output '.*' is a directory$", hint="give the path of a file"):
        check_writable(tmp_path, what="output")
    with refused("^output .*none/a.json' cannot be written: '.*none' is not a directory$"):
        check_writable(tmp_path / "none" / "a.json", what="output")
    with refused("^output .*file/a.json' cannot be written: '.*file' is not a directory$"):
        check_writable(tmp_path / "file" / "a.json", what="output")


@pytest.mark.skipif(AS_ROOT, reason="root may write anywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with refused("cannot be written: Permission denied$"):
        check_writable(tmp_path / "a.json", what="output")
    with refused("^cannot write .*: Permission denied$"):
        write_json(tmp_path / "a.json", {})


def test_a_file_whose_directory_takes_no_other_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "best.json").write_text("{}")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    write_json(tmp_path / "best.json", {"n": 1})
    assert read_json_object(tmp_path / "best.json", what="result") == {"n": 1}
    with refused("^cannot write .*new.json': Permission denied$"):
        write_json(tmp_path / "new.json", {})


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs a file that nobody may write")
def test_a_file_system_that_takes_nothing_is_refused() -> None:
    with refused("^output '/proc/autofit.json' cannot be written: "):
        check_writable("/proc/autofit.json", what="output")
    with refused("^cannot write '/proc/autofit.json': "):
        write_json("/proc/autofit.json", {})


@pytest.mark.parametrize("path", [None, 3, b"a.json", ["a.json"]], ids=repr)
def test_what_is_no_path_is_refused_in_one_line(path: Any) -> None:
    with refused(r"^the path of a result file is .*$", hint="as text or as a Path", kind=FileFormatError):
        read_json_object(path, what="result")
    with refused(r"^the path to write to is .*$", hint="as text or as a Path"):
        write_json(path, {})
