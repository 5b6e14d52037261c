"""What a run of the evidence writes: a folder with one sheet per stage, each a JSON file that is whole after every point.

Sheet: `{"schema": "autofit/evidence", "version": 1, "stage", "dry_run", "seconds", "notes", "left", "errors", "rows": {key: row}}`; a row is
`{"state": "done" | "skipped" | "failed" | "partial", "recorded": time, ...}`. What is done or skipped (it cannot run here) is not repeated
by the next call; what failed is tried again, what is partial is gone on with. A stage writes its own sheet only, so none can lose what another recorded.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autofit.errors import FileFormatError, UserError
from autofit.files import read_json_object, write_json

SCHEMA, VERSION = "autofit/evidence", 1
DONE, SKIPPED, FAILED, PARTIAL = STATES = ("done", "skipped", "failed", "partial")
IDENTITY = ("dry_run", "device", "torch", "transformers")  #: what must agree for rows to stand in one sheet
MAX_ERRORS = 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Sheet:
    """The rows of one stage.

    Args:
        path: of the JSON file; an existing one is gone on with.
        stage: its name.
        dry_run: whether the figures come from a CPU with tiny models and mean nothing.
    """

    def __init__(self, path: Path, *, stage: str, dry_run: bool) -> None:
        self.path, self.stage = path, stage
        self._unreadable = False
        self._data: dict[str, Any] = {
            "schema": SCHEMA,
            "version": VERSION,
            "stage": stage,
            "dry_run": dry_run,
            "seconds": 0.0,
            "notes": [],
            "left": [],
            "errors": [],
            "rows": {},
        }
        if path.exists():
            self._load(dry_run)

    def _load(self, dry_run: bool) -> None:
        try:
            found = read_json_object(self.path, what="evidence")
            if flaw := _flaw(found):
                raise FileFormatError(f"{str(self.path)!r} is not a sheet of evidence: {flaw}")
        except FileFormatError as error:
            self._unreadable = True
            self._data["notes"].append(f"what was recorded before could not be read: {error.message.replace(str(self.path), self.path.name)}")
            return
        if found["dry_run"] != dry_run:
            raise UserError(
                f"{str(self.path)!r} is {'a dry run' if found['dry_run'] else 'no dry run'}",
                hint="give another --out",
            )
        self._data |= found

    @property
    def rows(self) -> Mapping[str, dict[str, Any]]:
        """Key -> row, in the order of recording."""
        return self._data["rows"]  # type: ignore[no-any-return]

    @property
    def notes(self) -> list[str]:
        """What a reader must know, a sentence each."""
        return list(self._data["notes"])

    @property
    def left(self) -> list[str]:
        """Keys that were planned and are not settled, as of the last point."""
        return list(self._data["left"])

    @property
    def errors(self) -> list[str]:
        """Tracebacks of what broke the stage itself."""
        return list(self._data["errors"])

    @property
    def seconds(self) -> float:
        """Wall time of all calls."""
        return float(self._data["seconds"])

    def settled(self, key: str) -> bool:
        """Whether `key` needs no further run."""
        return self.rows.get(key, {}).get("state") in (DONE, SKIPPED)

    def done(self, key: str) -> bool:
        """Whether `key` has what it was planned for."""
        return self.rows.get(key, {}).get("state") == DONE

    def put(self, key: str, state: str = DONE, /, **content: Any) -> None:
        """Record one point; the file is whole before and after."""
        self._data["rows"][key] = {"state": state, "recorded": now(), **content}
        self._data["left"] = [name for name in self.left if not self.settled(name)]
        self.save()

    def skip(self, key: str, reason: str) -> None:
        """Record that a point cannot run here."""
        if self.rows.get(key, {}).get("reason") != reason:
            self.put(key, SKIPPED, reason=reason)

    def fail(self, key: str, error: str) -> None:
        """Record that a point failed; the next call tries it again."""
        self.put(key, FAILED, error=error)

    def note(self, text: str) -> None:
        """Keep a sentence for the report, once."""
        if text not in self._data["notes"]:
            self._data["notes"].append(text)
            self.save()

    def broke(self, traceback: str) -> None:
        """Keep what broke the stage."""
        self._data["errors"] = [*self._data["errors"], traceback][-MAX_ERRORS:]
        self.save()

    def plan(self, planned: Iterable[str]) -> None:
        """Note what is to be recorded, so that a report of a call that was killed says what it lacks."""
        self._data["left"] = [key for key in planned if not self.settled(key)]
        self.save()

    def close(self, seconds: float, planned: Iterable[str]) -> None:
        """End one call: add its time, note what is left of the plan."""
        self._data["seconds"] += seconds
        self.plan(planned)

    def save(self) -> None:
        """Write the file in one step; one that could not be read is put aside first."""
        if self._unreadable:
            put_aside(self.path)
            self._unreadable = False
        write_json(self.path, self._data)


class Folder:
    """The folder of one run, of one machine.

    Args:
        path: created where it is missing.
        dry_run: see `Sheet`.
    """

    def __init__(self, path: str | Path, *, dry_run: bool) -> None:
        self.path, self.dry_run = Path(path).resolve(), dry_run
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {str(path)!r} cannot be made: {error.strerror}") from None

    def sheet(self, stage: str) -> Sheet:
        """The sheet of a stage, as it stands."""
        return Sheet(self.path / f"{stage}.json", stage=stage, dry_run=self.dry_run)

    def file(self, *parts: str) -> Path:
        """A path below the folder, its directory made."""
        path = self.path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other calls off the folder: each would write its own rows over the other's. The kernel lets go when the process ends.

        A file system that cannot lock folders (some of a network) is gone on with.

        Raises:
            UserError: another call works in it.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another call works in {str(self.path)!r}", hint="wait for that one, or give another --out") from None
            except OSError:
                pass
            yield
        finally:
            os.close(handle)

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse to go on with a folder that was made under other conditions.

        Raises:
            UserError: another device or other versions.
        """
        run = self.sheet("run")
        kept = run.rows.get("identity")
        if kept is None:
            run.put("identity", **{name: identity.get(name) for name in IDENTITY})
            return
        for name in IDENTITY:
            if kept.get(name) != identity.get(name):
                raise UserError(
                    f"{str(self.path)!r} was recorded with {name} {kept.get(name)}, this is {identity.get(name)}",
                    hint="give another --out",
                )

    def begin(self, command: str, minutes: float) -> str:
        """Note that a call begins; returns its key."""
        run = self.sheet("run")
        key = f"call {sum(name.startswith('call') for name in run.rows) + 1}"
        run.put(key, command=command, minutes=minutes, boot=boot())
        return key


