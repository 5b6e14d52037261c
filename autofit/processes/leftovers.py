"""What a child has made for its own time, in the user's directories or among temporary files: noted as it is made, so that it is removed even when the
child is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

PREFIX = "leftovers-"


class Kind(StrEnum):
    """How something is removed."""

    FILE = "file"
    DIRECTORY = "directory"  #: when it is empty: what else is in it may be someone else's
    TREE = "tree"  #: with all that is in it: the child's own temporary directory


Leftover = tuple[Kind, str]


def note(scratch: str | Path, leftover: Leftover) -> None:
    """Remember what this process made (child side)."""
    kind, path = leftover
    with open(Path(scratch) / f"{PREFIX}{os.getpid()}", "a", encoding="utf-8", errors="surrogateescape") as handle:
        handle.write(f"{kind} {path}\0")


def sweep(scratch: str | Path, *, everything: bool = False) -> None:
    """Remove what processes that have ended had made, the last first (parent side).

    Args:
        scratch: where they noted it.
        everything: all of them were ended, whatever the system says yet.
    """
    for listing in Path(scratch).glob(f"{PREFIX}*"):
        if not everything and _runs(int(listing.name.removeprefix(PREFIX))):
            continue
        entries = listing.read_text(encoding="utf-8", errors="surrogateescape").split("\0")
        pairs = (entry.partition(" ") for entry in reversed(entries) if entry)
        remove((Kind(kind), path) for kind, _, path in pairs)
        listing.unlink(missing_ok=True)


def remove(found: Iterable[Leftover]) -> None:
    """Remove what is still there."""
    for kind, path in found:
        with contextlib.suppress(OSError):
            if kind is Kind.DIRECTORY:
                os.rmdir(path)
            elif kind is Kind.TREE:
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.remove(path)


def _runs(pid: int) -> bool:
    """Whether a process is there and has not ended (one that has, and was not waited for, still has a number)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
