"""What is around a live model tells trainings apart; where and when it writes and evaluates does not."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile
from autofit.workload.describe import describe_model
from autofit.workload.surroundings import training_facts


class Own(Trainer):
    pass


class Callback(TrainerCallback):
    pass


def test_nothing_around_it_is_nothing() -> None:
    assert training_facts({}) == {}
    assert training_facts({"arguments": {"output_dir": "a", "eval_steps": 3, "seed": 2}, "callbacks": [], "eval_dataset": [1]}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"trainer_cls": Trainer},
        {"callbacks": [Callback()]},
        {"processing_class": object()},
        {"arguments": {"label_smoothing_factor": 0.2}},
        {"arguments": {}},
        {"trainer_arguments": {"alpha": 2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_surroundings_are_told_apart(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "trainer_cls": Own,
        "arguments": {"label_smoothing_factor": 0.1, "output_dir": "x"},
        "trainer_arguments": {"alpha": 1},
    }
    assert training_facts({**base, **change}) != training_facts(base)
    assert training_facts({**base, "arguments": {"label_smoothing_factor": 0.1, "output_dir": "y"}}) == training_facts(base)


@pytest.mark.parametrize(
    ("objects", "live"),
    [
        ({"train_dataset": [{"input_ids": [1, 2], "labels": [1, 2]}]}, True),
        ({"arguments": {"label_smoothing_factor": 0.1}}, True),
        ({"arguments": {"output_dir": "x"}, "eval_dataset": [{"input_ids": [1]}]}, None),
    ],
    ids=["data", "arguments", "evaluation"],
)
def test_a_named_model_that_is_trained_with_live_objects_says_so(objects: dict[str, Any], live: bool | None) -> None:
    with ObjectFile(objects) as file:
        facts, _ = describe_model(Workload(model="bert-tiny", task="masked-lm", objects_path=file.path), cpu=True)
    assert facts.get("live") is live
    assert facts["source"] == "preset"


def test_objects_count_by_their_class_so_that_every_process_says_the_same() -> None:
    def one(callback: Any) -> dict[str, str]:
        return training_facts({"callbacks": [callback], "trainer_arguments": {"metric": Callback(), "function": len}})

    assert one(Callback()) == one(Callback) == one(Callback())
    assert one(Callback())["training"].startswith("Callback ")


def momentum(value: float) -> Any:
    return (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=value), None)


@pytest.mark.parametrize(
    ("name", "one", "same", "other"),
    [
        ("teacher", torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)),
        ("optimizers", momentum(0.0), momentum(0.0), momentum(0.9)),
    ],
)
def test_a_second_model_and_an_optimizer_count_by_what_they_cost(name: str, one: Any, same: Any, other: Any) -> None:
    told = [training_facts({"trainer_arguments": {name: thing}}) for thing in (one, same, other)]
    assert told[0] == told[1] != told[2]


class Padded:
    """A collator with a length of its own."""

    def __init__(self, length: int) -> None:
        self.length, self.tokenizer = length, object()


def pad(rows: Any, length: int) -> Any:
    return rows, length


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Padded(16), Padded(512)),
        (functools.partial(pad, length=16), functools.partial(pad, length=512)),
        (lambda rows: (rows, 16), lambda rows: (rows, 512)),
        (Padded(16), pad),
    ],
)
def test_a_collator_decides_how_long_batches_are(one: Any, other: Any) -> None:
    told = [training_facts({"data_collator": collator}) for collator in (one, other)]
    assert told[0] != told[1]
    assert training_facts({"data_collator": one}) == told[0] != {}


def test_a_collator_is_the_same_in_every_process() -> None:
    source = "import tests.workload.test_surroundings as t; print(t.training_facts({'data_collator': t.Padded(16)}))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == str(training_facts({"data_collator": Padded(16)}))
