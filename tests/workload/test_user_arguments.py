"""The user's own class of arguments, also one that travelled because no module holds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from transformers import Trainer, TrainingArguments
from transformers.integrations import WandbCallback

from autofit.workload.scripts.trainer import silence
from autofit.workload.user_arguments import argument_defaults

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
