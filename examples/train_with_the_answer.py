"""From the tuned JSON file to a full training run, started by accelerate.

    autofit search --model bert-tiny --effective-batch 16 --seq-len 32 --eval-batch-size 64 --output best.json
    accelerate launch examples/train_with_the_answer.py best.json --epochs 2

The arguments of the answer are exactly those that were measured; everything else (learning rate, schedule, epochs, saving) is yours.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer

import autofit
from autofit.problem.presets import load as preset


class Questions(Dataset[dict[str, torch.Tensor]]):
    """Stands for your data: rows of random tokens; whether the first one is even is to be found out."""

    def __init__(self, rows: int, length: int, seed: int) -> None:
        self.tokens = torch.randint(5, 1000, (rows, length), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index][0] % 2}


def model_of(result: Any) -> torch.nn.Module:
    """The model that was tuned, with random weights; with a checkpoint of your own this is `from_pretrained(..., **result.model_arguments)`."""
    values = preset(result.spec.workload.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForSequenceClassification.from_config(config, **result.model_arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answer", help="written by autofit search --output")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--output-dir", default="out")
    options = parser.parse_args()

    result = autofit.load(options.answer)
    arguments = result.training_arguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        learning_rate=5e-4,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
    )
    if arguments.world_size != 1:
        raise SystemExit("the answer is for one process: accelerate launch --num_processes 1")
    length = result.model["seq_len"]
    trainer = Trainer(
        model=model_of(result),
        args=arguments,
        train_dataset=Questions(options.rows, length, seed=0),
        eval_dataset=Questions(options.rows // 4, length, seed=1),
    )
    done = trainer.train()
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    print(f"trained {done.global_step} optimizer steps of {per_step} samples, loss {done.training_loss:.3f}")
    print(f"tuned: {result.best.samples_per_second:.1f} samples/s, this run: {done.metrics['train_samples_per_second']:.1f} with start and evaluation")


if __name__ == "__main__":
    main()
