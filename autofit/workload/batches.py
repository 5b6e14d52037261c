"""Synthetic data: random samples that are valid for the task, at full length, without end.

Values do not change speed or memory, shapes and types do: every sample has exactly the length asked for, so the
memory of a trial is that of the longest real sample. Padding is an option, because a mask that hides something can
select another attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from autofit.errors import UserError
from autofit.problem.task import Task
from autofit.workload.models import ResolvedModel, model_class
from autofit.workload.tasks import audio_frames, image_channels, image_size

IGNORED = -100  #: label that cross entropy leaves out
MASKED_FRACTION = 0.15
POOL_SAMPLES = {"text": 64, "audio": 8, "image": 8}
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")

Sample = dict[str, torch.Tensor]


class SyntheticDataset(Dataset[Sample]):
    """A map-style dataset of any size that repeats a small pool of random samples.

    Args:
        resolved: the model.
        seq_len: tokens per sample (audio: samples); None = the resolved one. Images take their size from the config.
        size: `len` of the dataset; costs nothing.
        seed: of the pool.
        padded: whether samples have a random real length of at least half of `seq_len`, the rest masked.

    Raises:
        UserError: the task is unknown, or the model takes an input that cannot be made up.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        seq_len: int | None = None,
        size: int = 1 << 20,
        seed: int = 0,
        *,
        padded: bool = False,
    ) -> None:
        make = _maker(resolved)
        length = resolved.seq_len if seq_len is None else seq_len
        generator = torch.Generator().manual_seed(seed)
        count = min(size, POOL_SAMPLES[resolved.task.modality if resolved.task else "text"])
        self._size = size
        self._pool = [make(resolved.config, length, generator) for _ in range(count)]
        if padded:
            self._pool = [_pad(sample, length, generator) for sample in self._pool]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return dict(self._pool[index % len(self._pool)])


def collator(
    resolved: ResolvedModel, *, weight_dtype: str = "float32"
) -> Callable[[Sequence[Sample]], dict[str, torch.Tensor]]:
    """Return a function that stacks samples; floating inputs get the weights' dtype, as pure bf16 needs.

    Batches have `(batch, ...)` tensors: see the makers below for the fields of each task.
    """
    dtype = getattr(torch, weight_dtype)
    inputs = {"pixel_values", "input_values"}
    del resolved  # all tasks stack alike

    def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {name: v.to(dtype) if name in inputs else v for name, v in batch.items()}

    return collate


def make_batch(
    resolved: ResolvedModel,
    batch_size: int,
    seq_len: int | None = None,
    device: str = "cpu",
    *,
    weight_dtype: str = "float32",
    seed: int = 0,
    padded: bool = False,
) -> dict[str, torch.Tensor]:
    """One batch on `device`, as the Trainer would get it from `SyntheticDataset` and `collator`."""
    data = SyntheticDataset(resolved, seq_len, batch_size, seed, padded=padded)
    batch = collator(resolved, weight_dtype=weight_dtype)([data[i] for i in range(batch_size)])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _maker(resolved: ResolvedModel) -> Callable[[Any, int, torch.Generator], Sample]:
    hint = "give it a train_dataset (and a data_collator)"
    if resolved.task is None or resolved.config is None:
        raise UserError(f"data for {resolved.name!r} cannot be made up: its task is not known", hint=hint)
    objects = resolved.objects
    live = objects is not None and objects.is_live
    takes = None if live else getattr(model_class(resolved), "main_input_name", None)
    makes = {"text": "input_ids", "image": "pixel_values", "audio": "input_values"}[resolved.task.modality]
    if takes is not None and takes != makes:
        raise UserError(f"data for {resolved.name!r} cannot be made up: it takes {takes}", hint=hint)
    return _MAKERS[resolved.task]


