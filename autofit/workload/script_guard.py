"""What a script under trial may write: nothing in its output directory, and after its training nothing at all.

Three nets, because no single one catches all: savers of transformers, torch and safetensors (they write from C++ or Rust) and `open` are led into a
private directory; whatever else Python changes is seen by an audit hook, and refused; trackers are told by their environment variables to stay off.
Caches and other files that the script writes before its training, outside its output directory, are its own business; directories that were there
before are not deleted. Child side: an audit hook stays until the process ends.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.utils.hub import PushToHubMixin

from autofit.child_environment import QUIET
from autofit.workload.replacing import Opener, replaced

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
CACHES = ("~/.cache", "$XDG_CACHE_HOME", "$HF_HOME", "$HF_DATASETS_CACHE", "$HF_HUB_CACHE", "$TORCH_HOME", "$TRITON_CACHE_DIR")
ALWAYS_OPEN = ("/dev", "/proc")


class TrainingStopped(BaseException):
    """Unwinds the script when its training has been handled: nothing that stands after `train()` may run."""


class WriteGuard:
    """Keeps a script's writes out of the user's output directories.

    Args:
        private: a directory of this trial's own, which takes what is led away from elsewhere.
    """

    def __init__(self, private: str) -> None:
        self.private = os.path.realpath(private)
        self.redirected: list[str] = []
        self.spared: list[str] = []
        self._temporary = os.path.realpath(tempfile.gettempdir())
        places = (os.path.expanduser(os.path.expandvars(place)) for place in CACHES)
        self._caches = [os.path.realpath(place) for place in places if not place.startswith("$")]
        self._outputs: list[str] = []
        self._kept: list[str] = []
        self._made: list[str] = []
        self._made_files: list[str] = []
        self._gone: set[str] = set()
        self._sealed = self._active = False

    def protect(self, directory: str) -> None:
        """Let nothing be written into `directory` from here on. One that holds all temporary files cannot be protected."""
        path = os.path.realpath(os.path.expanduser(directory))
        if not _inside(self._temporary, path) and not _inside(path, self.private):
            self._outputs.append(path)

    def keep(self, directory: str) -> None:
        """Let nothing that is in `directory` now be changed. What the script adds there is its own, and is removed in the end.

        One that holds the working directory or all temporary files is not meant: too much of it is not the script's output.
        """
        path = os.path.realpath(os.path.expanduser(directory))
        if not any(_inside(place, path) for place in (self._temporary, os.path.realpath(os.getcwd()))):
            self._kept.append(path)

    def seal(self) -> None:
        """The training is over: whatever would write now unwinds the script instead."""
        self._sealed = True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch while the block runs; afterwards directories that the script made as its output, and left empty, are gone again."""
        self._active = True
        sys.addaudithook(self._hook)
        os.environ |= {
            **QUIET,
            "TENSORBOARD_LOGGING_DIR": self.private,
            "MLFLOW_TRACKING_URI": f"file://{self.private}",
        }
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in self._savers():
                stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
            try:
                yield
            finally:
                self._active = False
                self._clear()

    def _clear(self) -> None:
        for path in self._made_files:
            with contextlib.suppress(OSError):
                os.remove(path)
        for path in reversed(self._made):
            if any(_inside(path, output) for output in (*self._outputs, *self._kept)):
                with contextlib.suppress(OSError):
                    os.rmdir(path)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & WRITING and isinstance(path, str | bytes)
            if writes and not os.path.isdir(path):  # tempfile names the directory, and opens a file in it by itself
                self._check(os.path.realpath(os.fsdecode(path)))
        elif event in CHANGES:
            for path, directory in CHANGES[event]:
                where = _resolved(arguments[path], None if directory is None else arguments[directory])
                if where is not None:
                    self._check(where, event)

    def _check(self, path: str, event: str = "open") -> None:
        """Refuse, stop, or note a change of `path`."""
        if _inside(path, self.private) or path.startswith(ALWAYS_OPEN):
            return
        if event in REMOVALS and any(_inside(path, made) for made in self._made):
            return  # what the script made itself, a temporary directory above all
        if self._sealed:
            raise TrainingStopped
        there = os.path.lexists(path)
        if event == "os.mkdir":
            if not there:
                self._made.append(path)
        elif event == "shutil.rmtree" and not there:
            return  # it will say so itself
        elif self._protected(path) or (there and path not in self._made_files and self._is_kept(path)):
            raise PermissionError(
                errno.EACCES, "a trial changes nothing in the script's output directory", path
            )
        elif not there and self._is_kept(path):
            self._made_files.append(path)

    def _protected(self, path: str) -> bool:
        return any(_inside(path, output) for output in self._outputs)

    def _is_kept(self, path: str) -> bool:
        return any(_inside(path, directory) for directory in self._kept)

    def _stands_for(self, path: str) -> bool:
        """Whether a counterpart stands for `path`: nothing may be written there, or what is there must stay as it is."""
        there = os.path.lexists(path) and path not in self._made_files
        return self._protected(path) or (there and self._is_kept(path))

    def _deletes(self, path: str) -> bool:
        """Whether a script may delete the directory `path`: what it made itself, and temporary files and caches that are no output of its."""
        if any(_inside(path, place) for place in (self.private, *self._made)):
            return True
        own = self._protected(path) or self._is_kept(path)
        return not own and any(_inside(path, place) for place in (self._temporary, *self._caches))

    def _sparing(self, remove: Callable[..., Any]) -> Callable[..., Any]:
        """`shutil.rmtree` that leaves alone what was there before, and says that it is gone."""

        @functools.wraps(remove)
        def sparing(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = _resolved(path, kwargs.get("dir_fd"))
            if self._sealed or where is None or not os.path.isdir(where) or self._deletes(where):
                return remove(path, *args, **kwargs)
            self._gone.add(where)
            self._kept.append(where)
            self.spared.append(str(path))
            return None

        return sparing

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`os.mkdir` that believes what `shutil.rmtree` said."""

        @functools.wraps(make)
        def making(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = _resolved(path, kwargs.get("dir_fd"))
            if where in self._gone:
                self._gone.discard(where)
                return None
            return make(path, *args, **kwargs)

        return making

    def _led(self, file: Any, mode: str) -> Any:
        """What to open instead of `file`: its counterpart in the private directory, when it lies where nothing may be written."""
        if not self._active or self._sealed or not isinstance(file, str | bytes | os.PathLike):
            return file
        path = os.path.realpath(os.fsdecode(file))
        if _inside(path, self.private) or not self._stands_for(path):
            return file
        counterpart = self._counterpart(path)
        if not set(mode) & set("wax+"):
            return counterpart if os.path.exists(counterpart) else file
        os.makedirs(os.path.dirname(counterpart), exist_ok=True)
        if set(mode) & set("a+") and os.path.isfile(path) and not os.path.exists(counterpart):
            shutil.copyfile(path, counterpart)
        self._note(os.path.dirname(path))
        return counterpart

    def _counterpart(self, path: str) -> str:
        return os.path.join(self.private, "saved", path.lstrip(os.sep))

    def _note(self, directory: str) -> None:
        if directory not in self.redirected:
            self.redirected.append(directory)

    def _elsewhere(self, directory: Any) -> Any:
        """Where to save what the script saves to `directory`: there, when it is private or a temporary directory of the script's own."""
        path = os.path.realpath(os.path.expanduser(os.fsdecode(directory)))
        own = [
            made
            for made in self._made
            if _inside(made, self._temporary) and os.path.dirname(made) == self._temporary
        ]
        if _inside(path, self.private) or any(_inside(path, made) for made in own):
            return directory
        self._note(str(directory))
        return self._counterpart(path)

    def _savers(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        import huggingface_hub
        import safetensors.torch
        from transformers import (
            AutoConfig,
            AutoTokenizer,
            PretrainedConfig,
            PreTrainedModel,
            PreTrainedTokenizerBase,
        )
        from transformers.models.auto.auto_factory import _BaseAutoModelClass

        autos = (c for c in _subclasses(_BaseAutoModelClass) if "from_pretrained" in vars(c))  # each has a copy of its own
        loaders = (AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, *autos)
        classes = [c for c in {PushToHubMixin, *_subclasses(PushToHubMixin)} if "save_pretrained" in vars(c)]
        return [
            *((c, "save_pretrained", self._redirecting) for c in classes),
            *((c, "from_pretrained", self._loading) for c in loaders),
            (PushToHubMixin, "push_to_hub", _refusing),
            (huggingface_hub, "create_repo", _refusing),
            (huggingface_hub.HfApi, "create_repo", _refusing),
            (huggingface_hub.HfApi, "create_commit", _refusing),
            (torch, "save", functools.partial(self._checking, position=1)),
            (safetensors.torch, "save_file", functools.partial(self._checking, position=1)),
            (builtins, "open", lambda function: Opener(function, self._led)),
            (pathlib.Path, "open", self._opening),
            (shutil, "rmtree", self._sparing),
            (os, "mkdir", self._making),
        ]

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            led = self._led(path, mode)
            return function(path if led is path else type(path)(led), mode, *args, **kwargs)

        return opened

    def _redirecting(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def redirected(saved: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            if self._sealed:
                raise TrainingStopped
            kwargs.pop("push_to_hub", None)
            return save(saved, self._elsewhere(save_directory), *args, **kwargs)

        return redirected

    def _loading(self, load: Any) -> Any:
        """`from_pretrained` that finds what `save_pretrained` has led elsewhere."""
        function = load.__func__

        @functools.wraps(function)
        def loading(cls: type[Any], name: Any = None, *args: Any, **kwargs: Any) -> Any:
            saved = self._counterpart(os.path.realpath(os.path.expanduser(name))) if isinstance(name, str | os.PathLike) else ""
            return function(cls, saved if os.path.isdir(saved) else name, *args, **kwargs)

        return classmethod(loading)

    def _checking(self, save: Callable[..., Any], *, position: int) -> Callable[..., Any]:
        @functools.wraps(save)
        def checked(*args: Any, **kwargs: Any) -> Any:
            name = next((n for n in ("f", "filename") if n in kwargs), "f")
            target = args[position] if len(args) > position else kwargs.get(name)
            if isinstance(target, str | os.PathLike):
                target = self._led(target, "w")
                self._check(os.path.realpath(target))
                if len(args) > position:
                    args = (*args[:position], target, *args[position + 1 :])
                else:
                    kwargs[name] = target
            return save(*args, **kwargs)

        return checked


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "a trial does not push to the hub")

    return refused


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _resolved(path: Any, descriptor: Any) -> str | None:
    """The real path that an audit event speaks of; None for an open file."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    name = os.fsdecode(path)
    if isinstance(descriptor, int) and descriptor >= 0 and not os.path.isabs(name):
        name = os.path.join(os.path.realpath(f"/proc/self/fd/{descriptor}"), name)
    return os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)
