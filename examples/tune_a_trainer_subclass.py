"""Your own Trainer subclass and collator, and arguments of yours that are kept (scheduler, clipping, label smoothing, ...).

    python examples/tune_a_trainer_subclass.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import autofit


class WeightedTrainer(Trainer):
    """Counts mistakes on the rare class three times."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 3.0], device=labels.device, dtype=outputs.logits.dtype)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch."""
    longest = max(len(row["tokens"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["tokens"])] = torch.tensor(row["tokens"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([row["label"] for row in rows])}


config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=1000)
rows = [{"tokens": list(range(1, 5 + i % 40)), "label": i % 2} for i in range(200)]
with tempfile.TemporaryDirectory() as directory:
    result = autofit.tune(
        BertForSequenceClassification(config),
        effective_batch=16,
        train_dataset=rows,
        data_collator=pad,
        trainer_cls=WeightedTrainer,
        args=TrainingArguments(directory, max_grad_norm=0.5, remove_unused_columns=False, use_cpu=not torch.cuda.is_available()),
        trials=6,
        timeout="30s",
    )
print(f"fastest: {result.best.config.label()} at {result.best.samples_per_second:.1f} samples/s")
