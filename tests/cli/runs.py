"""The real command line, in a process of its own or in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.cli import main


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


def autofit_here(
    *arguments: object, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run it in this process, where a module's one fork server is: a second where a process of its own takes five."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.chdir(cwd)
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(argument) for argument in arguments])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    seen = capsys.readouterr()
    return Run(int(ended.value.code or 0), seen.out, seen.err)