def _tokens(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`input_ids`, `attention_mask` and, for models with segments, `token_type_ids`: (length,) int64 each."""
    text = config.get_text_config()
    special = {getattr(text, name, None) for name in _SPECIAL_IDS}
    allowed = torch.ones(text.vocab_size)
    for token in special:
        if isinstance(token, int) and 0 <= token < text.vocab_size and allowed.sum() > 1:
            allowed[token] = 0
    candidates = allowed.nonzero().squeeze(-1)
    picks = torch.randint(len(candidates), (length,), generator=generator)
    sample = {"input_ids": candidates[picks], "attention_mask": torch.ones(length, dtype=torch.int64)}
    _close(sample["input_ids"], config)
    if (getattr(text, "type_vocab_size", 0) or 0) > 1:
        sample["token_type_ids"] = torch.zeros(length, dtype=torch.int64)
    return sample


def _close(tokens: torch.Tensor, config: Any) -> None:
    """Close the sequence as tokenizers of encoder-decoders do: their classifiers read at the end token."""
    end = getattr(config, "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int) and 0 <= end < config.get_text_config().vocab_size:
        tokens[-1] = end


def _class_label(config: Any, generator: torch.Generator) -> torch.Tensor:
    """One class; a float for regression; a float vector (num_labels,) for several classes at once."""
    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (config.num_labels,), generator=generator).float()
    if config.problem_type == "regression" or config.num_labels == 1:
        shape = () if config.num_labels == 1 else (config.num_labels,)
        return torch.randn(shape, generator=generator)
    return torch.randint(config.num_labels, (), generator=generator)


def _sequence_classification(config: Any, length: int, generator: torch.Generator) -> Sample:
    return {**_tokens(config, length, generator), "labels": _class_label(config, generator)}


def _token_classification(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`labels` (length,); the ends, where special tokens would be, do not count."""
    labels = torch.randint(config.num_labels, (length,), generator=generator)
    if length > 2:
        labels[0] = labels[-1] = IGNORED
    return {**_tokens(config, length, generator), "labels": labels}


def _causal_lm(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`labels` are the tokens: the model shifts them."""
    sample = _tokens(config, length, generator)
    sample.pop("token_type_ids", None)
    return {**sample, "labels": sample["input_ids"].clone()}


def _masked_lm(config: Any, length: int, generator: torch.Generator) -> Sample:
    """15 % of the tokens are to be guessed (one at least) and are replaced; the others do not count."""
    sample = _tokens(config, length, generator)
    count = max(1, round(MASKED_FRACTION * length))
    hidden = torch.randperm(length, generator=generator)[:count]
    labels = torch.full((length,), IGNORED)
    labels[hidden] = sample["input_ids"][hidden]
    sample["input_ids"][hidden] = _tokens(config, count, generator)["input_ids"]
    return {**sample, "labels": labels}


def _seq2seq_lm(config: Any, length: int, generator: torch.Generator) -> Sample:
    """As many target tokens as source tokens: the longest case. The model makes its decoder inputs from them."""
    sample = _tokens(config, length, generator)
    return {**sample, "labels": _tokens(config, length, generator)["input_ids"]}


def _question_answering(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`start_positions` and `end_positions`, scalars, in order; separators for models that look for them."""
    sample = _tokens(config, length, generator)
    separator = getattr(config, "sep_token_id", None)
    known = config.get_text_config().vocab_size
    if (
        isinstance(separator, int) and 0 <= separator < known and length >= 8
    ):  # <s> question </s></s> context </s>
        sample["input_ids"][[length // 4, length // 4 + 1, length - 1]] = separator
    ends = torch.randint(length, (2,), generator=generator).sort().values
    return {**sample, "start_positions": ends[0], "end_positions": ends[1]}


def _image_classification(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`pixel_values` (channels, height, width), normalised as processors do; `length` has no meaning."""
    shape = (image_channels(config), *image_size(config))
    return {
        "pixel_values": torch.randn(shape, generator=generator),
        "labels": _class_label(config, generator),
    }


def _ctc(config: Any, length: int, generator: torch.Generator) -> Sample:
    """`input_values` (length,) and `labels`: a quarter as many as frames, none the blank, no neighbours equal.

    CTC needs a frame per label and one more between equal neighbours. Models with layer norm in the front end are
    trained with a mask, the others without (as their processors do).
    """
    frames = audio_frames(length, config)
    count = max(1, min(frames // 4, frames - 1))
    blank = config.pad_token_id or 0
    steps = torch.randint(1, max(2, config.vocab_size - 1), (count,), generator=generator)
    labels = steps.cumsum(0) % max(1, config.vocab_size - 1)
    sample = {
        "input_values": torch.randn(length, generator=generator),
        "labels": labels + (labels >= blank).to(labels.dtype),
    }
    if getattr(config, "feat_extract_norm", None) == "layer":
        sample["attention_mask"] = torch.ones(length, dtype=torch.int64)
    return sample


def _pad(sample: Sample, length: int, generator: torch.Generator) -> Sample:
    """Mask the end of the sample; labels there do not count. Samples without a mask stay."""
    if "attention_mask" not in sample or length < 2:
        return sample
    real = int(torch.randint((length + 1) // 2, length, (), generator=generator))
    padded = dict(sample)
    for name in ("attention_mask", "input_ids", "labels", "input_values"):
        if name in sample and sample[name].shape[:1] == (length,):
            padded[name] = sample[name].clone()
            padded[name][real:] = IGNORED if name == "labels" else 0
    if "input_ids" in sample:
        padded["input_ids"][real - 1] = sample["input_ids"][-1]  # the closing token moves with the end
    for name in ("start_positions", "end_positions"):
        if name in sample:
            padded[name] = sample[name].clamp(max=real - 1)
    return padded


_MAKERS: dict[Task, Callable[[Any, int, torch.Generator], Sample]] = {
    Task.SEQUENCE_CLASSIFICATION: _sequence_classification,
    Task.TOKEN_CLASSIFICATION: _token_classification,
    Task.CAUSAL_LM: _causal_lm,
    Task.MASKED_LM: _masked_lm,
    Task.SEQ2SEQ_LM: _seq2seq_lm,
    Task.QUESTION_ANSWERING: _question_answering,
    Task.IMAGE_CLASSIFICATION: _image_classification,
    Task.CTC: _ctc,
}
