"""The functions that are replaced while a script under trial runs, by what its `WriteGuard` says."""

from __future__ import annotations

import builtins
import bz2
import errno
import functools
import io
import os
import pathlib
import shutil
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.utils.hub import PushToHubMixin

from autofit.workload.replacing import Opener
from autofit.workload.scripts.guard import TrainingStopped, WriteGuard
from autofit.workload.scripts.places import inside, resolved

#: where the built-in `open` is known by a name of its own
OPENERS = ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open"))

Net = tuple[Any, str, Callable[[Any], Any]]


def nets(guard: WriteGuard) -> list[Net]:
    """(owner, name, wrapper) of every function that saves, loads, opens, removes or renames."""
    import huggingface_hub
    import safetensors.torch
    import tokenizers

    bound = functools.partial
    return [
        *((c, "save_pretrained", bound(_redirecting, guard)) for c in _savers()),
        *((c, "from_pretrained", bound(_loading, guard)) for c in _loaders()),
        (PushToHubMixin, "push_to_hub", _refusing),
        (huggingface_hub, "create_repo", _refusing),
        (huggingface_hub.HfApi, "create_repo", _refusing),
        (huggingface_hub.HfApi, "create_commit", _refusing),
        (torch, "save", bound(_checking, guard, position=1)),
        (safetensors.torch, "save_file", bound(_checking, guard, position=1)),
        (tokenizers.Tokenizer, "save", bound(_checking, guard, position=1)),
        *((owner, name, lambda function: Opener(function, guard.led)) for owner, name in OPENERS),
        (pathlib.Path, "open", bound(_opening, guard)),
        (shutil, "rmtree", bound(_sparing, guard, tree=True)),
        *((os, name, bound(_sparing, guard)) for name in ("remove", "unlink", "rmdir")),
        *((os, name, bound(_moving, guard)) for name in ("rename", "replace")),
        (os, "mkdir", bound(_making, guard)),
    ]


def _savers() -> Iterator[type[Any]]:
    yield from (c for c in {*_subclasses(PushToHubMixin)} if "save_pretrained" in vars(c))


def _loaders() -> tuple[type[Any], ...]:
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    autos = (c for c in _subclasses(_BaseAutoModelClass) if "from_pretrained" in vars(c))  # each has a copy of its own
    return (AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, *autos)


def _sparing(guard: WriteGuard, remove: Callable[..., Any], *, tree: bool = False) -> Callable[..., Any]:
    """A removal that leaves alone what was there before, and says that it is gone; its counterpart is emptied."""

    @functools.wraps(remove)
    def sparing(path: Any, *args: Any, **kwargs: Any) -> Any:
        where = resolved(path, kwargs.get("dir_fd"))
        directory = where is not None and os.path.isdir(where) and not os.path.islink(where)
        right = directory if tree else not directory or (remove.__name__ == "rmdir" and not os.listdir(where))
        if not right or not guard.spares(path, kwargs.get("dir_fd"), tree=tree):
            return remove(path, *args, **kwargs)  # which also says what is wrong
        if not directory:
            counterpart = guard.counterpart(os.path.realpath(str(where)))
            os.makedirs(os.path.dirname(counterpart), exist_ok=True)
            open(counterpart, "w").close()
        return None

    return _as_of_os(sparing)


def _moving(guard: WriteGuard, move: Callable[..., Any]) -> Callable[..., Any]:
    """`os.rename` that leaves what was there before where it is, and a copy of it where it would be."""

    @functools.wraps(move)
    def moving(src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> Any:
        source, target = resolved(src, src_dir_fd), resolved(dst, dst_dir_fd)
        counterpart = guard.stand_in(source, target)
        if source is not None and target is not None and guard.stays(source, target):
            if guard.worth_copying(source):
                _leave_a_copy(guard, guard.now_at(source), counterpart or target)
            guard.spare(src, source)
            return None
        if counterpart is not None:
            shutil.move(str(source), counterpart)
            return None
        made = source is not None and not guard.existed(source)
        move(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if made:
            guard.moved(str(source), str(target))
        return None

    return _as_of_os(moving)


def _leave_a_copy(guard: WriteGuard, source: str, target: str) -> None:
    """Where nothing is in the way; it goes again in the end."""
    if os.path.lexists(target) and not inside(target, guard.private):
        return
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        guard.copied(target)
        shutil.copy2(source, target, follow_symlinks=False)


def _as_of_os(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pickles by its public name, as the function that it stands for does."""
    if function.__module__ == "posix":
        function.__module__ = "os"
    return function


def _making(guard: WriteGuard, make: Callable[..., Any]) -> Callable[..., Any]:
    """`os.mkdir` that believes what a removal said."""

    @functools.wraps(make)
    def making(path: Any, *args: Any, **kwargs: Any) -> Any:
        return None if guard.believed_gone(path, kwargs.get("dir_fd")) else make(path, *args, **kwargs)

    return _as_of_os(making)


def _opening(guard: WriteGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        led = guard.led(path, mode)
        return function(path if led is path else type(path)(led), mode, *args, **kwargs)

    return opened


def _redirecting(guard: WriteGuard, save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def redirected(saved: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if guard.sealed:
            raise TrainingStopped
        kwargs.pop("push_to_hub", None)
        return save(saved, guard.elsewhere(save_directory), *args, **kwargs)

    return redirected


def _loading(guard: WriteGuard, load: Any) -> Any:
    """`from_pretrained` that finds what `save_pretrained` has led elsewhere."""
    function = load.__func__

    @functools.wraps(function)
    def loading(cls: type[Any], name: Any = None, *args: Any, **kwargs: Any) -> Any:
        saved = guard.counterpart(os.path.realpath(os.path.expanduser(name))) if isinstance(name, str | os.PathLike) else ""
        return function(cls, saved if os.path.isdir(saved) else name, *args, **kwargs)

    return classmethod(loading)


def _checking(guard: WriteGuard, save: Callable[..., Any], *, position: int) -> Callable[..., Any]:
    @functools.wraps(save)
    def checked(*args: Any, **kwargs: Any) -> Any:
        name = next((n for n in ("f", "filename", "path") if n in kwargs), "f")
        target = args[position] if len(args) > position else kwargs.get(name)
        if isinstance(target, str | os.PathLike):
            target = guard.led(target, "w")
            guard.check(os.path.realpath(target))
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
