"""Fine-tune a classifier on your own CSV: tune on the file itself, then train with what came out.

    python examples/tune_a_csv_classifier.py --csv reviews.csv --model bert-base-uncased --effective-batch 64

The search needs no code (`autofit search --model ... --dataset reviews.csv`); this is the same from Python, with the training behind it.
Without --csv and --model it makes a small file, a tokenizer and a model on the spot, so that it runs anywhere.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
)

import autofit


def small_csv(path: Path) -> str:
    """Reviews of 3 to 60 words."""
    words, draw = [f"word{i}" for i in range(200)], random.Random(0)
    lines = [f"{' '.join(draw.choices(words, k=draw.randint(3, 60)))},{draw.choice(['good', 'bad'])}" for _ in range(200)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return str(path)


def small_model(directory: Path) -> str:
    """A model's config and a tokenizer, as `save_pretrained` leaves them."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([f"word{i}" for i in range(200)], trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64).save_pretrained(directory)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertConfig(vocab_size=256, max_position_embeddings=64, **shape).save_pretrained(directory)
    return str(directory)


def build_model(name: str, num_labels: int):
    """The checkpoint; or, for a directory that has only a config, random weights."""
    if Path(name).is_dir() and not list(Path(name).glob("*.safetensors")):
        return AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(name, num_labels=num_labels))
    return AutoModelForSequenceClassification.from_pretrained(name, num_labels=num_labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", help="with the columns text and label")
    parser.add_argument("--model", help="a hub name or a directory")
    parser.add_argument("--effective-batch", type=int, default=16)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--timeout", default="20m", help="of the search")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    workplace = Path(tempfile.mkdtemp())
    csv = options.csv or small_csv(workplace / "reviews.csv")
    name = options.model or small_model(workplace / "model")

    # The data as it is: tokenised, with uneven lengths; the collator pads each batch to its longest row.
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = load_dataset("csv", data_files=csv, split="train").class_encode_column("label")
    rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True).rename_column("label", "labels")
    collator = DataCollatorWithPadding(tokenizer)
    model = build_model(name, rows.features["labels"].num_classes)

    result = autofit.tune(
        model,
        train_dataset=rows,
        data_collator=collator,
        effective_batch=options.effective_batch,
        trials=options.trials,
        timeout=options.timeout,
    )
    lengths, decided = result.data["lengths"], result.data["memory_decided_by"]
    print(f"lengths: {lengths['shortest']} to {lengths['longest']} {lengths['unit']}, mean {lengths['mean']:.0f}")
    print(f"memory was decided by length {decided['length']}, {result.data['padding_share']:.0%} of the tokens were padding")
    print(f"fastest that fits: {result.best.config.label()}, {result.best.samples_per_second:.0f} samples/s")

    args = result.training_arguments(output_dir=str(workplace / "out"), max_steps=options.steps, report_to="none", save_strategy="no")
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
    print(f"loss after {options.steps} steps: {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
