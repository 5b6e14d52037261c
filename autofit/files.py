"""JSON files: read with a one-line error, written in one step, checked for writability before work is spent."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.errors import FileFormatError, UserError


def read_json_object(path: str | Path, *, what: str) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Args:
        what: the file's noun for messages (`result`, `landscape`).

    Raises:
        FileFormatError: no path, missing, unreadable, not JSON, or not an object.
    """
    if not isinstance(path, str | os.PathLike):
        raise FileFormatError(f"the path of a {what} file is {path!r}", hint="give it as text or as a Path")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileFormatError(f"{what} file {str(path)!r} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise FileFormatError(f"{what} file {str(path)!r} cannot be read: {_reason(error)}") from None
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{what} file {str(path)!r} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FileFormatError(f"{what} file {str(path)!r} holds a {type(data).__name__}, not an object")
    return data


def _no_constant(name: str) -> float:
    """NaN and Infinity, which Python reads and JSON does not know."""
    raise ValueError(f"{name} is no number of JSON")


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write `data` to `path` through a temporary file beside it, so that a crash leaves the old file whole.

    A symbolic link stays one; a device or a pipe (`/dev/stdout`, `/dev/null`) is written to, never replaced, and so is a file whose directory
    takes no other.

    Raises:
        UserError: no path, or one that cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"the path to write to is {path!r}", hint="give it as text or as a Path")
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        try:
            _replace(target, text)
        except PermissionError:
            if not target.is_file():
                raise
            target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise UserError(f"cannot write {str(path)!r}: {_reason(error)}") from None


def _replace(target: Path, text: str) -> None:
    """Put a new file in the place of `target` in one step, or leave everything as it was."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".autofit-", delete=False
        ) as handle:
            temporary = handle.name
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def check_writable(path: str | Path, *, what: str) -> None:
    """Fail early when `path` could not be written at the end. Leaves nothing behind.

    Raises:
        UserError: a directory, a missing parent, no permission, or no name that a file can have.
    """
    target = Path(path)
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {str(path)!r} cannot be written: {_reason(error)}") from None
    if target.is_dir():
        raise UserError(f"{what} {str(path)!r} is a directory", hint="give the path of a file")
    if not target.parent.is_dir():
        raise UserError(f"{what} {str(path)!r} cannot be written: {str(target.parent)!r} is not a directory")
    if target.exists():
        if not os.access(target, os.W_OK):
            raise UserError(f"{what} {str(path)!r} cannot be written: permission denied")
        return
    try:  # rights alone do not tell: there are file systems that take nothing from anybody
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(target)).parent):
            pass
    except OSError as error:
        raise UserError(f"{what} {str(path)!r} cannot be written: {_reason(error)}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
