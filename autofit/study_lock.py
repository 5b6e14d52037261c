"""One search at a time on a study file: two would take each other's running trials for remains of a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autofit.errors import StudyError


@contextlib.contextmanager
def held(path: str | Path | None) -> Iterator[None]:
    """Keep other searches of this machine and user off the study in `path`; None = a study in memory.

    The kernel releases the lock of a killed process. It lies in the temporary directory, under the number of the study's file, so that nothing
    is left beside that.

    Raises:
        StudyError: another search has it.
    """
    if path is None:
        yield
        return
    lock = _locked(Path(path))
    if lock is None:
        raise StudyError(
            f"study file {str(path)!r} is in use by another search", hint="wait for that one, or give another path to --study"
        )
    name, handle = lock
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
        os.close(handle)


def _locked(path: Path) -> tuple[str, int] | None:
    """The lock's file and its open handle; None when another process has it."""
    path.touch()
    seen = path.stat()
    name = os.path.join(tempfile.gettempdir(), f"autofit-study-{os.getuid()}-{seen.st_dev}-{seen.st_ino}.lock")
    while True:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name).st_ino == os.fstat(handle).st_ino:
                return name, handle
        os.close(handle)  # its last holder has removed it meanwhile
