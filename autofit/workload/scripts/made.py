"""What a script under trial has made, in the order in which it made it, and what of that is removed in the end."""

from __future__ import annotations

import os
from collections.abc import Iterable

from autofit.processes import leftovers
from autofit.processes.protocol import SCRATCH
from autofit.workload.scripts.places import inside, upwards


class Made:
    """Files and directories; in output directories, and the directories above those, they go again.

    Attributes:
        directories: all that were made.
        files: all that were made.
        due: what is removed in the end, the last first: it is also noted for the parent, should this process be killed.
    """

    def __init__(self) -> None:
        self.directories: set[str] = set()
        self.files: set[str] = set()
        self.due: list[leftovers.Leftover] = []
        self._order: dict[str, leftovers.Kind] = {}
        self._noted: set[leftovers.Leftover] = set()

    def add(self, path: str, *, directory: bool) -> None:
        """`path` is made."""
        (self.directories if directory else self.files).add(path)
        self._order.pop(path, None)
        self._order[path] = leftovers.Kind.DIRECTORY if directory else leftovers.Kind.FILE

    def settle(self, path: str, outputs: Iterable[str]) -> None:
        """Have `path`, which was just made, removed in the end, where that is an output, or a directory on the way to one."""
        if any(inside(path, output) or (path in self.directories and inside(output, path)) for output in outputs):
            self.leave_none(path)

    def goes_with(self, output: str) -> None:
        """Have all that was made in `output`, and on the way to it, removed in the end."""
        for path in list(self._order):
            if inside(path, output) or (path in self.directories and inside(output, path)):
                self.leave_none(path)

    def below(self, directory: str) -> list[str]:
        """What was made at and in `directory`, by name."""
        return sorted(path for path in (*self.directories, *self.files) if inside(path, directory))

    def holds(self, path: str) -> bool:
        """Whether `path` is, or lies in, a directory that was made."""
        return any(place in self.directories for place in upwards(path))

    def leave_none(self, path: str) -> None:
        """Have `path`, which was made, removed in the end, also when this process is killed."""
        entry = (self._order[path], path)
        if entry in self._noted:
            return
        self._noted.add(entry)
        self.due.append(entry)
        if os.environ.get(SCRATCH):
            leftovers.note(os.environ[SCRATCH], entry)
