"""LoRA on a decoder with your own data: the adapter is trained, the model under it is frozen (and, if you say so, stored in 4 bit).

    python examples/lora_on_a_decoder.py                                   # a tiny model and made-up text
    python examples/lora_on_a_decoder.py --quantize 4bit                   # QLoRA
    python examples/lora_on_a_decoder.py --model Qwen/Qwen2.5-0.5B --effective-batch 32
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

import autofit

TINY = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


class Bytes(Dataset):
    """Text as bytes, cut into rows of equal length. Replace it by your tokenised data."""

    def __init__(self, text: str, length: int) -> None:
        values = torch.tensor(list(text.encode()))
        self.rows = values[: len(values) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A name; a tiny Llama with random weights when left out.")
    parser.add_argument("--effective-batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--quantize", choices=("4bit", "8bit"))
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--output-dir", default="out")
    options = parser.parse_args()

    adapter = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    data = Bytes("The quick brown fox jumps over the lazy dog. " * 200, options.seq_len)
    config = None if options.model else AutoConfig.for_model("llama", **TINY)
    result = autofit.tune(
        options.model or config,
        effective_batch=options.effective_batch,
        seq_len=options.seq_len,
        train_dataset=data,
        peft_config=adapter,
        quantize=options.quantize,
        trials=options.trials,
    )
    print(f"fastest: {result.best.config.label()} at {result.best.samples_per_second:.1f} samples/s")
    print(f"trained: {result.model['n_trainable_params']:,} of {result.model['n_params']:,} parameters")
    if config is None or options.quantize:
        from autofit.results.export import export

        print(export(result, "python"))  # how to load the model, quantised or not, put the adapter on, and train
        return

    model = get_peft_model(AutoModelForCausalLM.from_config(config, **result.model_arguments), adapter)
    arguments = result.training_arguments(
        output_dir=options.output_dir, max_steps=3, learning_rate=2e-4, report_to="none", save_strategy="no"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    print(f"loss after 3 steps: {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
