"""`--dataset` and live datasets from end to end: a person's command, a person's mistakes, and trainings that go wrong."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, TrainingArguments

import autofit
from autofit.errors import SearchFailed
from autofit.results.result import TuneResult
from tests import uneven
from tests.cli.runs import autofit as run_autofit
from tests.cli.runs import autofit_here
from tests.refusals import refused
from tests.uneven import SMALL, Sentences, save_model, text

pytestmark = pytest.mark.usefixtures("one_server")

ONE: dict[str, Any] = {
    "effective_batch": 4, "batch_size": 4, "device": "cpu", "memory": "2GiB", "precision": "fp32", "optim": "adamw_torch_fused",
    "checkpointing": False,
}  # fmt: skip
MODEL = BertConfig(**SMALL)
LENGTHS = [5 + (37 * i) % 40 for i in range(39)] + [200]
SEARCH = (
    "search", "--effective-batch", 4, "--batch-size", 4, "--device", "cpu", "--memory", "2GiB", "--precision", "fp32", "--optim",
    "adamw_torch_fused", "--checkpointing", "off",
)  # fmt: skip


def csv(path: Path) -> Path:
    rows = [f"{text(words - 2, seed=words)},{'good' if words % 2 else 'bad'}" for words in LENGTHS]
    path.write_text("\n".join(["review,sentiment", *rows]) + "\n")
    return path


@pytest.mark.slow
def test_a_csv_is_tuned_as_it_is_and_the_file_tells_its_lengths(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    csv(tmp_path / "reviews.csv")
    command = (*SEARCH, "--model", "model", "--dataset", "reviews.csv", "--pad-to-multiple-of", 16, "--study", "s.journal")
    run = run_autofit(*command, cwd=tmp_path)
    assert run.status == 0, run.stderr
    assert "text in 'review', labels in 'sentiment'" in run.stdout
    assert "Memory was decided by length 208" in " ".join(run.stdout.split())
    data = json.loads((tmp_path / "best.json").read_text())["data"]
    assert data["lengths"]["longest"] == 200
    assert data["lengths"]["scanned"] == data["lengths"]["rows"] == len(LENGTHS)
    assert data["memory_decided_by"] == {"length": 208, "unit": "tokens", "shown": True}
    assert 0 < data["padding_share"] < 1
    result = autofit.load(tmp_path / "best.json")
    assert result.to_json()["data"] == data
    assert result.best.tokens_per_second is not None
    mean = data["lengths"]["mean"]
    assert result.best.tokens_per_second / result.best.samples_per_second == pytest.approx(mean, rel=0.5), "padding does not count"
    assert list(tmp_path.glob("**/*.arrow")) == [], "what was tokenised is gone"

    csv(tmp_path / "reviews.csv").write_text("review,sentiment\nw1 w2,good\nw3,bad\n")
    run = run_autofit(*command, cwd=tmp_path)
    assert run.status == 2
    assert "made under another data" in run.stderr, "other rows are not mixed into a study"


@pytest.mark.slow
def test_mistakes_about_data_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_here = functools.partial(autofit_here, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    save_model(tmp_path / "model")
    csv(tmp_path / "reviews.csv")
    for option, words in (
        (("--dataset", "nothing.csv"), "error: the dataset 'nothing.csv' does not exist"),
        (("--dataset", "reviews.csv", "--label-column", "stars"), "error: no column 'stars' for the label"),
    ):
        run = run_here(*SEARCH, "--model", "model", *option)
        assert (run.status, run.stdout) == (2, "")
        assert words in run.stderr
        assert "Traceback" not in run.stderr
    run = run_here(*SEARCH, "--model", "model", "--packing")
    assert (run.status, run.stdout) == (2, "")
    assert "--packing without --dataset" in run.stderr


def tuned(lengths: Any, **more: Any) -> TuneResult:
    data = lengths if isinstance(lengths, Sentences) else Sentences(lengths)
    return autofit.tune(MODEL, task="sequence-classification", train_dataset=data, **{"data_collator": uneven.pad, **ONE, **more})


@pytest.mark.slow
def test_a_live_dataset_keeps_its_collator_and_its_grouping(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), train_sampling_strategy="group_by_length", use_cpu=True)
    result = tuned(LENGTHS, data_collator=uneven.pad_to_16, args=arguments)
    assert result.data["memory_decided_by"] == {"length": 208, "unit": "tokens", "shown": True}
    for record in result.trials:
        assert record.measurement is not None
        assert (record.measurement.facts or {})["data"]["prelude_longest"] == 208
        assert record.measurement.sizes is not None
        assert record.measurement.sizes.mean is not None


@pytest.mark.slow
def test_a_training_that_goes_wrong_says_why() -> None:
    with refused("raises at row 20: OSError: the shard with this row is truncated"):
        tuned(uneven.Torn(LENGTHS))
    with pytest.raises(SearchFailed, match="did not return a loss from the inputs") as failed:
        tuned(LENGTHS, data_collator=uneven.without_labels)
    assert "Traceback" in str(failed.value.traceback)
    with pytest.raises(SearchFailed, match=r"NoLoss.compute_loss returned None instead of a loss"):
        tuned(LENGTHS, trainer_cls=uneven.NoLoss)
