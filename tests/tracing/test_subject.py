"""What is traced is what the Trainer would train: the user's own arguments, the columns that it keeps, the collator that it takes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from autofit.memory.events import Kind
from autofit.memory.law import MemoryLaw
from autofit.memory.request import TraceRequest
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.tracing import estimate_worker
from autofit.tracing.subject import host_batch, trainer_of
from autofit.workload import models
from tests.tracing.child import in_child

SMALL = BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99
)
ROWS = [{"input_ids": [1] * 8, "attention_mask": [1] * 8, "labels": 1, "text": "not a number"} for _ in range(16)]


def stack(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that wants numbers."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def _workload(path: Path, **objects: Any) -> Workload:
    path.write_bytes(cloudpickle.dumps(objects))
    return Workload(model="mine", objects_path=str(path), seq_len=16)


def _answer(workload: Workload) -> dict[str, Any]:
    config = TrialConfig(per_device_train_batch_size=4, precision="bf16")  # type: ignore[arg-type]
    return estimate_worker.answer([TraceRequest(workload=workload, config=config, batch=4)], (2, 4))[0]


def test_columns_that_the_trainer_drops_do_not_reach_the_collator(tmp_path: Path) -> None:
    given = {"model": BertForSequenceClassification(SMALL), "train_dataset": ROWS, "data_collator": stack}
    assert in_child(_answer, _workload(tmp_path / "a.pkl", **given))["reason"] is None
    kept = in_child(_answer, _workload(tmp_path / "b.pkl", **given, arguments={"remove_unused_columns": False}))
    assert kept["law"] is None
    assert kept["reason"].startswith("ValueError: "), "what the user's own code raises is the reason"


def _peak(answer: Mapping[str, Any]) -> int:
    assert answer["reason"] is None
    return MemoryLaw.from_json(answer["law"]).predict(64).peak_allocated_bytes


def test_label_smoothing_of_the_users_own_arguments_is_in_the_peak(tmp_path: Path) -> None:
    config = BertConfig(**{**SMALL.to_dict(), "num_labels": 5000})
    rows = [{"input_ids": [1] * 4, "labels": 1} for _ in range(8)]
    given = {"model": BertForSequenceClassification(config), "train_dataset": rows}
    plain = _peak(in_child(_answer, _workload(tmp_path / "a.pkl", **given)))
    smooth = _peak(
        in_child(_answer, _workload(tmp_path / "b.pkl", **given, arguments={"label_smoothing_factor": 0.1}))
    )
    assert smooth > plain


def test_a_single_row_is_traced_as_long_as_the_rows_of_larger_batches(tmp_path: Path) -> None:
    def padded(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True) for name in rows[0]}

    config = T5Config(vocab_size=5000, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    rows = [{"input_ids": [1] * n, "labels": [1] * m} for n, m in [(5, 4), (300, 2), (2, 200)]]
    workload = _workload(tmp_path / "a.pkl", model=T5ForConditionalGeneration(config), train_dataset=rows, data_collator=padded)
    resolved = models.resolve(workload)
    assert resolved.objects is not None
    for size in (1, 2, 3):
        request = TraceRequest(workload=workload, config=TrialConfig(per_device_train_batch_size=size), batch=size)
        batch = host_batch(resolved, request, resolved.objects.model)  # type: ignore[arg-type]
        assert {name: tuple(value.shape) for name, value in batch.items()} == {"input_ids": (size, 300), "labels": (size, 200)}


class Asks(nn.Module):
    """Asks for the card, as models with experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        assert torch.cuda.get_device_capability() == (8, 0)
        return {"loss": self.linear(x).sum()}


