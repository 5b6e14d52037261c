"""One search at a time on a study file: two would take each other's running trials for remains of a crash."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autofit.errors import StudyError


@contextlib.contextmanager
def held(path: str | Path | None) -> Iterator[None]:
    """Keep other searches of this machine and user off the study in `path`; None = a study in memory.

    The kernel releases the lock of a killed process. It lies in the temporary directory, under a digest of the study's path, so that nothing
    is left beside that. Where files cannot be locked, nobody is kept off.

    Raises:
        StudyError: another search has it.
    """
    if path is None:
        yield
        return
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    name = os.path.join(tempfile.gettempdir(), f"autofit-study-{os.getuid()}-{digest}.lock")
    try:
        handle = _locked(name)
    except BlockingIOError:
        raise StudyError(
            f"study file {str(path)!r} is in use by another search", hint="wait for that one, or give another path to --study"
        ) from None
    except OSError:  # no place for locks, or a file system without them
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
        os.close(handle)


def _locked(name: str) -> int:
    """The open handle of the lock's file.

    Raises:
        BlockingIOError: another process has it.
    """
    while True:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # its last holder has removed it meanwhile
