"""The user's own class of arguments, also one that travelled because no module holds it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments
from transformers.integrations import WandbCallback

from autofit.problem.config import TrialConfig
from autofit.trials.runner import TrialRequest
from autofit.workload.scripts.trainer import silence
from autofit.workload.trial import refuse_other_arguments, trial_arguments
from autofit.workload.user_arguments import argument_defaults
from tests.refusals import refused

SENDER = """
import sys
from dataclasses import dataclass, field
import cloudpickle
from transformers import TrainingArguments

@dataclass
class Mine(TrainingArguments):
    alpha: float = 0.5
    names: list = field(default_factory=lambda: ["a"])

cloudpickle.dump(Mine, open(sys.argv[1], "wb"))
"""
RECEIVER = """
import sys
import cloudpickle
from autofit.workload.user_arguments import argument_defaults
found = argument_defaults(cloudpickle.load(open(sys.argv[1], "rb")))
print(found["alpha"], found["names"], found["per_device_train_batch_size"])
"""


def test_a_class_of_the_main_program_keeps_its_defaults_on_the_way(tmp_path: Path) -> None:
    path = str(tmp_path / "class.pkl")
    subprocess.run([sys.executable, "-c", SENDER, path], check=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", RECEIVER, path], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == "0.5 ['a'] 8"


def test_enums_and_factories_of_the_plain_class_are_values() -> None:
    defaults = argument_defaults(TrainingArguments)
    assert defaults["optim"] == "adamw_torch_fused"
    assert "n_gpu" not in defaults


def test_a_trackers_callback_is_taken_out_also_when_it_was_derived_from() -> None:
    class Own(WandbCallback):
        def __init__(self) -> None:
            """Without the package."""

    own, removed = Own(), []

    class Stand(Trainer):
        def __init__(self) -> None:
            self.callback_handler = SimpleNamespace(callbacks=[own])  # type: ignore[assignment]

        def remove_callback(self, callback: object) -> None:
            removed.append(callback)

    silence(Stand())
    assert removed == [own]


@dataclasses.dataclass
class Deriving(TrainingArguments):
    """Makes its accumulation from the batch size, whatever it is given."""

    total: int = 8

    def __post_init__(self) -> None:
        self.gradient_accumulation_steps = self.total // self.per_device_train_batch_size
        super().__post_init__()


def subject(cls: type[TrainingArguments]) -> Any:
    return SimpleNamespace(arguments_cls=cls, base_arguments={"report_to": "none"})


@pytest.mark.parametrize(("steps", "cls", "taken"), [(4, Deriving, True), (8, Deriving, False), (8, TrainingArguments, True)])
def test_a_class_that_makes_something_else_of_what_is_tuned_is_refused(tmp_path: Path, steps: int, cls: type[TrainingArguments], taken: bool) -> None:
    config = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=steps)
    if taken:
        refuse_other_arguments(subject(cls), config, output_dir=str(tmp_path), cpu=True)
    else:
        with refused("^Deriving makes gradient_accumulation_steps=4 of gradient_accumulation_steps=8$", hint="Deriving.__post_init__"):
            refuse_other_arguments(subject(cls), config, output_dir=str(tmp_path), cpu=True)


def test_a_trial_of_a_class_that_derives_its_accumulation_runs_as_much_as_is_asked_for(tmp_path: Path) -> None:
    request = TrialRequest(config=TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4))
    made = trial_arguments({}, request, output_dir=str(tmp_path), cpu=True, cls=Deriving)
    assert made.gradient_accumulation_steps == 2
