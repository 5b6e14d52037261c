"""Train a small T5 from scratch on a JSON-lines file of `{"source": ..., "target": ...}`, character by character.

python run_translation.py --train_file pairs.jsonl --output_dir out --do_train --predict_with_generate

autofit search --effective-batch 32 -- python run_translation.py --train_file pairs.jsonl --output_dir out --do_train
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

PADDING, END, OFFSET, IGNORED = 0, 1, 2, -100


@dataclass
class ModelArguments:
    """Which model is trained, from scratch."""

    d_model: int = field(default=64, metadata={"help": "Width of the model."})
    num_layers: int = field(default=2, metadata={"help": "Depth of encoder and decoder."})


@dataclass
class DataArguments:
    """Which data it is trained on."""

    train_file: str = field(metadata={"help": "JSON lines with source and target."})
    max_source_length: int = field(default=48, metadata={"help": "Longer sources are cut."})
    max_target_length: int = field(default=48, metadata={"help": "Longer targets are cut."})


def encode(text: str, length: int) -> list[int]:
    """The bytes of a text and an end."""
    return [*(byte + OFFSET for byte in text.encode()[: length - 1]), END]


class Pairs(torch.utils.data.Dataset):
    """Sources and targets as token ids."""

    def __init__(self, args: DataArguments) -> None:
        with open(args.train_file, encoding="utf-8") as handle:
            self.pairs = [json.loads(line) for line in handle if line.strip()]
        self.args = args

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        pair = self.pairs[index]
        return {
            "input_ids": encode(pair["source"], self.args.max_source_length),
            "labels": encode(pair["target"], self.args.max_target_length),
        }


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """One batch, sources and targets each as long as the longest."""

    def matrix(name: str, filler: int) -> torch.Tensor:
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    ids = matrix("input_ids", PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": matrix("labels", IGNORED)}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    config = T5Config(
        vocab_size=256 + OFFSET,
        d_model=model_args.d_model,
        d_kv=model_args.d_model // 2,
        d_ff=2 * model_args.d_model,
        num_layers=model_args.num_layers,
        num_heads=2,
        decoder_start_token_id=PADDING,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    trainer = Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=training_args,
        train_dataset=Pairs(data_args),
        data_collator=pad,
    )
    if training_args.do_train:
        trainer.train()
        trainer.save_model()
        trainer.save_state()


if __name__ == "__main__":
    main()
