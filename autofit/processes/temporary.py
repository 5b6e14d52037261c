"""Temporary files of a child, and of the processes that it starts, lie in a directory of their own, which is removed when it has ended, however it did:
children leave without the clean-up that Python does at its exit, and may be killed. Child side."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from autofit.processes import leftovers
from autofit.processes.protocol import SCRATCH

LONGEST = 70  #: bytes of the directory's path: the sockets that multiprocessing has in it may have 107 in all, 33 of them below it
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  #: is among the temporary files by default, and has to serve the next child too


def own_directory() -> None:
    """Have temporary files made in a directory of this process's own; as before where there is no runner, or the path would be too long for sockets."""
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return
    path = Path(scratch) / f"t{os.getpid()}"
    if len(os.fsencode(path)) > LONGEST:
        return
    os.environ.setdefault(COMPILED, _compiled(tempfile.gettempdir()))
    path.mkdir(mode=0o700, exist_ok=True)
    leftovers.note(scratch, (leftovers.Kind.TREE, str(path)))
    os.environ["TMPDIR"] = tempfile.tempdir = str(path)


def _compiled(temporary: str) -> str:
    """Where torch keeps compiled kernels by default."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # no name is known for the number
        user = f"uid_{os.getuid()}"
    return os.path.join(temporary, "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
