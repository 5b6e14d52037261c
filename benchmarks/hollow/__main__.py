"""`python -m benchmarks.hollow [--card NAME] -- COMMAND`: run a command on the hollow device (see the package)."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hollow.build import SOURCE, CannotBuild, build

SITE = Path(__file__).parent / "site"
CUDNN = {"2.6": 90100, "2.9": 91002, "2.10": 91002, "2.11": 91900, "2.12": 92000, "2.13": 92000, "2.14": 92400, "2.15": 92600}  #: that come with torch's wheels, from their metadata


@dataclass(frozen=True, slots=True)
class Card:
    """What of a card steers PyTorch: compute capability times ten, memory in MiB, multiprocessors."""

    capability: int
    memory_mib: int
    multiprocessors: int


CARDS = {
    "v100-16gb": Card(70, 16151, 80),
    "t4": Card(75, 14913, 40),
    "a100-80gb": Card(80, 81154, 108),
    "rtx-4090": Card(89, 24080, 128),
    "h200": Card(90, 143156, 132),
    "b200": Card(100, 182642, 148),
}


def main(arguments: list[str] | None = None) -> int:
    """Build what is missing, and become the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hollow", description=__doc__)
    parser.add_argument("--card", choices=sorted(CARDS), default="h200", help="whose shape it has (h200)")
    parser.add_argument("--libraries", type=Path, metavar="DIR", help="where they are kept (a folder of this torch's in the temporary directory)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("name a command after --, for instance: -- autofit doctor")
    try:
        directory = options.libraries or default_directory()
        if not (directory / "complete").exists():
            build(directory)
            (directory / "complete").touch()
        os.execvpe(command[0], command, environment(CARDS[options.card], options.card, directory))
    except (CannotBuild, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def default_directory() -> Path:
    """One for each installation of torch (and bitsandbytes, whose libraries are linked against the same) and each state of the sources."""
    digest = hashlib.sha256(f"{Path(sys.prefix).resolve()} {_version('bitsandbytes')}".encode())
    for path in sorted([*SOURCE.iterdir(), Path(__file__).with_name("build.py")]):
        digest.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / f"hollow-{_torch()}-{os.getuid()}-{digest.hexdigest()[:8]}"


def environment(card: Card, name: str, directory: Path) -> dict[str, str]:
    """The caller's, with the libraries and the card's shape."""
    minor = ".".join(_torch().split(".")[:2])
    ours = {
        "HOLLOW_NAME": name.upper(),
        "HOLLOW_CAPABILITY": str(card.capability),
        "HOLLOW_TOTAL_MIB": str(card.memory_mib),
        "HOLLOW_MULTIPROCESSORS": str(card.multiprocessors),
        "HOLLOW_CUDNN": os.environ.get("HOLLOW_CUDNN") or str(CUDNN.get(minor, max(CUDNN.values()))),
        "HOLLOW_STATE": str(directory / f"state-{name}"),
    }
    found = dict(os.environ) | ours
    for variable, first in (("LD_LIBRARY_PATH", directory), ("PYTHONPATH", SITE)):
        found[variable] = os.pathsep.join([str(first), *filter(None, [found.get(variable)])])
    return found


def _torch() -> str:
    found = _version("torch")
    if found is None:
        raise CannotBuild("torch is not installed")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
