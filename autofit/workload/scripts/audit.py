"""What Python changes on disk while a script under trial runs, seen by an audit hook and put to its `WriteGuard`.

Child side: an audit hook stays until the process ends.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from autofit.workload.scripts.places import resolved

if TYPE_CHECKING:
    from autofit.workload.scripts.guard import WriteGuard

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: audit event -> positions of the paths it changes, each with the position of its directory's descriptor
CHANGES = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "shutil.rmtree": ((0, 1),),
}
REMOVALS = ("os.remove", "os.rmdir", "shutil.rmtree")
TOUCHES = {"os.chmod": 2, "os.chown": 3, "os.utime": 3, "os.link": 2, "os.setxattr": None}  #: audit event -> position of the directory's descriptor


def watch(guard: WriteGuard) -> None:
    """Have `guard` asked about every change, for as long as it is active."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not guard.is_active:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & WRITING and isinstance(path, str | bytes)
            if writes and not os.path.isdir(path):  # tempfile names the directory, and opens a file in it by itself
                guard.check(os.path.realpath(os.fsdecode(path)))
            return
        if event in TOUCHES:
            position = TOUCHES[event]
            guard.remember(resolved(arguments[0], None if position is None else arguments[position]))
        if event in CHANGES:
            _check(guard, event, arguments)

    sys.addaudithook(hook)


def _check(guard: WriteGuard, event: str, arguments: tuple[Any, ...]) -> None:
    places = [resolved(arguments[path], None if directory is None else arguments[directory]) for path, directory in CHANGES[event]]
    if event == "os.rename" and None not in places:
        source, target = map(str, places)
        guard.check_move(source, target)
        if os.path.isdir(source):
            places = places[:1]  # where it went is known when it is there: see `WriteGuard.moved`
    for where in places:
        if where is not None:
            guard.check(where, event)