def test_a_model_that_asks_for_the_card_is_told_of_the_one_that_is_traced(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(4), "labels": torch.tensor(0)} for _ in range(8)]
    assert in_child(_answer, _workload(tmp_path / "a.pkl", model=Asks(), train_dataset=rows))["reason"] is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_with_experts_is_traced_or_refused_with_a_reason(precision: str, tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    workload = Workload(model="mine", objects_path=_workload(tmp_path / "a.pkl", config=config).objects_path, task="causal-lm", seq_len=16)
    answer = in_child(_precise, workload, precision)
    assert (answer["law"] is None) == (answer["reason"] is not None)


def _precise(workload: Workload, precision: str) -> dict[str, Any]:
    config = TrialConfig(per_device_train_batch_size=4, precision=precision)  # type: ignore[arg-type]
    return estimate_worker.answer([TraceRequest(workload=workload, config=config, batch=4)], (2, 4))[0]


def wasteful_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Keeps exponentials of the logits for backward, 16 times over."""
    return sum((outputs["logits"] * i).exp().mean() for i in range(16))  # type: ignore[return-value]


def test_a_loss_of_the_users_own_is_in_the_peak(tmp_path: Path) -> None:
    labels = 20_000
    config = BertConfig(**{**SMALL.to_dict(), "num_labels": labels})
    given = {"model": BertForSequenceClassification(config), "train_dataset": [{"input_ids": [1] * 4, "labels": 1}] * 8}
    plain = _peak(in_child(_answer, _workload(tmp_path / "a.pkl", **given)))
    own = _peak(in_child(_answer, _workload(tmp_path / "b.pkl", **given, trainer_arguments={"compute_loss_func": wasteful_loss})))
    assert own - plain > 12 * 64 * labels * 4


UNTRACED = [
    {"train_sampling_strategy": "group_by_length"},
    {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    {"debug": "underflow_overflow"},
]


@pytest.mark.parametrize("arguments", UNTRACED, ids=str)
def test_arguments_that_are_not_about_memory_do_not_stop_the_users_trainer(arguments: dict[str, Any], tmp_path: Path) -> None:
    own = {"trainer_arguments": {"compute_loss_func": wasteful_loss}, "arguments": arguments}
    workload = _workload(tmp_path / "a.pkl", model=BertForSequenceClassification(SMALL), train_dataset=ROWS, data_collator=stack, **own)
    assert in_child(_answer, workload)["reason"] is None


def _collected(workload: Workload) -> tuple[list[int], int]:
    """How many older objects the collector goes through when the Trainer calls it, and how many stay frozen."""
    seen: list[int] = []
    collect = gc.collect
    gc.collect = lambda *args: (seen.append(len(gc.get_objects())), collect(*args))[1]  # type: ignore[assignment]
    try:
        _answer(workload)
    finally:
        gc.collect = collect
    return seen, gc.get_freeze_count()


def test_a_trace_does_not_collect_garbage_in_what_was_there_before(tmp_path: Path) -> None:
    own = {"trainer_arguments": {"compute_loss_func": wasteful_loss}}
    seen, frozen = in_child(_collected, _workload(tmp_path / "a.pkl", model=BertForSequenceClassification(SMALL), train_dataset=ROWS, data_collator=stack, **own))
    assert seen
    assert max(seen) < 100_000, "there are more than that after imports alone"
    assert frozen == 0


class Distilling(Trainer):
    """Holds a second model on the device, and asks its tokenizer."""

    def __init__(self, *args: Any, teacher: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        assert self.processing_class.pad_token_id == 0
        with torch.no_grad():
            self.teacher(**inputs)
        return model(**inputs)["loss"]


def test_a_second_model_of_the_users_trainer_is_in_the_peak(tmp_path: Path) -> None:
    teacher = BertForSequenceClassification(BertConfig(**{**SMALL.to_dict(), "vocab_size": 50_000}))
    given = {"model": BertForSequenceClassification(SMALL), "train_dataset": ROWS, "data_collator": stack}
    plain = _peak(in_child(_answer, _workload(tmp_path / "a.pkl", **given)))
    own = {"trainer_cls": Distilling, "trainer_arguments": {"teacher": teacher}, "processing_class": SimpleNamespace(pad_token_id=0)}
    answer = in_child(_answer, _workload(tmp_path / "b.pkl", **given, **own))
    assert _peak(answer) - plain > 0.95 * sum(p.numel() * 4 for p in teacher.parameters())
    base = MemoryLaw.from_json(answer["law"]).base
    assert sum(size for size, kind in zip(base.sizes, base.kinds) if kind is Kind.WEIGHTS) > sum(p.numel() * 4 for p in teacher.parameters())


def _casts(workload: Workload) -> tuple[int, set[torch.dtype]]:
    """Elements that are cast as the Trainer of a trace in 16 bit is made ready, and the dtypes of the second model then."""
    cast, original = 0, torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal cast
        cast += tensor.numel()
        return original(tensor, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment,method-assign]
    try:
        config = TrialConfig(per_device_train_batch_size=4, precision="pure_bf16")  # type: ignore[arg-type]
        own = trainer_of(TraceRequest(workload=workload, config=config, batch=4))
    finally:
        torch.Tensor.to = original  # type: ignore[method-assign]
    assert own is not None
    return cast, {p.dtype for p in own[1]["teacher"].parameters()}


def test_a_second_model_is_not_cast_for_a_trace(tmp_path: Path) -> None:
    given = {"model": BertForSequenceClassification(SMALL), "train_dataset": ROWS, "data_collator": stack}
    own = {"trainer_cls": Distilling, "trainer_arguments": {"teacher": BertForSequenceClassification(SMALL)}}
    assert in_child(_casts, _workload(tmp_path / "a.pkl", **given, **own)) == (0, {torch.bfloat16})


class Switched(nn.Module):
    """Takes a switch and a list beside its tensors, as `CLIPModel` and detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: list[torch.Tensor], return_loss: bool = False) -> dict[str, torch.Tensor]:
        assert return_loss is True
        return {"loss": self.linear(x).sum() + sum(self.linear(label).sum() for label in labels)}


def switched(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A collator that adds what is no tensor."""
    return {"x": torch.ones(len(rows), 4), "labels": [torch.ones(len(rows), 4)], "return_loss": True}


@pytest.mark.parametrize("own", [{}, {"trainer_cls": type("Mine", (Trainer,), {})}], ids=["loop", "trainer"])
def test_a_batch_may_hold_more_than_tensors(own: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"x": torch.ones(4), "labels": torch.tensor(0)} for _ in range(8)]
    workload = _workload(tmp_path / "a.pkl", model=Switched(), train_dataset=rows, data_collator=switched, **own)
    assert in_child(_answer, workload)["reason"] is None
