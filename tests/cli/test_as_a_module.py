"""`python -m autofit` is `autofit`."""

from __future__ import annotations

import subprocess
import sys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "autofit", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_package_runs_as_the_command_does() -> None:
    assert run("--version").stdout.startswith("autofit, version ")
    alone = run()
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr == run("--help").stdout, "who gives no command is told which there are, line by line"
    refused = run("search")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no model given")
