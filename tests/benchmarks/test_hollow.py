"""The hollow device's command: what it needs is said in one line, and what it gives to a command is a card's shape."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.hollow import __main__ as command
from benchmarks.hollow.__main__ import CARDS, environment
from benchmarks.hollow.build import SOURCE, needed, undefined

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks.hollow", *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_build_without_cuda_is_refused_in_one_line() -> None:
    refused = run("--", "true")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["error: the installed torch is no CUDA build: pip install --no-deps a wheel of one"]


def test_no_command_is_refused() -> None:
    assert run("--card", "h200").returncode == 2


@pytest.mark.parametrize("name", CARDS)
def test_a_command_sees_the_cards_shape_and_the_libraries_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    found = environment(CARDS[name], name, tmp_path)
    assert found["LD_LIBRARY_PATH"] == os.pathsep.join([str(tmp_path), "/elsewhere"])
    assert (found["HOLLOW_CAPABILITY"], found["HOLLOW_TOTAL_MIB"]) == (str(CARDS[name].capability), str(CARDS[name].memory_mib))
    assert Path(found["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py").exists()


def test_libraries_that_lack_what_bitsandbytes_asks_for_are_not_used_once_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for installed in (None, "0.50.2"):
        monkeypatch.setattr(command, "_version", lambda package, installed=installed: installed if package == "bitsandbytes" else "2.11.0")
        found.add(command.default_directory())
    assert len(found) == 2


def test_every_device_names_itself_hollow() -> None:
    assert '"Hollow %s"' in (SOURCE / "cudart.c").read_text()
    assert '"Hollow %s"' in (SOURCE / "nvml.c").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")
def test_symbols_are_read_with_their_versions() -> None:
    library = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.so"))
    try:
        sonames, symbols = needed(library), dict(undefined(library))
    except FileNotFoundError:
        pytest.skip("binutils are not installed")
    assert "libc.so.6" in sonames
    assert symbols["memcpy"].startswith("GLIBC_")
