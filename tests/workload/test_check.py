"""The soundness check on real Trainers: models, losses and precisions that break a promise are told from those that keep it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.processes.objects import ObjectFile
from autofit.reports.report import report_lines
from autofit.results.checking import CheckOrder, forms_for, split_warnings, summary, unsound_precision
from autofit.trials.soundness import departure_bound
from autofit.trials.trial import Reason
from autofit.workload.check import answer_check
from autofit.workload.stillness import calm, still

WINNER = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4)
IN_BF16 = WINNER.but(precision=Precision.BF16)
TINY = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
GPT2 = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)

ROUTED = MixtralConfig(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    router_aux_loss_coef=0.1, output_router_logits=True, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


class Rows(torch.utils.data.Dataset[Any]):
    """Token rows of uneven length, padded to 12, with labels for the first tokens only."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(1, 50, (12,), generator=generator) for _ in range(count)]
        self.lengths = [3 + 9 * (i % 3 == 0) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, real = self.rows[index], self.lengths[index]
        labels = ids.clone()
        labels[real:] = -100
        return {"input_ids": ids, "attention_mask": (torch.arange(12) < real).long(), "labels": labels}


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows of eight numbers with a target."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.sin(torch.arange(8) * (index + 1.0))
        return {"x": row, "labels": row.sum()}


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draws the labels that count, alike for each batch."""
    batch: dict[str, torch.Tensor] = torch.utils.data.default_collate(rows)
    batch["labels"][torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)) < 0.5] = -100
    return batch


class MeanOfMeans(BertForMaskedLM):
    """A model whose loss is the mean over its micro-batch, and that says so."""

    accepts_loss_kwargs = False


class Ignores(BertForMaskedLM):
    """Takes loss keywords and makes nothing of them."""

    accepts_loss_kwargs = True

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class OwnLoss(Trainer):
    """Computes a mean, while the Trainer believes that it is scaled over the whole batch."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Net(nn.Module):
    """A regression; `normed` with BatchNorm."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16) if normed else nn.Identity()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return {"loss": functional.mse_loss(found.squeeze(-1).float(), labels)}


class Sums(Net):
    """The sum over its rows."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x, labels)["loss"] * len(labels)}


class Cancels(Net):
    """Subtracts two large numbers that are nearly equal: exact enough in fp32, noise in bf16."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        large = torch.eye(8, device=x.device) * 1000.0
        moved = functional.linear(x + 1.0, large) / 1000.0 * 400.0
        found = self.last(torch.relu(self.first(moved - 400.0 * x - 400.0))) + 1.0
        return {"loss": functional.mse_loss(found.squeeze(-1).float(), labels * 0.1)}


class Overflows(Net):
    """Its hidden values are beyond what a narrow format holds: infinite in it, moderate in fp32."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        if hidden.dtype != torch.float32:
            hidden = (hidden * 1e30) * 1e30
        found = self.last(hidden.float())
        return {"loss": functional.mse_loss(found.squeeze(-1).float(), labels)}


class Noisy(Net):
    """Draws random numbers that no switch turns off."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + torch.randn_like(x), labels)


def check(winner: TrialConfig, *, split: bool = True, **objects: Any) -> dict[str, Any]:
    """The child's answer, run here."""
    with ObjectFile(objects) as file:
        order = CheckOrder(
            workload=Workload(model="<mine>", objects_path=file.path).to_json(),
            device="cpu",
            forms=forms_for(winner, 8, split=split, precision=winner.precision is not Precision.FP32),
            batch=8,
        )
        return answer_check(order.to_json(), Channel(io.BytesIO()))


def words(**objects: Any) -> list[str]:
    return [w.message for w in split_warnings(summary(WINNER, 8, check(WINNER, **objects)))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "more", "expected"),
    [
        (lambda: GPT2LMHeadModel(GPT2), Rows, {}, None),
        (lambda: MeanOfMeans(TINY), Rows, {}, "the loss of MeanOfMeans is a mean over each micro-batch"),
        (lambda: Ignores(TINY), Rows, {}, "Ignores takes loss keywords but ignores num_items_in_batch"),
        (lambda: GPT2LMHeadModel(GPT2), Rows, {"trainer_cls": OwnLoss}, "OwnLoss.compute_loss does not divide"),
        (Net, Numbers, {}, None),
        (lambda: Net(normed=True), Numbers, {}, "Net has BatchNorm (norm)"),
        (Sums, Numbers, {}, "the loss of Sums is a sum over its micro-batch"),
        (lambda: MixtralForCausalLM(ROUTED), Rows, {}, "MixtralForCausalLM adds its router's auxiliary loss to each micro-batch, undivided"),
        (Noisy, Numbers, {}, "Noisy draws random numbers of its own"),
        (lambda: GPT2LMHeadModel(GPT2), Rows, {"data_collator": masked}, "the collator makes other labels of the same samples"),
    ],
    ids=["normalised", "mean of means", "ignores items", "own loss", "dropout is off", "batch norm", "sum", "router", "chance", "masks"],
)
def test_splits(model: Callable[[], nn.Module], data: type, more: dict[str, Any], expected: str | None) -> None:
    torch.manual_seed(0)
    found = words(model=model(), train_dataset=data(), **more)
    assert len(found) == (expected is not None), found
    assert expected is None or expected in found[0]


