"""The child's part of an evaluation: the longest rows first, and what piles up counted where it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from autofit.processes.protocol import SCRATCH
from autofit.workload import evaluation
from autofit.workload.evaluation import (
    data_label,
    evaluate,
    evaluation_label,
    first_rows,
    longest_rows,
    nested_bytes,
)
from tests.refusals import refused

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

LENGTHS = [3, 9, 1, 7, 9, 2]
ROWS = [{"input_ids": [1] * n, "labels": n % 2} for n in LENGTHS]
MODEL = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.mark.parametrize("make", [lambda: ROWS, lambda: datasets.Dataset.from_list(ROWS)], ids=["list", "table"])
def test_the_longest_rows_come_first(make: Any) -> None:
    found, longest = longest_rows(make(), 4)
    assert [len(found[i]["input_ids"]) for i in range(len(found))] == [9, 9, 7, 3]
    assert longest == 9
    everything, _ = longest_rows(make(), 100)
    assert len(everything) == len(ROWS)


def test_sets_of_one_size_are_told_apart_where_lengths_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    sets = {name: [{"input_ids": [1] * n} for n in lengths] for name, lengths in {"a": [1, 2], "b": [9, 3]}.items()}
    longest = {name: longest_rows(data, 1, name=name)[1] for name, data in sets.items()}
    assert longest == {"a": 2, "b": 9}


@pytest.mark.parametrize("make", [lambda: ROWS, lambda: datasets.Dataset.from_list(ROWS)], ids=["list", "table"])
def test_the_first_rows_are_the_first_of_each_set(make: Any) -> None:
    found = first_rows({"one": make(), "two": Stream()}, 2)
    assert [len(found["one"][i]["input_ids"]) for i in range(len(found["one"]))] == LENGTHS[:2]
    assert list(found["two"]) == ROWS[:2]
    assert len(first_rows(make(), 100)) == len(ROWS)


def test_a_stream_gives_its_first_rows() -> None:
    found, longest = longest_rows(Stream(), 2)
    assert list(found) == ROWS[:2]
    assert longest is None


def test_a_set_without_rows_is_refused() -> None:
    with refused("the evaluation dataset is empty"):
        longest_rows([], 2)


def test_nested_results_are_counted_whole() -> None:
    one = torch.zeros(2, 3)
    assert nested_bytes((one, [one, {"x": one.half()}], None)) == 24 + 24 + 12


def test_data_has_a_short_label() -> None:
    assert data_label(ROWS) == "list of 6 rows"
    assert data_label(Stream()) == "Stream of unknown length"
    assert data_label({"a": ROWS[:1], "b": Stream()}) == "a: list of 1 rows, b: Stream of unknown length"


def test_an_evaluation_of_longer_rows_or_with_other_settings_is_another() -> None:
    def longer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "input_ids": [1] * 50} for row in rows]

    labels = [
        evaluation_label(ROWS, {}),
        evaluation_label(longer(ROWS), {}),
        evaluation_label(ROWS, {"eval_accumulation_steps": 1}),
        evaluation_label({"a": ROWS, "b": ROWS}, {}),
        evaluation_label({"a": ROWS, "b": longer(ROWS)}, {}),
    ]
    assert len(set(labels)) == len(labels)
    assert labels[0].startswith("list of 6 rows, ")
    assert evaluation_label(datasets.Dataset.from_list(ROWS), {}) == evaluation_label(datasets.Dataset.from_list(ROWS), {"seed": 1})
    assert evaluation_label(ROWS[::-1], {}) == labels[0], "the longest rows are evaluated, wherever they are"
    assert evaluation_label(Stream(), {}).startswith("Stream of unknown length, ")
    assert evaluation_label([], {}).startswith("list of 0 rows, ")


class Slow(list[Any]):
    """Rows that take their time; `reads`: how many were read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        time.sleep(0.05)
        return super().__getitem__(index)


def test_a_label_of_many_sets_takes_no_longer_than_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_SECONDS", 0.01)
    sets = {name: Slow(ROWS[:2]) for name in "abc"}
    evaluation_label(sets, {})
    assert [rows.reads for rows in sets.values()] == [2, 0, 0]


def test_rows_and_settings_of_any_kind_have_a_label() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert evaluation_label([{"input_values": ragged}], {"eval_accumulation_steps": np.int64(4)}).startswith("list of 1 rows, ")


def trainer(tmp_path: Path, *, eval_dataset: Any, trainer_cls: type[Trainer] = Trainer, **more: Any) -> Trainer:
    options = {"per_device_eval_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    options |= {k: more.pop(k) for k in list(more) if k in options}
    arguments = {k: more.pop(k) for k in list(more) if k.startswith(("eval_", "prediction_", "batch_eval", "include_", "bf16_"))}
    model = BertForSequenceClassification(MODEL)
    made = trainer_cls(
        model=model,
        args=TrainingArguments(str(tmp_path), **options, **arguments),
        eval_dataset=eval_dataset,
        data_collator=padded,
        **more,
    )
    made.remove_callback(type(made.callback_handler.callbacks[-1]))
    return made


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in rows])}


def count(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions))}


