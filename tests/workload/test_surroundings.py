"""What is around a live model tells trainings apart; where and when it writes and evaluates does not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

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


def test_objects_count_by_their_class_so_that_every_process_says_the_same() -> None:
    def one(callback: Any) -> dict[str, str]:
        return training_facts({"callbacks": [callback], "trainer_arguments": {"metric": Callback(), "function": len}})

    assert one(Callback()) == one(Callback) == one(Callback())
    assert one(Callback())["training"].startswith("Callback ")