def put_aside(path: Path) -> None:
    """Give a file that cannot be read another name, so that a new one can take its place."""
    path.rename(path.with_suffix(f".unreadable-{os.getpid()}"))


def is_dry_run(path: str | Path) -> bool:
    """Whether an existing folder holds a dry run.

    Raises:
        FileFormatError: it holds no evidence.
    """
    found = read_json_object(Path(path) / "run.json", what="evidence")
    flaw = _flaw(found) or (None if "identity" in found["rows"] else "it does not say on what it was recorded")
    if flaw:
        raise FileFormatError(f"{str(path)!r} holds no evidence: {flaw}", hint="name the folder given to --out")
    return bool(found["dry_run"])


def _flaw(found: Mapping[str, Any]) -> str | None:
    """What keeps a JSON object from being a sheet; None when it is one."""
    if found.get("schema") != SCHEMA or found.get("version") != VERSION:
        return f"its schema is {found.get('schema')!r}, version {found.get('version')!r}"
    if not isinstance(found.get("dry_run"), bool):
        return "it does not say whether it is a dry run"
    rows = found.get("rows")
    if not isinstance(rows, dict) or any(not isinstance(row, dict) or row.get("state") not in STATES for row in rows.values()):
        return f"its rows are not objects with a state ({', '.join(STATES)})"
    if any(row["state"] == SKIPPED and not isinstance(row.get("reason"), str) for row in rows.values()):
        return "a row was skipped for no reason"
    for name in ("notes", "left", "errors"):
        texts = found.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return f"its {name} are not texts"
    if isinstance(found.get("seconds", 0.0), bool) or not isinstance(found.get("seconds", 0.0), int | float):
        return "its seconds are no number"
    return None


def boot() -> str | None:
    """What tells this start of this machine from any other; None where the kernel does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