class Threes(Trainer):
    """Evaluates in batches of its own size."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return torch.utils.data.DataLoader(self.eval_dataset, batch_size=3, collate_fn=self.data_collator)  # type: ignore[arg-type]


def test_batches_of_another_size_than_was_asked_for_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=ROWS, trainer_cls=Threes)
    with refused("^Threes.get_eval_dataloader gives batches of 3 rows", hint="eval_batch_size"):
        evaluate(made)


LOSS = 4  #: one float a row (the loss is repeated for each)
KEPT = {
    "the loss only": ({}, LOSS),
    "logits and labels": ({"compute_metrics": count}, LOSS + 4 * 4 + 8),
    "the loss only, by argument": ({"compute_metrics": count, "prediction_loss_only": True}, LOSS),
    "what the logits are made": (
        {"compute_metrics": count, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        LOSS + 8 + 8,
    ),
    "metrics by batch": ({"compute_metrics": count, "batch_eval_metrics": True}, LOSS),
    "inputs too": ({"compute_metrics": count, "include_for_metrics": ["inputs"]}, LOSS + 4 * 4 + 8 + 9 * 8),
}


@pytest.mark.parametrize("what", sorted(KEPT))
def test_what_is_gathered_is_counted(what: str, tmp_path: Path) -> None:
    more, expected = KEPT[what]
    found = evaluate(trainer(tmp_path, eval_dataset=ROWS, **more))
    assert found["gathered_bytes_per_row"] == expected
    assert (found["batch"], found["batches"], found["rows"], found["longest"]) == (2, 3, 6, 9)
    assert found["loss_only"] is ("compute_metrics" not in more or "prediction_loss_only" in more)
    assert found["metric_error"] is None


def test_the_users_settings_come_with_it(tmp_path: Path) -> None:
    found = evaluate(trainer(tmp_path, eval_dataset=ROWS, eval_accumulation_steps=3, eval_do_concat_batches=False))
    assert found["accumulation_steps"] == 3
    assert found["concatenates"] is False


def test_weights_stay_as_they_are_between_two_steps_of_a_training(tmp_path: Path) -> None:
    whole = evaluate(trainer(tmp_path, eval_dataset=ROWS, compute_metrics=count))
    made = trainer(tmp_path, eval_dataset=ROWS, compute_metrics=count, bf16_full_eval=True)
    assert evaluate(made)["gathered_bytes_per_row"] == whole["gathered_bytes_per_row"]
    assert made.model is not None
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    assert not made.is_in_train


@pytest.mark.parametrize("make", [lambda: ROWS, lambda: datasets.Dataset.from_list(ROWS)], ids=["list", "table"])
def test_training_data_that_stands_in_for_an_evaluation_set_fills_every_batch(make: Any, tmp_path: Path) -> None:
    found = evaluate(trainer(tmp_path, eval_dataset=None, train_dataset=make(), per_device_eval_batch_size=8))
    assert (found["batch"], found["batches"], found["rows"]) == (8, 3, 6)
    own = evaluate(trainer(tmp_path, eval_dataset=make(), per_device_eval_batch_size=8))
    assert own["batches"] == 1, "of six rows, as in the real evaluation"


def test_every_set_is_evaluated_and_the_largest_counts(tmp_path: Path) -> None:
    found = evaluate(trainer(tmp_path, eval_dataset={"few": ROWS[:1], "many": ROWS}, compute_metrics=count))
    assert found["rows"] == 6
    assert found["gathered_bytes_per_row"] == LOSS + 4 * 4 + 8


def test_metrics_that_raise_are_said_and_memory_errors_are_not_swallowed(tmp_path: Path) -> None:
    def fails(prediction: Any) -> dict[str, float]:
        raise ZeroDivisionError("no positives")

    found = evaluate(trainer(tmp_path, eval_dataset=ROWS, compute_metrics=fails))
    assert found["metric_error"] == "ZeroDivisionError: no positives"
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes")):

        def exhausts(prediction: Any, error: Exception = error) -> dict[str, float]:
            raise error

        for cls in (Trainer, Matches):
            made = trainer(tmp_path, eval_dataset=ROWS, trainer_cls=cls, compute_metrics=exhausts)
            with pytest.raises(type(error)):
                evaluate(made)
            assert made.compute_metrics is exhausts


class Matches(Trainer):
    """As the examples' Trainer for question answering: its `evaluate` matches the predictions with the examples of the whole set."""

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        compute, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation", prediction_loss_only=False)
        finally:
            self.compute_metrics = compute
        if compute is None:
            raise ValueError(f"{len(output.predictions)} predictions and {len(self.eval_dataset)} examples")  # type: ignore[arg-type]
        return dict(compute(output))


class Breaks(Trainer):
    """Fails while it evaluates."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a bug")


def test_what_a_trainer_makes_of_a_few_results_is_said_and_what_it_raises_before_is_raised(tmp_path: Path) -> None:
    found = evaluate(trainer(tmp_path, eval_dataset=ROWS * 4, trainer_cls=Matches))
    assert found["metric_error"] == "ValueError: 6 predictions and 24 examples"
    assert found["gathered_bytes_per_row"] == LOSS + 4 * 4 + 8
    with pytest.raises(ValueError, match="a bug"):
        evaluate(trainer(tmp_path, eval_dataset=ROWS, trainer_cls=Breaks))
