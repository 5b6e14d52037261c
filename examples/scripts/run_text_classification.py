"""Train a classifier on a CSV file with the columns `text` and `label`.

python run_text_classification.py --train_file train.csv --output_dir out --do_train

autofit search --effective-batch 64 -- python run_text_classification.py --train_file train.csv --output_dir out --do_train
"""

from __future__ import annotations

import csv
import json
import logging
import os
from dataclasses import dataclass, field

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)
PADDING, UNKNOWN = 0, 1


@dataclass
class ModelArguments:
    """Which model is trained, from scratch."""

    hidden_size: int = field(default=64, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Depth of the model."})


@dataclass
class DataArguments:
    """Which data it is trained on."""

    train_file: str = field(metadata={"help": "CSV file with the columns text and label."})
    max_seq_length: int = field(default=64, metadata={"help": "Longer texts are cut."})


def read(path: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a CSV file."""
    with open(path, newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    return [row["text"] for row in rows], [row["label"] for row in rows]


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """One batch, as long as its longest text."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), PADDING)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO)
    set_seed(training_args.seed)
    logger.info(
        "batch %d x %d", training_args.per_device_train_batch_size, training_args.gradient_accumulation_steps
    )

    texts, names = read(data_args.train_file)
    labels = {name: i for i, name in enumerate(sorted(set(names)))}
    words = {word: i for i, word in enumerate(sorted({w for t in texts for w in t.split()}), start=2)}
    rows = [
        {
            "input_ids": [words.get(w, UNKNOWN) for w in text.split()][: data_args.max_seq_length],
            "labels": labels[name],
        }
        for text, name in zip(texts, names, strict=True)
    ]
    config = BertConfig(
        vocab_size=len(words) + 2,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=4 * model_args.hidden_size,
        max_position_embeddings=data_args.max_seq_length,
        num_labels=len(labels),
    )
    os.makedirs(training_args.output_dir, exist_ok=True)
    with open(os.path.join(training_args.output_dir, "labels.json"), "w", encoding="utf-8") as handle:
        json.dump(labels, handle)

    trainer = Trainer(
        model=BertForSequenceClassification(config), args=training_args, train_dataset=rows, data_collator=pad
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()


if __name__ == "__main__":
    main()
