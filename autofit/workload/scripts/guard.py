"""What a script under trial may change: nothing that was in its output directories before, and after its training nothing at all.

No single net catches everything, so there are three: functions that save, open, remove and rename are replaced (`nets`; savers of transformers, torch,
safetensors and tokenizers write from C++ or Rust); whatever else Python changes is seen by an audit hook (`audit`), and refused; trackers are told by their
environment variables to stay off. In the script's output directories what is new is really written, so that every library finds it again, and is
removed in the end (but for files that C++ code made), also what was made before the script has named the directory; what was there before is never
touched: a counterpart in a private directory stands for it, and of a removal the script is told that it took place. Anywhere else a file that was
there before is not overwritten by Python either, and `shutil.rmtree` spares what was there before, but for caches and temporary files; other changes are
the script's own business. Not covered: commands that the script starts (`os.system`), and files that C++ code writes over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from autofit.processes import leftovers
from autofit.processes.child_environment import QUIET
from autofit.workload.replacing import replaced
from autofit.workload.scripts.audit import REMOVALS, watch
from autofit.workload.scripts.made import Made
from autofit.workload.scripts.places import Places, inside, inside_any, resolved, upwards

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
        redirected: directories that the script saved to, and files outside of them that it would have overwritten.
        spared: what the script removed or renamed, and is still there.
    """

    def __init__(self, private: str, projects: tuple[str, ...] = ()) -> None:
        self._places = Places(private, projects)
        self.private = self._places.private
        self.redirected: list[str] = []
        self.spared: list[str] = []
        self.sealed = self.is_active = False
        self._kept: list[str] = []
        self._made = Made()
        self._gone: set[str] = set()  # directories, as the script was told
        self._anew: set[str] = set()  # that the script has made in those
        self._old: set[tuple[int, int]] = set()  # files that were there before, and may look newer: device and inode
        self._since = 0.0

    def keep(self, directory: str) -> None:
        """Let nothing that is in `directory` now be changed. What the script adds there, or has added, is removed in the end.

        One that holds the working directory or all temporary files is not meant: too much of it is not the script's output.
        """
        path = os.path.realpath(os.path.expanduser(directory))
        if not self._places.is_broad(path) and not inside(path, self.private) and path not in self._kept:
            self._kept.append(path)
            self._made.goes_with(path)

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
        watch(self)
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
                leftovers.remove(reversed(self._made.due))

    def led(self, file: Any, mode: str) -> Any:
        """What to open instead of `file`: its counterpart, where what is there must stay as it is, or has been led away before."""
        if not self._watches or not isinstance(file, str | bytes | os.PathLike):
            return file
        path = os.path.realpath(os.fsdecode(file))
        if inside(path, self.private):
            return file
        counterpart = self.counterpart(path)
        if not set(mode) & set("wax+"):
            return counterpart if os.path.isfile(counterpart) else file
        if "x" in mode and not self.is_kept(path):
            return file  # which is refused where there is a file, as the script expects
        adds = not set(mode) & set("wx")
        if not self._must_stay(path, adds=adds):
            return file
        os.makedirs(os.path.dirname(counterpart), exist_ok=True)
        if adds and os.path.isfile(path) and not os.path.exists(counterpart):
            shutil.copyfile(path, counterpart)
        self._note_led(path)
        return counterpart

    def _must_stay(self, path: str, *, adds: bool) -> bool:
        """Whether what is at `path` must not be written to.

        Args:
            adds: what is there is wanted too; then a file that is large, and no output, is the script's own business.
        """
        if not self.existed(path):
            return False
        if self.is_kept(path):
            return True
        if not os.path.isfile(path) or os.path.islink(path) or self._places.is_disposable(path):
            return False
        return not adds or os.path.exists(self.counterpart(path)) or os.path.getsize(path) <= LARGEST_COPY

    def counterpart(self, path: str) -> str:
        """What stands for `path` in the private directory."""
        return os.path.join(self.private, "saved", path.lstrip(os.sep))

    def note(self, path: str) -> None:
        """Remember that the script saved to the directory, or would have overwritten the file, at `path`."""
        if path not in self.redirected:
            self.redirected.append(path)

    def _note_led(self, path: str) -> None:
        self.note(os.path.dirname(path) if self.is_kept(path) else path)

    def elsewhere(self, directory: Any) -> Any:
        """Where to save what the script saves to `directory`: there, when it is private or a temporary directory of the script's own."""
        path = os.path.realpath(os.path.expanduser(os.fsdecode(directory)))
        own = any(made in self._made.directories and self._places.is_temporary_directory(made) for made in upwards(path))
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
        if not self.is_kept(where) and not self._is_led(where) and (not tree or self._places.is_disposable(where)):
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
        """Whether `source` must not be moved to `target`: it was there before, and either place is an output directory, or it was led away."""
        if not self._watches or source is None or target is None:
            return False
        return self.existed(source) and (self.is_kept(source) or self.is_kept(target) or self._is_led(source))

    def stand_in(self, source: str | None, target: str | None) -> str | None:
        """The counterpart that takes what the script moves from `source` onto `target`; None where it may go there itself."""
        if not self._watches or target is None or not self._must_stay(target, adds=False):
            return None
        if not self.is_kept(target) and (source is None or not os.path.isfile(source) or (self.existed(source) and not self._is_led(source))):
            return None
        counterpart = self.counterpart(target)
        os.makedirs(os.path.dirname(counterpart), exist_ok=True)
        self._note_led(target)
        return counterpart

    def worth_copying(self, source: str) -> bool:
        """Whether a copy of `source` is worth its time: of outputs, which may be checkpoints, only files that are small."""
        if os.path.isdir(source) and not os.path.islink(source):
            return not self.is_kept(source)
        return os.lstat(source).st_size <= LARGEST_COPY

    def now_at(self, source: str) -> str:
        """Where the script finds what it has at `source`."""
        return self.counterpart(source) if self._is_led(source) else source

    def copied(self, target: str) -> None:
        """A copy of something that stays is at `target` for the time of the trial."""
        self._made.add(target, directory=False)
        self._made.leave_none(target)

    def moved(self, source: str, target: str) -> None:
        """What the script had made at `source` is at `target` now."""
        if not self._watches or not os.path.isdir(target):
            return
        for path in self._made.below(source):
            self._add(target + path.removeprefix(source), directory=path in self._made.directories)

    def believed_gone(self, path: Any, descriptor: Any = None) -> bool:
        """Whether the script was told that the directory `path` is gone, and so may make it anew (once)."""
        where = resolved(path, descriptor)
        if where is None or where in self._anew or not os.path.isdir(where):
            return False
        if not inside_any(where, self._gone):
            return False
        self._anew.add(where)
        return True

    @property
    def _watches(self) -> bool:
        return self.is_active and not self.sealed

    def check(self, path: str, event: str = "open") -> None:
        """Refuse, stop, or note a change of `path`."""
        if self._places.is_private(path):
            return
        if event in REMOVALS and self._made.holds(path):
            return  # what the script made itself, a temporary directory above all
        if self.sealed:
            raise TrainingStopped
        self.remember(path)
        if not os.path.lexists(path):
            if event not in REMOVALS:  # it will say itself that there is nothing
                self._add(path, directory=event == "os.mkdir")
        elif event != "os.mkdir" and self.is_kept(path) and self.existed(path) and not path.endswith(".lock"):
            self._refuse(path)
        elif event == "os.remove" and (status := os.lstat(path)).st_nlink == 1:
            self._old.discard((status.st_dev, status.st_ino))  # another file may have the number next

    def check_move(self, source: str, target: str) -> None:
        """Refuse to move what was there before to where it would be removed with what the script made; `nets` leave a copy instead."""
        if self.existed(source) and self.is_kept(target) and not self.sealed:
            self._refuse(target)

    def _refuse(self, path: str) -> NoReturn:
        raise PermissionError(errno.EACCES, "a trial changes nothing that was in the script's output directory before", path)

    def _add(self, path: str, *, directory: bool) -> None:
        """`path` is about to be made."""
        self._made.add(path, directory=directory)
        if directory:
            self._anew.add(path)
        elif self.is_kept(path):
            self.note(os.path.dirname(path))
        self._made.settle(path, self._kept)

    def remember(self, path: str | None) -> None:
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
        if path in self._made.files or self._made.holds(path):
            return False
        return os.path.isdir(path) or status.st_ctime <= self._since

    def is_kept(self, path: str) -> bool:
        """Whether `path` is, or lies in, an output directory."""
        return inside_any(path, self._kept)

    def _is_led(self, path: str) -> bool:
        """Whether a counterpart stands for the file at `path`."""
        return os.path.isfile(self.counterpart(path)) and not os.path.isdir(path)
