"""What a folder of evidence holds, as a report reads it, and the tables of that report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.store import DONE, Folder, Sheet, is_dry_run

DRY_WARNING = "**Dry run on a CPU with tiny models: no figure here is a GPU's, and none means anything.**"
HOLLOW_WARNING = (
    "**A hollow device, which computes nothing (`benchmarks/hollow`): allocations are those of PyTorch's own CUDA build, every speed is that of a host.**"
)


class Reading:
    """A folder, read.

    Args:
        path: the folder.

    Raises:
        FileFormatError: it holds no evidence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dry_run = is_dry_run(path)
        self._folder = Folder(path, dry_run=self.dry_run)
        self._sheets: dict[str, Sheet] = {}

    def sheet(self, stage: str) -> Sheet:
        """The sheet of a stage; empty when it was never run."""
        if stage not in self._sheets:
            self._sheets[stage] = self._folder.sheet(stage)
        return self._sheets[stage]

    def ran(self, stage: str) -> bool:
        """Whether there is a sheet."""
        return (self.path / f"{stage}.json").exists()

    def row(self, stage: str, key: str) -> Mapping[str, Any]:
        """A row; empty when it is not there or not done."""
        row = self.sheet(stage).rows.get(key, {})
        return row if row.get("state") == DONE else {}

    def rows(self, stage: str, start: str = "") -> dict[str, dict[str, Any]]:
        """Rows that are done and whose key begins with `start`, by the rest of the key."""
        found = self.sheet(stage).rows.items()
        return {
            key.removeprefix(start): row
            for key, row in found
            if row["state"] == DONE and key.startswith(start)
        }

    @property
    def device_name(self) -> str:
        """As torch names it."""
        return str(self.sheet("run").rows["identity"]["device"])

    @property
    def warning(self) -> str | None:
        """Why no figure here may stand for a card's; None when it may."""
        if self.dry_run:
            return DRY_WARNING
        return HOLLOW_WARNING if self.device_name.startswith("Hollow") else None

    @property
    def where(self) -> str:
        """The device, for a picture; what computes nothing says so."""
        if self.dry_run:
            return "DRY RUN on a CPU, figures mean nothing"
        return f"{self.device_name}, which computes nothing" if self.warning else self.device_name

    @property
    def slug(self) -> str:
        """The device's name for file names; a dry run's says so."""
        return "cpu" if self.dry_run else slug(self.device_name)

    @property
    def commands(self) -> list[str]:
        """Every call that wrote into the folder."""
        return [row["command"] for key, row in self.sheet("run").rows.items() if key.startswith("call")]

    @property
    def machines(self) -> int:
        """On how many the calls ran, as far as they say; a machine that was started anew counts again."""
        return len({row["boot"] for key, row in self.sheet("run").rows.items() if key.startswith("call") and row.get("boot")})

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
        """A Markdown table, with the warning above it; a line that says so when there is nothing."""
        if not rows:
            return ["Nothing was recorded.", ""]
        lines = [f"| {' | '.join(headers)} |", "|" + " --- |" * len(headers)]
        lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
        return [*([self.warning, ""] if self.warning else []), *lines, ""]


def slug(name: str) -> str:
    """A name for files: `NVIDIA H200` -> `h200`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain.removeprefix("nvidia-") or "device"


def cell(value: object) -> str:
    """A value for a table: nothing for None, three digits for floats, one line for texts."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|")


def without_directories(text: str) -> str:
    """A text with the names of files and not the machine's folders before them; addresses stay whole."""
    return re.sub(r"(?<![\w.~/:])/(?:[\w.+@-]+/)+", "", text)


def mib(size: float | None) -> int | None:
    """Bytes as whole MiB."""
    return None if size is None else round(size / (1 << 20))


def percent(part: float | None, whole: float | None) -> str | None:
    """Relative difference of `part` from `whole`, signed."""
    return None if part is None or not whole else f"{100 * (part / whole - 1):+.1f} %"
