"""The user's command line is understood, checked without being run, and said again without its secrets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autofit.problem.script_command import (
    HIDDEN,
    label,
    named_outputs,
    parse_command,
    script_file,
    shown,
    without_secrets,
)
from tests.refusals import refused


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('this must not run')\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("python", "train.py", "--lr", "1e-4"),
        ("python3", "train.py", "--lr", "1e-4"),
        ("python3.11", "-u", "train.py", "--lr", "1e-4"),
        ("train.py", "--lr", "1e-4"),
        (sys.executable, "-B", "-u", "train.py", "--lr", "1e-4"),
    ],
)
def test_the_interpreter_is_not_part_of_the_command(script: Path, words: tuple[str, ...]) -> None:
    assert parse_command(words) == ("train.py", "--lr", "1e-4")


def test_a_module_is_kept_by_name_and_not_imported(script: Path) -> None:
    command = parse_command(("python", "-m", "pkg.train", "--lr", "1e-4"))
    assert command == ("-m", "pkg.train", "--lr", "1e-4")
    assert label(command) == "pkg.train"
    assert "pkg" not in sys.modules


def test_a_command_is_shown_as_a_shell_takes_it(script: Path) -> None:
    command = parse_command(("python", "train.py", "--name", "two words"))
    assert label(command) == "train.py"
    assert shown(command) == "python train.py --name 'two words'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "^no script given$"),
        (("torchrun", "train.py"), "^torchrun starts several processes"),
        (("accelerate", "launch", "train.py"), "^accelerate starts several processes"),
        (("python", "-m", "torch.distributed.run", "train.py"), "^torch.distributed.run starts several processes"),
        (("python", "-m", "accelerate.commands.launch", "train.py"), "^accelerate.commands.launch starts several processes"),
        (("bash", "train.sh"), "^'bash' belongs to no option, and is no Python command$"),
        (("python",), "standard input"),
        (("python", "-"), "standard input"),
        (("python", "-c", "print(1)"), "^the option '-c' of python"),
        (("python", "-m"), "name of a module"),
        (("python", "-m", "pkg/train.py"), "name of a module"),
        (("python", "missing.py"), "^script 'missing.py' does not exist$"),
        (("python", "."), "^script '.' is a directory$"),
        (("python", "notes.txt"), r"^script 'notes.txt' is not Python 3\.\d+: .*\(line 1\)$"),
        (("python", "binary.py"), "^script 'binary.py' is not Python"),
        (("/nowhere/bin/python", "train.py"), "^the interpreter '/nowhere/bin/python' does not exist$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_no_python_script_is_refused_by_name(
    script: Path, words: tuple[str, ...], message: str
) -> None:
    Path("notes.txt").write_text("dear diary, today\n")
    Path("binary.py").write_bytes(os.urandom(64) + b"\0\xff")
    with refused(message):
        parse_command(words)


def test_the_interpreter_of_another_installation_is_refused(script: Path, tmp_path: Path) -> None:
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(sys.executable)
    with refused("^the script runs under .*, but autofit is installed for ", hint="pip install"):
        parse_command((str(other), "train.py"))


def test_secrets_are_blotted_out() -> None:
    command = (
        "train.py",
        "--hub_token",
        "hf_abc",
        "--api-key=xyz",
        "--max_steps",
        "5",
        "--hub_token",
        "--fp16",
    )
    assert without_secrets(command) == (
        "train.py", "--hub_token", HIDDEN, f"--api-key={HIDDEN}", "--max_steps", "5", "--hub_token", "--fp16",
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--pad_token", "--eos-token", "--image_token", "--new_mask_token"])
def test_tokens_of_a_tokenizer_are_no_secrets(flag: str) -> None:
    assert without_secrets(("t.py", flag, "<x>")) == ("t.py", flag, "<x>")
    assert without_secrets(("t.py", "--hf_token", "x", "--token", "y")) == ("t.py", "--hf_token", HIDDEN, "--token", HIDDEN)


@pytest.mark.parametrize(
    ("command", "outputs"),
    [
        ("train.py --output_dir a --lr 1", ["a"]),
        ("train.py --output-dir=a --save_path b --logging_dir c", ["a", "b", "c"]),
        ("-m pkg.train --checkpoint_dir runs/x --overwrite_output_dir", ["runs/x"]),
        ("train.py --out a --data_dir b --layout c", ["a"]),
        ("train.py --output_dir --fp16", []),
    ],
)
def test_outputs_are_named_by_the_command_line(command: str, outputs: list[str]) -> None:
    assert named_outputs(command.split()) == outputs


def test_the_file_of_a_module_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "pkg_of_a_test" / "inner"
    package.mkdir(parents=True)
    for name in ("__init__.py", "train.py", "__main__.py"):
        (package / name).write_text("raise AssertionError('imported')\n")
    assert script_file(("-m", "pkg_of_a_test.inner.train")) == str(package / "train.py")
    assert script_file(("-m", "pkg_of_a_test.inner")) == str(package / "__main__.py")
    assert script_file(("-m", "pkg_of_a_test.missing")) is None
    assert script_file(("-m", "no_such_package.train")) is None
    assert script_file(("train.py", "--lr", "1")) == str(tmp_path / "train.py")
