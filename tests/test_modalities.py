"""Every modality is tuned for real: tiny models, a few trials each, on synthetic data by name and on live data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
)

from autofit.results.result import TuneResult
from autofit.search.tuning import tune
from autofit.trials.trial import Outcome

pytestmark = pytest.mark.usefixtures("one_server")

#: one configuration of the space, so that a search is three trials: defaults, the hand's half precision, confirmation
FEW: dict[str, Any] = {
    "effective_batch": 4,
    "batch_size": 4,
    "device": "cpu",
    "memory": "4GiB",
    "precision": "fp32",
    "optim": "adamw_torch_fused",
    "checkpointing": False,
}
BERT = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
VIT = ViTConfig(
    image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
)
T5 = T5Config(
    vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
WAV2VEC2 = Wav2Vec2Config(
    vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
    conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_length=2,
)  # fmt: skip


def check(result: TuneResult, tmp_path: Path) -> None:
    """An answer at the exact batch, confirmed, from trials that really trained."""
    assert result.confirmed
    arguments = result.training_arguments(str(tmp_path / "out"))
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 4
    completed = [r for r in result.trials if r.outcome is Outcome.COMPLETED]
    assert len(completed) >= 2
    for record in completed:
        assert record.measurement is not None
        assert record.measurement.optimizer_steps >= 2
        assert all(loss == loss for loss in record.measurement.losses)


NAMED: dict[str, tuple[PretrainedConfig, str, int | None, str]] = {
    "image": (VIT, "image-classification", None, "ViTForImageClassification"),
    "speech": (WAV2VEC2, "ctc", 800, "Wav2Vec2ForCTC"),
    "seq2seq": (T5, "seq2seq-lm", 8, "T5ForConditionalGeneration"),
    "tokens": (BERT, "token-classification", 8, "BertForTokenClassification"),
    "questions": (BERT, "question-answering", 8, "BertForQuestionAnswering"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NAMED))
def test_a_name_is_tuned_on_synthetic_data(kind: str, tmp_path: Path) -> None:
    config, task, length, class_name = NAMED[kind]
    config.save_pretrained(tmp_path / "model")
    result = tune(tmp_path / "model", task=task, seq_len=length, **FEW)
    check(result, tmp_path)
    assert result.model["task"] == task
    assert result.model["class"] == class_name


def pictures(index: int) -> dict[str, Any]:
    return {"pixel_values": torch.full((3, 16, 16), index / 50), "labels": index % 3}


def translations(index: int) -> dict[str, Any]:
    return {"input_ids": list(range(1, 4 + index % 8)), "labels": list(range(1, 3 + index % 5))}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Sources padded with 0, targets with -100, apart from each other."""

    def pad(name: str, filler: int) -> torch.Tensor:
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": pad("labels", -100)}


def points(index: int) -> dict[str, Any]:
    return {"x": torch.full((8,), float(index)), "y": torch.tensor(float(index % 3))}


class Plain(nn.Module):
    """A module that knows nothing of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(x)
        return predicted.squeeze(-1)


class Huber(Trainer):
    """Has the loss that the module lacks."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        target = inputs.pop("y")
        predicted = model(**inputs)
        loss = nn.functional.huber_loss(predicted, target)
        return (loss, {"predicted": predicted}) if return_outputs else loss


#: the Trainer drops columns that a model's forward does not name, and takes as labels what it is told
OWN_LABELS = {"remove_unused_columns": False, "label_names": ["y"], "use_cpu": True}
LIVE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "image": (lambda: ViTForImageClassification(VIT), pictures, {}),
    "seq2seq": (lambda: T5ForConditionalGeneration(T5), translations, {"data_collator": padded}),
    "module": (Plain, points, {"trainer_cls": Huber, "args": OWN_LABELS}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LIVE))
def test_a_live_model_is_tuned_and_evaluated_on_its_own_data(kind: str, tmp_path: Path) -> None:
    build, row, more = LIVE[kind]
    rows = [row(i) for i in range(40)]
    if "args" in more:
        more = {**more, "args": TrainingArguments(str(tmp_path), **more["args"])}
    result = tune(build(), train_dataset=rows, eval_dataset=rows[:10], **more, **FEW)
    check(result, tmp_path)
    assert result.evaluation is not None
    assert result.evaluation.fits == 8
    assert result.model["source"] == "object"
