"""Where paths of a script under trial lie: among caches, temporary files, or the user's own work; pure but for what links say."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from autofit.processes.protocol import SCRATCH

CACHES = (
    "~/.cache", "$XDG_CACHE_HOME", "$HF_HOME", "$HF_DATASETS_CACHE", "$HF_HUB_CACHE", "$TORCH_HOME", "$TRITON_CACHE_DIR", "$TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
ALWAYS_OPEN = ("/dev", "/proc", "/sys")


class Places:
    """What is a cache or a temporary file, and what is the user's own.

    Args:
        private: a directory of the trial's own.
        projects: directories of the user's own work, which are none for temporary files even where they lie among those.
    """

    def __init__(self, private: str, projects: tuple[str, ...] = ()) -> None:
        self.private = os.path.realpath(private)
        scratch = os.environ.get(SCRATCH)  # it lies among the machine's temporary files, and the child's own ones in it
        directories = [tempfile.gettempdir(), *([os.path.dirname(scratch)] if scratch else [])]
        self.temporary = [os.path.realpath(directory) for directory in directories]
        caches = (os.path.expanduser(os.path.expandvars(place)) for place in CACHES)
        self._caches = [os.path.realpath(place) for place in caches if not place.startswith("$")]
        self._projects = [os.path.realpath(place) for place in (os.getcwd(), *projects)]

    def is_private(self, path: str) -> bool:
        """Whether `path` is the trial's own, or belongs to the system."""
        return inside(path, self.private) or inside_any(path, ALWAYS_OPEN)

    def is_temporary_directory(self, path: str) -> bool:
        """Whether `path` lies directly among the temporary files."""
        return os.path.dirname(path) in self.temporary

    def is_broad(self, path: str) -> bool:
        """Whether `path` holds the working directory, or all temporary files."""
        return any(inside(place, path) for place in (*self.temporary, os.path.realpath(os.getcwd())))

    def is_disposable(self, path: str) -> bool:
        """Whether `path` is a cache or a temporary file, and no work of the user's."""
        if self.is_private(path):
            return True
        return not inside_any(path, self._projects) and inside_any(path, (*self.temporary, *self._caches))


def resolved(path: Any, descriptor: Any) -> str | None:
    """The real path of an entry in its directory (a link itself, not its end); None for an open file."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    name = os.fsdecode(path)
    if isinstance(descriptor, int) and descriptor >= 0 and not os.path.isabs(name):
        name = os.path.join(os.path.realpath(f"/proc/self/fd/{descriptor}"), name)
    return os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))


def upwards(path: str) -> Iterator[str]:
    """`path` and every directory above it."""
    yield path
    while (parent := os.path.dirname(path)) != path:
        path = parent
        yield path


def inside(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or lies in it; both absolute."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def inside_any(path: str, directories: Iterable[str]) -> bool:
    """Whether `path` is one of `directories` or lies in one."""
    return any(inside(path, directory) for directory in directories)
