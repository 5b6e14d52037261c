"""A directory with a script that trains a tiny model, and a runner for trials of it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.runner import TrialRequest, TrialResult

CONFIG = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4)

#: what a small script has above the lines that a test is about: a model, rows, and arguments whose output directory is given
PREAMBLE = """
import json, os, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

OUT = sys.argv[1]
def model():
    return BertForSequenceClassification(BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50, max_position_embeddings=16))
rows = [{"input_ids": [i % 50] * 8, "attention_mask": [1] * 8, "labels": i % 2} for i in range(11)]
def said(**facts):
    with open(os.environ["SAID"], "w") as handle:
        json.dump(facts, handle)
"""
BUILD = 'args = TrainingArguments(OUT, per_device_train_batch_size=3, report_to="none", use_cpu=True)\n'


class Place:
    """A directory with scripts and outputs, and a runner for trials of them.

    Attributes:
        directory: where the scripts lie; their output directory is `out` in it, and holds something already.
        said: where a script may leave what it saw.
    """

    def __init__(self, directory: Path, runner: ProcessRunner, said: Path) -> None:
        self.directory, self.out, self.said, self._runner = directory, directory / "out", said, runner
        self.out.mkdir()
        (self.out / "model.bin").write_bytes(b"precious")

    def script(self, text: str, *arguments: str, build: str = BUILD) -> None:
        path = self.directory / "train.py"
        path.write_text(PREAMBLE + build + textwrap.dedent(text))
        self._runner.workload = Workload(model="train.py", script=(str(path), str(self.out), *arguments))

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._runner.describe()["model"]
        return facts

    def run(self, config: TrialConfig = CONFIG, **more: Any) -> TrialResult:
        return self._runner.run(
            TrialRequest(config=config, timeout_seconds=60.0, **{"window_seconds": 0.1, **more})
        )

    def heard(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.said.read_text())
        return facts


def contents(directory: Path) -> dict[str, bytes | None]:
    """Everything in a directory, by relative path; None for directories."""
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")
    }


TRAIN = "Trainer(model=model(), args=args, train_dataset=rows).train()\n"
