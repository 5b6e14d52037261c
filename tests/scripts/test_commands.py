"""Script mode as a person meets it: example scripts are tuned unmodified, and mistakes are one line."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.problem.config import Precision, TrialConfig
from autofit.results.result import load
from tests.cli.runs import autofit
from tests.scripts.place import BUILD, PREAMBLE, TRAIN, contents

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
def _csv(path: Path) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["text", "label"])
        writer.writerows([["word " * (1 + i % 20), "good" if i % 3 else "bad"] for i in range(60)])


def _text(path: Path) -> None:
    path.write_text("A line of a book that nobody has written yet.\n" * 120)


def _pairs(path: Path) -> None:
    path.write_text(
        "".join(
            json.dumps({"source": "a house " * (1 + i % 4), "target": "ein Haus " * (1 + i % 4)}) + "\n"
            for i in range(50)
        )
    )


EXAMPLES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "run_text_classification.py": ("train.csv", _csv),
    "run_clm.py": ("book.txt", _text),
    "run_translation.py": ("pairs.jsonl", _pairs),
}


def test_every_example_script_is_tuned_and_listed() -> None:
    assert sorted(p.name for p in SCRIPTS.glob("*.py")) == sorted(EXAMPLES)
    readme = (SCRIPTS.parent / "README.md").read_text()
    assert all(f"`scripts/{name}`" in readme for name in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unmodified_script_is_tuned_and_takes_the_flags_of_the_answer(name: str, tmp_path: Path) -> None:
    file, make = EXAMPLES[name]
    make(tmp_path / file)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"of an earlier run")
    before = contents(tmp_path)
    command = [
        str(SCRIPTS / name),
        "--train_file",
        file,
        "--output_dir",
        "out",
        "--do_train",
        "--bf16",
        "--use_cpu",
    ]
    command += [
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "4",
        "--save_strategy",
        "epoch",
    ]
    search = (
        "search",
        "--effective-batch",
        8,
        "--device",
        "cpu",
        "--batch-size",
        "4,8",
        "--precision",
        "fp32",
        "--checkpointing",
        "off",
    )
    search += (
        "--optim",
        "adamw_torch_fused",
        "--tolerance",
        "0.5",
        "--output",
        tmp_path.parent / f"{name}.json",
    )
    run = autofit(*search, "--", sys.executable, *command, cwd=tmp_path)
    assert run.status == 0, run.stderr
    assert contents(tmp_path) == before
    assert run.stderr.count("not predicted") == 1

    result = load(tmp_path.parent / f"{name}.json")
    assert result.spec.workload.script == tuple(command)
    assert result.best.config.effective_batch() == 8
    assert result.best.config.precision is Precision.FP32
    as_it_is = result.baselines["as_it_is"]
    assert as_it_is.config == TrialConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        precision=Precision.BF16,
        optim="adamw_torch_fused",
    )
    assert as_it_is.estimate is not None

    shown = run.stdout[run.stdout.index("python /") :]
    words = shlex.split(shown.replace("\\\n", " "))
    assert tuple(words[1 : len(command) + 1]) == tuple(command)
    assert "--bf16 False" in " ".join(words[len(command) + 1 :])
    probe = [sys.executable, *words[1:], "--max_steps", "1", "--report_to", "none"]
    done = subprocess.run(probe, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1000


@pytest.mark.slow
def test_a_module_is_tuned_and_lines_to_change_are_given_where_flags_do_not_reach(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(PREAMBLE + BUILD + "if __name__ == '__main__':\n    " + TRAIN)
    before = contents(package)
    search = (
        "search",
        "--effective-batch",
        4,
        "--device",
        "cpu",
        "--batch-size",
        "2,4",
        "--precision",
        "fp32",
        "--checkpointing",
        "off",
    )
    search += ("--optim", "adamw_torch_fused", "--tolerance", "0.5", "--output", "best.json")
    run = autofit(
        *search, "--", "python", "-m", "pkg.train", "out", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1"
    )
    assert run.status == 0, run.stderr
    assert contents(package) == before
    assert not (tmp_path / "out").exists()
    assert "change these lines of TrainingArguments in pkg.train" in " ".join(run.stdout.split())
    assert "    per_device_train_batch_size=" in run.stdout
    assert "As it is, the script trains at effective batch 3, not 4" in " ".join(run.stdout.split())


REFUSED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--model", "bert-tiny", "--", "python", "train.py"), ("--model", "script")),
    (("--seq-len", "64", "--", "python", "train.py"), ("--seq-len", "script")),
    (("--", "python", "missing.py"), ("missing.py", "does not exist")),
    (("--", "python", "notes.txt"), ("notes.txt", "not Python")),
    (("--", "torchrun", "train.py"), ("torchrun", "several processes")),
    (("--replay", "grid.json", "--", "python", "train.py"), ("--replay", "script")),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSED, ids=[" ".join(a[:4]) for a, _ in REFUSED])
def test_a_mistake_on_the_command_line_is_refused_at_once(
    tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit\n")
    (tmp_path / "notes.txt").write_text("dear diary, today\n")
    run = autofit("search", "--effective-batch", "8", *arguments, cwd=tmp_path)
    assert run.status == 2, run.stderr
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
    for part in parts:
        assert part in lines[0]


@pytest.mark.slow
def test_a_script_that_raises_shows_its_traceback_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def load():\n    raise ValueError('bad data')\nload()\n")
    run = autofit(
        "search", "--effective-batch", "8", "--device", "cpu", "--", "python", "train.py", cwd=tmp_path
    )
    assert run.status == 2
    assert run.stdout == ""
    assert "in load" in run.stderr
    assert "error: train.py raised before it trained: ValueError: bad data" in run.stderr
    assert not (tmp_path / "best.json").exists()
