"""Rows of many lengths, a tokenizer made on the spot, and collators good and bad: they travel to children by import path."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import BertConfig, PreTrainedTokenizerFast, Trainer

WORDS = tuple(f"w{number}" for number in range(60))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def tokenizer(model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """A word-level tokenizer for `WORDS`, which puts [CLS] and [SEP] around a text."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=list(SPECIAL)))
    words.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=model_max_length, **names)


def save_model(directory: Path, *, max_length: int = 512, **config: Any) -> Path:
    """A tiny BERT's config and its tokenizer in one directory."""
    BertConfig(**{**SMALL, "max_position_embeddings": max_length, **config}).save_pretrained(directory)
    tokenizer(max_length).save_pretrained(directory)
    return directory


def text(words: int, seed: int = 0) -> str:
    """`words` words; with [CLS] and [SEP] two tokens more."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Sentences(Dataset[Any]):
    """Tokenised rows of the given lengths, as a script makes them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self.lengths[index]
        ids = [5 + (index + i) % 50 for i in range(length)]
        return {"input_ids": ids, "attention_mask": [1] * length, "labels": index % 2}


class Torn(Sentences):
    """One row in the middle cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == len(self) // 2:
            raise OSError("the shard with this row is truncated")
        return super().__getitem__(index)


def pad(rows: Sequence[Mapping[str, Any]], multiple: int = 1) -> dict[str, torch.Tensor]:
    """A collator of the user's own: pads to the longest row, or to a multiple."""
    longest = -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
    batch = {
        name: torch.tensor([[*row[name], *([0] * (longest - len(row[name])))] for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


def pad_to_16(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """As `pad`, to multiples of 16."""
    return pad(rows, 16)


def without_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that forgets the labels."""
    return {name: value for name, value in pad(rows).items() if name != "labels"}


class NoLoss(Trainer):
    """Its loss is None."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)


class OwnLoader(Trainer):
    """Makes a data loader of its own, in the order of the rows."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, collate_fn=self.data_collator, drop_last=True  # type: ignore[arg-type]
        )
