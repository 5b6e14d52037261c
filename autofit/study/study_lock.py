"""One search at a time on a study file: two would take each other's running trials for remains of a crash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from autofit.errors import StudyError

_HELD: WeakSet[socket.socket] = WeakSet()  #: of this process


@contextlib.contextmanager
def held(path: str | Path | None) -> Iterator[None]:
    """Keep other searches of this machine and user off the study in `path`; None = a study in memory.

    The lock is the name of a socket that is no file: the kernel releases that of a killed process, nothing is left beside the study, and a job with a
    TMPDIR of its own sees it. It holds which directory that is and the file's name there, so that containers with files of their own do not meet.
    Where there are no such names, nobody is kept off.

    Raises:
        StudyError: another search has it.
    """
    if path is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            _HELD.add(lock)
            lock.bind(_name(path))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StudyError(
                    f"study file {str(path)!r} is in use by another search", hint="wait for that one, or give another path to --study"
                ) from None
        yield


def _let_go() -> None:
    """In a forked copy of this process, which may outlive the search: the name is free when all who have the socket have closed it."""
    for lock in _HELD:
        lock.close()


os.register_at_fork(after_in_child=_let_go)


def _name(path: str | Path) -> str:
    """What the lock of a study is called: an abstract address (unix(7))."""
    directory, name = os.path.split(os.path.realpath(path))
    where = os.stat(directory)
    digest = hashlib.sha256(b"%d %d %s" % (where.st_dev, where.st_ino, os.fsencode(name))).hexdigest()[:32]
    return f"\0autofit-study-{os.getuid()}-{digest}"
