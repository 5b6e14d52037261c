"""The real command line in a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a person would see."""

    status: int
    stdout: str
    stderr: str


def autofit(*arguments: object, cwd: Path, timeout: float = 240, **environment: str) -> Run:
    """Run `autofit ARGUMENTS` in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-c", "from autofit.cli import main; main()", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)
