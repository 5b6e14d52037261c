"""The soundness check in its own child: a few optimizer steps of the real Trainer in several forms, on the same weights and the same samples.

The forms are one effective batch as one micro-batch and as several, and some steps in another precision (see `checking`). Chance is taken
out (`stillness`), clipping is off so that the gradient's norm is the one before clipping, and the order of samples is fixed. What is compared, and
with which bounds, is decided in the parent.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from autofit.errors import UserError
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.processes.protocol import SCRATCH
from autofit.results.checking import CheckOrder, Form, FormResult
from autofit.trials.runner import TrialRequest
from autofit.workload.limits import meter_for
from autofit.workload.scripts.trainer import NothingElse
from autofit.workload.stillness import calm, still
from autofit.workload.subject import Subject, lengthened, load_subject
from autofit.workload.trial import make_trainer, trial_arguments

Weights = dict[str, torch.Tensor]
#: Of the user's own arguments: noise in the embeddings, and compilation, which takes minutes and changes rounding only.
NOT_CHECKED: Mapping[str, Any] = {
    "neftune_noise_alpha": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
}


def answer_check(payload: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Run every form of the order and return their `FormResult`s and what is known of model and Trainer, as JSON."""
    order = CheckOrder.from_json(payload)
    channel.enter("setup")
    meter = meter_for(order.device, context_bytes=order.context_bytes)
    meter.limit(order.memory_limit_bytes)
    weights: Weights | None = None
    results: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    with still():
        for form in order.forms:
            channel.enter(form.name)
            result, weights, facts = _run(form, order, weights, facts)
            results[form.name] = result.to_json()
            gc.collect()  # a Trainer and its callbacks refer to each other
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    return {"forms": results, "facts": facts}


def _run(
    form: Form, order: CheckOrder, weights: Weights | None, facts: dict[str, Any]
) -> tuple[FormResult, Weights, dict[str, Any]]:
    """Train one form from the first form's weights; the first one gives them."""
    set_seed(order.seed)
    config = form.config
    subject = load_subject(Workload.from_json(order.workload), config, device="cpu" if order.device == "cpu" else "cuda:0")
    if weights is None:
        weights = _copied(subject.model)
    else:
        _put(subject.model, weights)
    calm(subject.model)
    with tempfile.TemporaryDirectory(prefix="autofit-check-", dir=os.environ.get(SCRATCH)) as directory:
        trainer = _trainer(subject, form, order, directory)
        if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
            raise UserError(f"{type(trainer).__name__} makes its own data loader, which decides the order of samples")
        facts = facts or trainer_facts(trainer, subject.model)
        notes = _Notes(trainer)
        set_seed(order.seed + form.random_state)
        trainer.train()
    return notes.result(), weights, facts


def _trainer(subject: Subject, form: Form, order: CheckOrder, directory: str) -> Trainer:
    config: TrialConfig = form.config
    request = TrialRequest(config=config, full_length=True, seed=order.seed)
    cpu = order.device == "cpu"
    base = {**subject.base_arguments, **NOT_CHECKED}
    arguments = trial_arguments(base, request, output_dir=directory, cpu=cpu, cls=subject.arguments_cls)
    arguments.max_steps, arguments.max_grad_norm = form.steps, 0.0
    arguments.dataloader_num_workers, arguments.dataloader_persistent_workers = 0, False
    arguments.dataloader_prefetch_factor = None
    trainer = make_trainer(subject, arguments, request)
    trainer.add_callback(NothingElse())
    rows = order.batch * max(f.steps for f in order.forms)
    data: Any = lengthened(trainer.train_dataset, rows)
    trainer.train_dataset = data
    if hasattr(data, "__len__"):
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(order.seed))[:rows].tolist()
        trainer._get_train_sampler = lambda *args, **kwargs: _Order(chosen)  # type: ignore[method-assign]
    return trainer


class _Order(Sampler[int]):
    """The same rows in the same order, whatever the batch size."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(eq=False)
class _Notes(TrainerCallback):
    """Loss, gradient norm and skipped steps of a Trainer, by optimizer step."""

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    _parts: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        step = self.trainer.training_step

        def noted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs.get("labels") if isinstance(inputs, Mapping) or hasattr(inputs, "get") else None
            if torch.is_tensor(labels):
                self.items.append(int((labels != -100).sum()) if not labels.is_floating_point() else labels.numel())
            result = step(model, inputs, *args, **kwargs)
            self._parts.append(result.detach().float())
            return result

        self.trainer.training_step = noted  # type: ignore[method-assign]
        self.trainer.add_callback(self)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The norm of all gradients, the loss scaler's factor taken out."""
        assert self.trainer.model is not None
        scaler = self.trainer.accelerator.scaler
        scale = float(scaler.get_scale()) if scaler is not None else 1.0
        squares = [float(p.grad.detach().double().square().sum()) for p in self.trainer.model.parameters() if p.grad is not None]
        self.norms.append(sum(squares) ** 0.5 / scale)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the step."""
        self.losses.append(float(torch.stack(self._parts).sum()))
        self._parts = []
        self.skipped.append(bool(self.trainer.accelerator.optimizer_step_was_skipped))

    def result(self) -> FormResult:
        """All that was noted."""
        return FormResult(
            losses=tuple(self.losses),
            gradient_norms=tuple(self.norms),
            skipped=tuple(self.skipped),
            items=tuple(self.items),
        )


def trainer_facts(trainer: Trainer, model: nn.Module) -> dict[str, Any]:
    """Who computes the loss, who normalises it, and which modules look at the whole micro-batch."""
    cls = type(trainer)
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    return {
        "model": type(inner).__name__,
        "trainer": cls.__name__,
        "accepts_loss_kwargs": bool(getattr(trainer, "model_accepts_loss_kwargs", False)),
        "loss_is_scaled_for_ga": getattr(trainer, "loss_is_scaled_for_ga", None),
        "own_compute_loss": cls.compute_loss is not Trainer.compute_loss,
        "own_training_step": cls.training_step is not Trainer.training_step,
        "router_loss": bool(getattr(getattr(inner, "config", None), "output_router_logits", False)),
        "compute_loss_func": getattr(trainer, "compute_loss_func", None) is not None,
        "batch_norms": [name for name, _ in norms],
        "sync_batch_norms": [name for name, m in norms if isinstance(m, nn.SyncBatchNorm)],
    }


def _copied(model: nn.Module) -> Weights:
    """Floating-point parameters and buffers, on the host."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors if t.is_floating_point()}


def _put(model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kept = weights.get(name)
            if kept is not None and tensor.is_floating_point() and kept.shape == tensor.shape:
                tensor.copy_(kept)