@pytest.mark.slow
def test_honest_bf16_of_an_encoder_is_rounding() -> None:
    torch.manual_seed(0)
    rows = [{**{k: v for k, v in Rows()[i].items() if k != "labels"}, "labels": torch.tensor(i % 2)} for i in range(32)]
    answer = check(IN_BF16, split=False, model=BertForSequenceClassification(TINY), train_dataset=rows)
    assert unsound_precision(IN_BF16, answer) is None
    found = summary(IN_BF16, 8, answer)
    assert 0.0 < found["precision_loss_difference"] < departure_bound(Precision.BF16) / 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [(Cancels, "off fp32's"), (Overflows, "not finite where it is")])
def test_a_model_that_magnifies_rounding_is_unsound_in_bf16(kind: type[Net], words: str) -> None:
    torch.manual_seed(0)
    failure = unsound_precision(IN_BF16, check(IN_BF16, split=False, model=kind(), train_dataset=Numbers()))
    assert failure is not None
    assert words in failure.message
    plain = WINNER.but(precision=Precision.BF16)
    assert unsound_precision(plain, check(plain, split=False, model=Net(), train_dataset=Numbers())) is None


class QuickInBf16(Cancels):
    """The fastest in the precision that it cannot bear."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not torch.is_autocast_enabled("cpu"):
            time.sleep(0.05)
        return super().forward(x, labels)


@pytest.mark.slow
def test_a_search_does_not_answer_with_an_unsound_precision() -> None:
    import autofit

    if not _bf16_here():
        pytest.skip("this processor does not compute in bf16")
    torch.manual_seed(0)
    result = autofit.tune(
        QuickInBf16(),
        effective_batch=8,
        batch_size=8,
        train_dataset=Numbers(),
        device="cpu",
        memory="2GiB",
        optim="adamw_torch_fused",
        checkpointing=False,
        precision="bf16,fp32",
        timeout=60,
    )
    assert result.best.config.precision is Precision.FP32
    assert result.confirmed
    refused = [r for r in result.trials if r.failure is not None]
    assert [(r.config.precision, r.failure.reason) for r in refused if r.failure] == [(Precision.BF16, Reason.DEPARTS_FROM_FP32)]
    assert result.soundness["precision"] == "bf16"
    assert result.soundness["precision_loss_difference"] > departure_bound(Precision.BF16)
    report = "\n".join(line.text for line in report_lines(result, 120))
    assert "not sound: in bf16 the loss of the first 3 steps" in " ".join(report.split())


def _bf16_here() -> bool:
    from autofit.workload.describe import describe_device

    return Precision.BF16 in describe_device("cpu").precisions


def test_dropout_is_off_in_modules_functions_and_attention_and_comes_back() -> None:
    x = torch.ones(2, 1, 8, 4)
    layer = nn.Dropout(0.5).train()
    with still():
        assert torch.equal(layer(x), x)
        assert torch.equal(functional.dropout(x, 0.9, training=True), x)
        one = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
        assert torch.equal(one, functional.scaled_dot_product_attention(x, x, x))
    torch.manual_seed(0)
    assert not torch.equal(layer(torch.ones(100)), torch.ones(100))


def test_dropped_layers_and_masked_spectra_are_switched_off_where_they_are_named() -> None:
    module = nn.Linear(1, 1)
    module.layerdrop = 0.1  # type: ignore[assignment]
    module.config = BertConfig(layerdrop=0.1, apply_spec_augment=True, mask_time_prob=0.05)  # type: ignore[assignment]
    calm(module)
    assert module.layerdrop == 0.0
    assert module.config.layerdrop == 0.0
    assert module.config.mask_time_prob == 0.0
    assert module.config.apply_spec_augment is False
