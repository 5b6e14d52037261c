"""A name in, TrainingArguments out, and a short training with them.

    python examples/tune_by_name.py --model bert-tiny --effective-batch 16
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer

import autofit
from autofit.problem.presets import load as preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--effective-batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--output-dir", default="out")
    options = parser.parse_args()

    result = autofit.tune(
        options.model, effective_batch=options.effective_batch, seq_len=options.seq_len, trials=options.trials
    )
    print(f"fastest: {result.best.config.label()} at {result.best.samples_per_second:.1f} samples/s")

    arguments = result.training_arguments(
        output_dir=options.output_dir, max_steps=3, learning_rate=2e-5, report_to="none", save_strategy="no"
    )
    values = preset(options.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForSequenceClassification.from_config(config, **result.model_arguments)
    row = {"input_ids": torch.arange(options.seq_len) % 1000, "labels": torch.tensor(1)}
    trainer = Trainer(model=model, args=arguments, train_dataset=[row] * (3 * options.effective_batch))
    print(f"loss after 3 steps: {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
