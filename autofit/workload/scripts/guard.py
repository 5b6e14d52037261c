"""What a script under trial may change: nothing that was in its output directories before, and after its training nothing at all.

No single net catches everything, so there are three: functions that save, open, remove and rename are replaced (`script_nets`; savers of transformers,
torch and safetensors write from C++ or Rust); whatever else Python changes is seen by an audit hook, and refused; trackers are told by their
environment variables to stay off. In the script's output directories what is new is really written, so that every library finds it again, and is
removed in the end (but for files that C++ code made); what was there before is never touched: a counterpart in a private directory stands for it, and of a removal the script is told that it
took place. Anywhere else `shutil.rmtree` spares what was there before, but for caches and temporary files; other changes are the script's own
business. Not covered: commands that the script starts (`os.system`), and files in output directories that C++ code writes over.
Child side: an audit hook stays until the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from autofit.processes import leftovers
from autofit.processes.child_environment import QUIET
from autofit.processes.protocol import SCRATCH
from autofit.workload.replacing import replaced

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
CACHES = ("~/.cache", "$XDG_CACHE_HOME", "$HF_HOME", "$HF_DATASETS_CACHE", "$HF_HUB_CACHE", "$TORCH_HOME", "$TRITON_CACHE_DIR")
ALWAYS_OPEN = ("/dev", "/proc")
LARGEST_COPY = 64 << 20  #: bytes
TICK_SECONDS = 0.01  #: file times lag behind the clock by less


class TrainingStopped(BaseException):
    """Unwinds the script when its training has been handled: nothing that stands after `train()` may run."""


class WriteGuard:
    """Keeps what was there before as it was.

    Args:
        private: a directory of this trial's own, which takes what is led away from elsewhere.
        projects: directories of the user's own work, which are none for temporary files even where they lie among those.

    Attributes:
        redirected: directories that the script saved to.
        spared: what the script removed or renamed, and is still there.
    """

    def __init__(self, private: str, projects: tuple[str, ...] = ()) -> None:
        self.private = os.path.realpath(private)
        self.redirected: list[str] = []
        self.spared: list[str] = []
        self.sealed = self.is_active = False
        self._temporary = os.path.realpath(tempfile.gettempdir())
        places = (os.path.expanduser(os.path.expandvars(place)) for place in CACHES)
        self._caches = [os.path.realpath(place) for place in places if not place.startswith("$")]
        self._projects = [os.path.realpath(place) for place in (os.getcwd(), *projects)]
        self._kept: list[str] = []
        self._made: set[str] = set()  # directories
        self._made_files: set[str] = set()  # in kept directories
        self._leftovers: list[leftovers.Leftover] = []
        self._gone: set[str] = set()  # directories, as the script was told
        self._anew: set[str] = set()  # that the script has made in those
        self._old: set[tuple[int, int]] = set()  # files that were there before, and may look newer: device and inode
        self._since = 0.0

    def keep(self, directory: str) -> None:
        """Let nothing that is in `directory` now be changed. What the script adds there is removed in the end.

        One that holds the working directory or all temporary files is not meant: too much of it is not the script's output.
        """
        path = os.path.realpath(os.path.expanduser(directory))
        broad = any(inside(place, path) for place in (self._temporary, os.path.realpath(os.getcwd())))
        if not broad and not inside(path, self.private) and path not in self._kept:
            self._kept.append(path)

    def seal(self) -> None:
        """The training is over: whatever would write now unwinds the script instead."""
        self.sealed = True

    @contextlib.contextmanager
    def active(self, nets: Callable[[WriteGuard], list[tuple[Any, str, Callable[[Any], Any]]]]) -> Iterator[None]:
        """Watch while the block runs; afterwards what the script added to its output directories is gone again.

        Args:
            nets: (owner, name, wrapper) of every function to replace.
        """
        self._since, self.is_active = time.time(), True
        time.sleep(TICK_SECONDS)
        sys.addaudithook(self._hook)
        os.environ |= {
            **QUIET,
            "TENSORBOARD_LOGGING_DIR": self.private,
            "MLFLOW_TRACKING_URI": f"file://{self.private}",
        }
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in nets(self):
                stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
            try:
                yield
            finally:
                self.is_active = False
                leftovers.remove(reversed(self._leftovers))

    def led(self, file: Any, mode: str) -> Any:
        """What to open instead of `file`: its counterpart, where what is there must stay as it is, or has been led away before."""
        if not self.is_active or self.sealed or not isinstance(file, str | bytes | os.PathLike):
            return file
        path = os.path.realpath(os.fsdecode(file))
        if inside(path, self.private):
            return file
        counterpart = self.counterpart(path)
        if not set(mode) & set("wax+"):
            return counterpart if os.path.isfile(counterpart) else file
        if not (self.is_kept(path) and self.existed(path)):
            return file
        os.makedirs(os.path.dirname(counterpart), exist_ok=True)
        if set(mode) & set("a+") and os.path.isfile(path) and not os.path.exists(counterpart):
            shutil.copyfile(path, counterpart)
        self.note(os.path.dirname(path))
        return counterpart

    def counterpart(self, path: str) -> str:
        """What stands for `path` in the private directory."""
        return os.path.join(self.private, "saved", path.lstrip(os.sep))

    def note(self, directory: str) -> None:
        """Remember that the script saved to `directory`."""
        if directory not in self.redirected:
            self.redirected.append(directory)

    def elsewhere(self, directory: Any) -> Any:
        """Where to save what the script saves to `directory`: there, when it is private or a temporary directory of the script's own."""
        path = os.path.realpath(os.path.expanduser(os.fsdecode(directory)))
        own = any(made in self._made and os.path.dirname(made) == self._temporary for made in _upwards(path))
        if own or inside(path, self.private):
            return directory
        self.note(str(directory))
        self.keep(path)
        return self.counterpart(path)

    def spares(self, path: Any, descriptor: Any = None, *, tree: bool = False) -> bool:
        """Whether what is at `path` stays, though the script removes it; noted, and believed from then on.

        Args:
            tree: `path` is a directory, and all that is in it goes.
        """
        where = resolved(path, descriptor)
        if not self._watches or where is None or not self.existed(where):
            return False
        if not self.is_kept(where) and (not tree or self._disposable(where)):
            return False
        self.spare(path, where)
        return True

    def spare(self, path: Any, where: str) -> None:
        """Remember that what the script calls `path` stays where it is; of a directory the script believes that it is gone."""
        if str(path) not in self.spared:
            self.spared.append(str(path))
        if os.path.isdir(where):
            self._gone.add(where)
            self._anew = {made for made in self._anew if not inside(made, where)}
            self.keep(where)

    def stays(self, source: str | None, target: str | None) -> bool:
        """Whether `source` must not be moved to `target`: it was there before, and either place is an output directory."""
        if not self._watches or source is None or target is None:
            return False
        return self.existed(source) and (self.is_kept(source) or self.is_kept(target))

    def stand_in(self, target: str | None) -> str | None:
        """The counterpart that takes what the script moves onto `target`; None where it may go there itself."""
        if not self._watches or target is None or not (self.is_kept(target) and self.existed(target)):
            return None
        counterpart = self.counterpart(target)
        os.makedirs(os.path.dirname(counterpart), exist_ok=True)
        self.note(os.path.dirname(target))
        return counterpart

    def worth_copying(self, source: str) -> bool:
        """Whether a copy of `source` is worth its time: of outputs, which may be checkpoints, only files that are small."""
        if os.path.isdir(source) and not os.path.islink(source):
            return not self.is_kept(source)
        return os.lstat(source).st_size <= LARGEST_COPY

    def copied(self, target: str) -> None:
        """A copy of something that stays is at `target` for the time of the trial."""
        self._made_files.add(target)
        self._leave_none(leftovers.Kind.FILE, target)

    def moved(self, source: str, target: str) -> None:
        """What the script had made at `source` is at `target` now."""
        if not self._watches or not os.path.isdir(target):
            return
        for made, directory in ((self._made, True), (self._made_files, False)):
            for path in sorted(path for path in made if inside(path, source)):
                self._add(target + path.removeprefix(source), "os.rename", directory=directory)

    def believed_gone(self, path: Any, descriptor: Any = None) -> bool:
        """Whether the script was told that the directory `path` is gone, and so may make it anew (once)."""
        where = resolved(path, descriptor)
        if where is None or where in self._anew or not os.path.isdir(where):
            return False
        if not any(inside(where, gone) for gone in self._gone):
            return False
        self._anew.add(where)
        return True

    @property
    def _watches(self) -> bool:
        return self.is_active and not self.sealed

    def check(self, path: str, event: str = "open") -> None:
        """Refuse, stop, or note a change of `path`."""
        if inside(path, self.private) or path.startswith(ALWAYS_OPEN):
            return
        if event in REMOVALS and self._is_made(path):
            return  # what the script made itself, a temporary directory above all
        if self.sealed:
            raise TrainingStopped
        self._remember(path)
        if not os.path.lexists(path):
            self._add(path, event)
        elif event != "os.mkdir" and self.is_kept(path) and self.existed(path) and not path.endswith(".lock"):
            self._refuse(path)
        elif event == "os.remove" and (status := os.lstat(path)).st_nlink == 1:
            self._old.discard((status.st_dev, status.st_ino))  # another file may have the number next

    def _refuse(self, path: str) -> NoReturn:
        raise PermissionError(errno.EACCES, "a trial changes nothing that was in the script's output directory before", path)

    def _add(self, path: str, event: str, *, directory: bool = False) -> None:
        """`path` is about to be made."""
        if event in REMOVALS:
            return  # it will say itself that there is nothing
        directory = directory or event == "os.mkdir"
        if directory:
            self._made.add(path)
            self._anew.add(path)
        if not self.is_kept(path):
            return
        if not directory:
            self._made_files.add(path)
            self.note(os.path.dirname(path))
        self._leave_none(leftovers.Kind.DIRECTORY if directory else leftovers.Kind.FILE, path)

    def _leave_none(self, kind: leftovers.Kind, path: str) -> None:
        """Have `path` removed in the end, also when this process is killed."""
        self._leftovers.append((kind, path))
        if os.environ.get(SCRATCH):
            leftovers.note(os.environ[SCRATCH], (kind, path))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & WRITING and isinstance(path, str | bytes)
            if writes and not os.path.isdir(path):  # tempfile names the directory, and opens a file in it by itself
                self.check(os.path.realpath(os.fsdecode(path)))
            return
        if event in TOUCHES:
            position = TOUCHES[event]
            self._remember(resolved(arguments[0], None if position is None else arguments[position]))
        if event in CHANGES:
            places = [
                resolved(arguments[path], None if directory is None else arguments[directory]) for path, directory in CHANGES[event]
            ]
            if event == "os.rename" and None not in places:
                source, target = map(str, places)
                if self.existed(source) and self.is_kept(target) and not self.sealed:
                    self._refuse(target)  # it would be removed with what the script made; `script_nets` leaves a copy instead
                if os.path.isdir(source):
                    places = places[:1]  # where it went is known when it is there: see `moved`
            for where in places:
                if where is not None:
                    self.check(where, event)

    def _remember(self, path: str | None) -> None:
        """What was there before the trial stays known as that, whatever happens to its times."""
        with contextlib.suppress(OSError):
            if path is not None and (status := os.lstat(path)).st_ctime <= self._since:
                self._old.add((status.st_dev, status.st_ino))

    def existed(self, path: str) -> bool:
        """Whether something was at `path` before the trial; everything is that the trial was not seen making."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if (status.st_dev, status.st_ino) in self._old:
            return True
        if path in self._made_files or self._is_made(path):
            return False
        return os.path.isdir(path) or status.st_ctime <= self._since

    def is_kept(self, path: str) -> bool:
        """Whether `path` is, or lies in, an output directory."""
        return any(inside(path, directory) for directory in self._kept)

    def _is_made(self, path: str) -> bool:
        return any(place in self._made for place in _upwards(path))

    def _disposable(self, path: str) -> bool:
        """Whether `path` is a cache or a temporary file, and no output or work of the user's."""
        if inside(path, self.private):
            return True
        own = self.is_kept(path) or any(inside(path, project) for project in self._projects)
        return not own and any(inside(path, place) for place in (self._temporary, *self._caches))


def resolved(path: Any, descriptor: Any) -> str | None:
    """The real path of an entry in its directory (a link itself, not its end); None for an open file."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    name = os.fsdecode(path)
    if isinstance(descriptor, int) and descriptor >= 0 and not os.path.isabs(name):
        name = os.path.join(os.path.realpath(f"/proc/self/fd/{descriptor}"), name)
    return os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))


def _upwards(path: str) -> Iterator[str]:
    """`path` and every directory above it."""
    yield path
    while (parent := os.path.dirname(path)) != path:
        path = parent
        yield path


def inside(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or lies in it; both absolute."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)
