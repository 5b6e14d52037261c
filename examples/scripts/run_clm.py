"""Train a small GPT-2 from scratch on the bytes of a text file, in blocks of equal length.

python run_clm.py --train_file book.txt --output_dir out --do_train

autofit search --effective-batch 64 -- python run_clm.py --train_file book.txt --output_dir out --do_train
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import datasets
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

BYTES = 256


@dataclass
class ModelArguments:
    """Which model is trained, from scratch."""

    n_embd: int = field(default=64, metadata={"help": "Width of the model."})
    n_layer: int = field(default=2, metadata={"help": "Depth of the model."})


@dataclass
class DataArguments:
    """Which data it is trained on."""

    train_file: str = field(metadata={"help": "A text file."})
    block_size: int = field(default=64, metadata={"help": "Bytes per sample."})


def group(samples: dict[str, list], block_size: int) -> dict[str, list]:
    """Samples joined and cut into blocks; what is left at the end is dropped."""
    joined = [byte for text in samples["text"] for byte in text.encode()]
    blocks = [joined[i : i + block_size] for i in range(0, len(joined) - block_size + 1, block_size)]
    return {"input_ids": blocks, "labels": [list(block) for block in blocks]}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw = datasets.Dataset.from_dict(
        {"text": Path(data_args.train_file).read_text(encoding="utf-8").splitlines(keepends=True)}
    )
    with training_args.main_process_first(desc="grouping texts together"):
        blocks = raw.map(
            group,
            batched=True,
            remove_columns=["text"],
            fn_kwargs={"block_size": data_args.block_size},
            keep_in_memory=True,
        )
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=data_args.block_size,
        n_embd=model_args.n_embd,
        n_layer=model_args.n_layer,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.save_pretrained(training_args.output_dir)

    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=blocks if training_args.do_train else None,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(blocks)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)


if __name__ == "__main__":
    main()
