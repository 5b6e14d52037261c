"""The study on disk: Optuna's own journal file, safe against `kill -9` at any byte.

Optuna's file locks are files that outlive a killed process (a resumed search would wait 30 s for each); here the lock is `flock`,
which the kernel releases. A last line that a crash cut short is removed before anything is appended to it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock

from autofit.errors import StudyError
from autofit.files import check_writable
from autofit.units import format_bytes

STUDY_NAME = "autofit"
IDENTITY = "autofit:identity"
PACKAGES = ("bitsandbytes", "peft", "torch", "transformers")  #: names in an identity
HINT_NEW = "give another path to --study, or move the file away"


class _KernelLock(BaseJournalFileLock):
    """An advisory lock on the journal itself."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Journal(JournalFileBackend):
    """Optuna's journal, which says in one line why nothing can be added to it."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries.

        Raises:
            StudyError: the file cannot be written any more.
        """
        try:
            super().append_logs(logs)
        except OSError as error:
            raise StudyError(
                f"study file {self._file_path!r} cannot be written: {error.strerror}",
                hint="what it holds is kept: the same command goes on from there when it can be written again",
            ) from error


def open_study(
    path: str | Path | None, *, sampler: optuna.samplers.BaseSampler, identity: dict[str, Any]
) -> optuna.Study:
    """Create the study, or go on with the one in `path`.

    Args:
        path: journal file; None = in memory.
        sampler: of the study.
        identity: what must agree for records to be comparable (model, effective batch, device, software, limit).

    Raises:
        StudyError: the file is not a journal, holds another study, or was made under other conditions (named).
        UserError: the path cannot be written.
    """
    if path is None:
        study = _new_study(sampler, None)
        study.set_user_attr(IDENTITY, identity)
        return study
    check_writable(path, what="study file")
    if Path(path).exists() and not Path(path).is_file():
        raise StudyError(f"study file {str(path)!r} is no regular file: it could not be read again", hint=HINT_NEW)
    storage, begun = _storage(Path(path))
    # Nothing is written to the file before it is known to be ours: what is refused stays as it was, byte for byte.
    known = optuna.load_study(study_name=STUDY_NAME, storage=storage, sampler=sampler) if begun else None
    found = known.user_attrs.get(IDENTITY) if known is not None else None
    if found is not None:
        _check_identity(found, identity, path)
    elif known is not None and known.get_trials(deepcopy=False):
        raise StudyError(f"study file {str(path)!r} was not made by autofit", hint=HINT_NEW)
    _cut_torn_line(Path(path))
    study = known if known is not None else _new_study(sampler, storage)
    if found is None:
        study.set_user_attr(IDENTITY, identity)
    return study


def stored_identity(path: str | Path) -> dict[str, Any] | None:
    """The identity in an existing study file; None when there is no file or no study in it yet.

    Raises:
        StudyError: the file is not a journal.
    """
    if not Path(path).exists():
        return None
    for entry in reversed(_entries(Path(path))):
        attributes = entry.get("user_attr")
        if isinstance(attributes, dict) and IDENTITY in attributes:
            return dict(attributes[IDENTITY])
    return None


def _storage(path: Path) -> tuple[optuna.storages.BaseStorage, bool]:
    """The journal's storage, and whether our study is in it already."""
    entries = _entries(path) if path.exists() else []
    try:
        backend = _Journal(str(path), lock_obj=_KernelLock(str(path)))
        storage = optuna.storages.JournalStorage(backend)
        names = optuna.get_all_study_names(storage)
    except Exception as error:  # JSON lines that Optuna cannot replay: any error means the same to the user
        raise StudyError(f"study file {str(path)!r} cannot be replayed: {error!r}", hint=HINT_NEW) from error
    if names not in ([], [STUDY_NAME]):
        raise StudyError(
            f"study file {str(path)!r} holds other Optuna studies: {', '.join(names)}", hint=HINT_NEW
        )
    if entries and not names:
        raise StudyError(f"study file {str(path)!r} is a journal without a study", hint=HINT_NEW)
    return storage, bool(names)


def _new_study(
    sampler: optuna.samplers.BaseSampler, storage: optuna.storages.BaseStorage | None
) -> optuna.Study:
    """A new study, without the line that Optuna logs to stderr for each."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        return optuna.create_study(
            direction="maximize", sampler=sampler, study_name=STUDY_NAME, storage=storage
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def _check_identity(found: dict[str, Any], wanted: dict[str, Any], path: str | Path) -> None:
    names = sorted({*found, *wanted}, key=lambda name: (name in PACKAGES, name))  # what was asked for says more than what it brings along
    different = [name for name in names if found.get(name) != wanted.get(name)]
    if different:
        name = different[0]
        there, here = _said(name, found), _said(name, wanted)
        if there == here:  # sizes that differ by less than their digits
            there, here = str(found.get(name)), str(wanted.get(name))
        raise StudyError(
            f"study file {str(path)!r} was made under another {name.replace('_', ' ')}: {there} there, {here} here", hint=HINT_NEW
        )


def _said(name: str, identity: Mapping[str, Any]) -> str:
    value = identity.get(name)
    return format_bytes(value) if name == "memory_limit" and isinstance(value, int) else str(value)


def _cut_torn_line(path: Path) -> None:
    """Cut off a last line without its end: its writer was killed."""
    lock = _KernelLock(str(path))
    lock.acquire()
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(path, whole)
    finally:
        lock.release()


def _entries(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal.

    Raises:
        StudyError: unreadable, or a whole line that is no journal entry.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise StudyError(f"study file {str(path)!r} cannot be read: {error.strerror}") from None
    if not lines and path.stat().st_size > 0 and not _looks_torn(path):
        raise StudyError(f"study file {str(path)!r} is not an Optuna journal", hint=HINT_NEW)
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or "op_code" not in entry:
            raise StudyError(
                f"study file {str(path)!r} is not an Optuna journal: line {number}", hint=HINT_NEW
            )
        entries.append(entry)
    return entries


def _looks_torn(path: Path) -> bool:
    """Whether a file of one unfinished line is the beginning of a journal's first entry."""
    beginning = b'{"op_code":'
    data = path.read_bytes()[: len(beginning)]
    return data == beginning[: len(data)]
