"""Mistakes of a user: exit code 2, one line that says what, at most one that says what to do, no traceback, nothing written over."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from autofit.devices.device import Device
from autofit.problem.config import TrialConfig
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from tests.cli.runs import Run, autofit, autofit_here

SEARCH = ("search", "--model", "bert-tiny", "--effective-batch", "16", "--device", "cpu")
ESTIMATE = ("estimate", "--model", "bert-tiny")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with files that are wrong in many ways, and one that is somebody's."""
    (tmp_path / "precious.json").write_text('{"mine": true}')
    (tmp_path / "a-directory").mkdir()
    (tmp_path / "not-json.json").write_text("{oops")
    (tmp_path / "a-list.json").write_text("[1, 2]")
    (tmp_path / "foreign.json").write_text('{"schema": "somebody/else"}')
    (tmp_path / "newer-result.json").write_text('{"schema": "autofit/result", "version": 99}')
    (tmp_path / "torn-result.json").write_text('{"schema": "autofit/result", "version": 1, "best": {}}')
    (tmp_path / "newer-grid.json").write_text('{"schema": "autofit/landscape", "version": 99, "points": []}')
    (tmp_path / "empty-grid.json").write_text('{"schema": "autofit/landscape", "version": 1, "points": []}')
    (tmp_path / "bad-grid.json").write_text('{"schema": "autofit/landscape", "version": 1, "points": [{"config": {}}]}')
    (tmp_path / "corrupt.journal").write_text("this is no journal\n")
    (tmp_path / "no-config").mkdir()
    _config(tmp_path / "bad-json", "{oops")
    _config(tmp_path / "no-type", json.dumps({"hidden_size": 4}))
    _config(tmp_path / "cannot-be-built", json.dumps({"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3}))
    config = TrialConfig(per_device_train_batch_size=8)
    memory = Memory(peak_allocated_bytes=1, peak_reserved_bytes=1)
    point = Point(config=config, measurement=Measurement(micro_step_seconds=(1.0,), memory=memory))
    Landscape(points=(point,), device=Device(kind="cuda", name="card", total_memory_bytes=1 << 30)).save(tmp_path / "grid.json")
    return tmp_path


def _config(directory: Path, text: str) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(text)


def check(run: Run, *parts: str) -> None:
    assert run.status == 2, run.stderr
    assert "Traceback" not in run.stderr
    lines = run.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    hints = [line for line in lines if line.startswith("hint: ")]
    assert len(errors) == 1
    assert len(hints) <= 1
    assert errors + hints == lines[-len(errors + hints) :], "the complaint stands last"
    assert run.stdout == ""
    for part in parts:
        assert part in run.stderr


# Refused before anything is started: these take a fraction of a second each.
AT_ONCE: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("search", "--effective-batch", "64"), ("no model", "--model")),
    (("search", "--model", "bert-tiny"), ("effective batch", "--effective-batch")),
    ((*SEARCH, "--effective-batch", "0"), ("effective batch", "0")),
    ((*SEARCH, "--effective-batch", "-8"), ("-8",)),
    ((*SEARCH, "--effective-batch", "1000000000"), ("1000000000",)),
    ((*SEARCH, "--effective-batch", "many"), ("many",)),
    ((*SEARCH, "--effective-batch", "6.5"), ("6.5",)),
    ((*SEARCH, "--memory", "lots"), ("--memory", "lots", "16GiB")),
    ((*SEARCH, "--memory", "0"), ("--memory",)),
    ((*SEARCH, "--memory", "-4GiB"), ("-4GiB",)),
    ((*SEARCH, "--memory", "16 parsecs"), ("parsecs",)),
    ((*SEARCH, "--timeout", "soon"), ("--timeout", "soon", "10m")),
    ((*SEARCH, "--timeout", "0s"), ("--timeout",)),
    ((*SEARCH, "--trial-timeout", "-1"), ("-1",)),
    ((*SEARCH, "--precision", "fp8"), ("fp8", "bf16")),
    ((*SEARCH, "--precision", ","), ("--precision",)),
    ((*SEARCH, "--optim", ","), ("--optim",)),
    ((*SEARCH, "--batch-size", "two"), ("--batch-size", "two")),
    ((*SEARCH, "--checkpointing", "perhaps"), ("perhaps",)),
    ((*SEARCH, "--sampler", "magic"), ("magic",)),
    ((*SEARCH, "--seq-len", "0"), ("sequence length",)),
    ((*SEARCH, "--trials", "0"), ("trials",)),
    ((*SEARCH, "--tolerance", "2"), ("tolerance",)),
    ((*SEARCH, "--eval-batch-size", "0"), ("evaluation batch", "0")),
    (("search", "--replay", "grid.json", "--eval-batch-size", "8"), ("--eval-batch-size", "no evaluation")),
    (("search", "--replay", "grid.json", "--dataset", "r.csv"), ("--replay and --dataset", "recorded grid")),
    (("search", "--replay", "grid.json", "--adapter", "lora"), ("--replay and --adapter",)),
    (("search", "--replay", "grid.json", "--tune", "attn"), ("--replay and --tune",)),
    (("search", "--effective-batch", "8", "--packing", "--", "python", "train.py"), ("--packing and a script",)),
    (("search", "--effective-batch", "8", "--pad-to-multiple-of", "0", "--", "python", "train.py"), ("--pad-to-multiple-of and a script",)),
    ((*SEARCH, "--dataset", "r.csv", "--split", ""), ("--split is empty",)),
    ((*SEARCH, "--seed", "-1"), ("seed", "-1")),
    ((*SEARCH, "--batch-size", "0"), ("batch size", "0")),
    ((*SEARCH, "--keep-numerics", "--tune", "pure_bf16"), ("--keep-numerics", "pure_bf16")),
    ((*SEARCH, "--adapter", "lora", "--adapter-rank", "0"), ("rank", "0")),
    ((*SEARCH, "--quantize", "4bit"), ("4bit", "--adapter")),
    ((*SEARCH, "--tune", "everything"), ("everything", "attn")),
    ((*SEARCH, "--device", "gpu7"), ("gpu7", "cuda:N")),
    ((*SEARCH, "--device", "cuda:x"), ("cuda:x",)),
    ((*SEARCH, "--output", "nowhere/best.json"), ("nowhere",)),
    ((*SEARCH, "--output", "a-directory"), ("a-directory", "directory")),
    ((*SEARCH, "--study", "a-directory"), ("a-directory", "directory")),
    ((*SEARCH, "--study", "nowhere/s.journal"), ("nowhere",)),
    ((*SEARCH, "--study", "same.json", "--output", "./same.json"), ("same",)),
    ((*SEARCH, "--timeout", "10", "m"), ("'m' belongs to no option", "-- python train.py")),
    (("search", "bert-tiny", "--effective-batch", "8"), ("'bert-tiny' belongs to no option", "--model")),
    ((*SEARCH, "--", "python", "train.py"), ("--model and a script",)),
    ((*SEARCH, "--tune", ","), ("--tune is empty", "leave it out, or name one")),
    ((*SEARCH, "--no-such-option"), ("--no-such-option", "--help")),
    (("serch",), ("serch",)),
    (("search", "--replay", "missing.json"), ("missing.json",)),
    (("search", "--replay", "not-json.json"), ("not JSON",)),
    (("search", "--replay", "a-list.json"), ("list",)),
    (("search", "--replay", "foreign.json"), ("somebody/else",)),
    (("search", "--replay", "newer-grid.json"), ("99", "upgrade")),
    (("search", "--replay", "empty-grid.json"), ("no points",)),
    (("search", "--replay", "bad-grid.json"), ("point 0",)),
    (("search", "--replay", "grid.json", "--effective-batch", "64"), ("64", "8")),
    (("search", "--replay", "grid.json", "--precision", "bf16"), ("space is empty",)),
    (("show", "missing.json"), ("missing.json",)),
    (("show", "foreign.json"), ("somebody/else",)),
    (("show", "newer-result.json"), ("99", "upgrade")),
    (("show", "torn-result.json"), ("cannot be read",)),
    (("show", "a-directory"), ("a-directory",)),
    (("export", "not-json.json"), ("not JSON",)),
    (("export", "newer-result.json", "--format", "yaml"), ("yaml",)),
    (("confirm", "missing.json"), ("missing.json",)),
    (("confirm", "newer-result.json", "--steps", "0"), ("--steps",)),
    (("landscape", "--model", "bert-tiny", "--effective-batch", "8", "--output", "nowhere/g.json"), ("nowhere",)),
    ((*ESTIMATE, "--gpu", "A1000-80GB"), ("A1000-80GB",)),
    ((*ESTIMATE, "--batch-size", "0"), ("batch size", "0")),
    ((*ESTIMATE, "--batch-size", "6", "--effective-batch", "16"), ("6", "16", "4")),
    ((*ESTIMATE, "--gpu", "T4", "--memory", "80GiB"), ("T4",)),
    ((*ESTIMATE, "--max-batch"), ("--gpu",)),
    ((*ESTIMATE, "--max-batch", "--gpu", "T4", "--batch-size", "4"), ("--max-batch",)),
    ((*ESTIMATE, "--checkpointing", "both"), ("both",)),
    ((*ESTIMATE, "--precision", "bf16,fp16"), ("--precision",)),
]


@pytest.mark.parametrize(("arguments", "parts"), AT_ONCE, ids=[" ".join(a[-3:]) for a, _ in AT_ONCE])
def test_a_mistake_is_refused_at_once(place: Path, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    check(autofit(*arguments, cwd=place), *parts)
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


# Known only to a child that has the libraries.
AFTER_A_LOOK: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((*SEARCH, "--model", "bert-tyni"), ("bert-tyni", "bert-tiny")),
    ((*SEARCH, "--model", "no-config"), ("no-config",)),
    ((*SEARCH, "--model", "bad-json"), ("bad-json",)),
    ((*SEARCH, "--model", "no-type"), ("model_type",)),
    ((*SEARCH, "--model", "cannot-be-built"), ("cannot-be-built",)),
    ((*SEARCH, "--memory", "900TiB"), ("900", "--memory")),
    ((*SEARCH, "--precision", "fp16"), ("fp16", "CPU")),
    ((*SEARCH, "--precision", "tf32"), ("tf32",)),
    ((*SEARCH, "--optim", "adamm"), ("adamm",)),
    ((*SEARCH, "--batch-size", "5"), ("5", "4, 8")),
    ((*SEARCH, "--task", "poetry"), ("poetry",)),
    ((*SEARCH, "--model", "vit-base-patch16-224", "--task", "causal-lm"), ("causal-lm",)),
    ((*SEARCH, "--seq-len", "100000"), ("512",)),
    ((*SEARCH, "--attn", "flash_attention_9"), ("flash_attention_9",)),
    ((*SEARCH, "--study", "corrupt.journal"), ("corrupt.journal", "journal")),
    ((*ESTIMATE, "--seq-len", "100000"), ("512",)),
    ((*ESTIMATE, "--optim", "adamm"), ("adamm",)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize(("arguments", "parts"), AFTER_A_LOOK, ids=[" ".join(a[-2:]) for a, _ in AFTER_A_LOOK])
def test_a_mistake_is_refused_after_a_look(
    place: Path, arguments: tuple[str, ...], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    check(autofit_here(*arguments, cwd=place, monkeypatch=monkeypatch, capsys=capsys), *parts)
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_so_it_is_in_a_process_of_its_own(place: Path) -> None:
    arguments, parts = AFTER_A_LOOK[0]
    check(autofit(*arguments, cwd=place), *parts)


def test_a_study_of_somebody_else_is_refused_and_left_as_it_was(place: Path) -> None:
    path = place / "theirs.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    optuna.create_study(storage=storage, study_name="their-study")
    before = path.read_bytes()
    check(autofit("search", "--replay", "grid.json", "--study", path, cwd=place), "their-study")
    assert path.read_bytes() == before


def test_a_study_of_another_search_is_refused_and_left_as_it_was(place: Path) -> None:
    first = autofit("search", "--replay", "grid.json", "--study", "s.journal", "--output", "a.json", cwd=place)
    assert first.status == 0, first.stderr
    before = (place / "s.journal").read_bytes()
    check(autofit("search", "--replay", "grid.json", "--study", "s.journal", "--memory", "1GB", "--output", "b.json", cwd=place), "memory limit: 768.0 MiB there, 953.7 MiB here")
    assert (place / "s.journal").read_bytes() == before
    assert not (place / "b.json").exists()


@pytest.mark.parametrize(("command", "can_go_on"), [("estimate", False), ("search", True), ("landscape", True)])
def test_who_interrupts_is_told_to_go_on_where_that_can_be_done(
    command: str, can_go_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("forecasts.estimation.estimate_all", "search.tuning.run_search", "search.recording.record_landscape"):
        monkeypatch.setattr(f"autofit.{place}", interrupt)
    words = (command, "--model", "bert-tiny", "--effective-batch", "8")
    done = autofit_here(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert (done.status, done.stdout) == (130, "")
    assert done.stderr.strip().startswith("error: interrupted before there was an answer")
    assert ("the same command goes on where it stopped" in done.stderr) == can_go_on
