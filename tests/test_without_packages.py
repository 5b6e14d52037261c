"""A machine that lacks every package that a plain search does not need: it searches all the same, and says what needs which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("datasets", "pyarrow", "bitsandbytes", "peft", "trl", "matplotlib", "scipy", "pandas")
#: As if not installed: neither importable, nor found by those who look before they import, nor listed with a version.
BLOCKER = f"""
import importlib.abc, importlib.metadata, importlib.util, sys

ABSENT = {set(ABSENT)!r}
find_spec, version = importlib.util.find_spec, importlib.metadata.version

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def find(name, package=None):
    return None if name.partition(".")[0] in ABSENT else find_spec(name, package)

def installed(name):
    if name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path.insert(0, Blocker())
importlib.util.find_spec, importlib.metadata.version = find, installed
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of such a machine; children inherit it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    root = Path(__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{root}"}


def run(environment: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`autofit` there."""
    command = [sys.executable, "-c", "from autofit.cli import main; main()", *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_plain_search_needs_none_of_them(bare: dict[str, str], tmp_path: Path) -> None:
    narrow = ("--batch-size", "8", "--precision", "fp32", "--checkpointing", "off", "--optim", "adamw_torch_fused")
    done = run(bare, tmp_path, "search", "--model", "bert-tiny", "--effective-batch", "8", "--seq-len", "16", *narrow)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "best.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--dataset", "rows.csv"), "--dataset needs the package"),
        (("--adapter", "lora"), "peft"),
        (("--optim", "adamw_bnb_8bit"), "needs bitsandbytes, which is not installed"),
    ],
)
def test_what_needs_one_of_them_says_so_in_one_line(
    asked: tuple[str, ...], said: str, bare: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na b,0\nc d,1\n", encoding="utf-8")
    done = run(bare, tmp_path, "search", "--model", "bert-tiny", "--effective-batch", "8", *asked)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
