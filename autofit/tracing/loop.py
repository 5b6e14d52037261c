"""A training loop that holds and drops the same tensors as `transformers.Trainer` (checked against 5.23).

What matters for memory is who still holds what: all batches of an optimizer step are fetched to the device before its first
micro-step, and the batches of the step before are dropped only after that; outputs die before backward; the loss of a
micro-step lives until the next one; gradients are set to None after the update. Autocast wraps the model's forward and its
outputs become fp32, through accelerate's own functions.
"""

from __future__ import annotations

import inspect
import tempfile
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.training_args import OptimizerNames

from autofit.errors import UserError
from autofit.memory.events import Kind, Moment
from autofit.memory.request import TraceUnavailable
from autofit.tracing import optimizers
from autofit.tracing.settings import Batch, StepSettings, StepSubject
from autofit.tracing.tracer import StorageTracer
from autofit.workload.construct import without_adapters

UNTRACEABLE = {
    "torch_compile": "torch.compile fuses operators in ways that only a run can tell",
    "use_liger_kernel": "liger kernels have no fake counterpart",
    "deepspeed": "DeepSpeed manages memory itself",
    "fsdp": "sharded training is not traced",
}


def training_arguments(settings: StepSettings) -> TrainingArguments:
    """TrainingArguments of the step, without side effects on this process's device.

    Raises:
        TraceUnavailable: an argument whose effect a trace cannot show.
        UserError: an argument that transformers refuses.
    """
    for name, reason in UNTRACEABLE.items():
        if settings.arguments.get(name):
            raise TraceUnavailable(f"{name}: {reason}")
    # Precision flags would probe the device here; the loop applies them itself.
    kept = {k: v for k, v in settings.arguments.items() if k not in ("fp16", "bf16", "tf32")}
    kept |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    kept.setdefault("output_dir", tempfile.gettempdir())
    if kept.get("optim") not in (None, *OptimizerNames):
        raise UserError(
            f"optim {kept['optim']} cannot be used: the installed transformers does not know it", hint="autofit doctor lists the optimizers"
        )
    try:
        return TrainingArguments(**kept)
    except (ValueError, TypeError) as error:
        raise UserError(f"TrainingArguments refuses: {str(error).splitlines()[0]}") from error


def enable_checkpointing(model: Any, arguments: TrainingArguments) -> None:
    """Switch activation checkpointing on as `Trainer.train` does. Random states are not stored: they live on the host."""
    options = dict(
        _first(arguments, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs") or {}
    )
    every = options.pop("every_n_layers", 1)
    if options.pop("offload", False):
        raise TraceUnavailable("offloaded checkpoints live in pinned host memory, which is not traced")
    options.setdefault("use_reentrant", False)
    options["preserve_rng_state"] = False
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=options, every_n_layers=every
            )
        elif every != 1:
            raise TraceUnavailable("this transformers cannot checkpoint every n-th layer only")
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except (ValueError, AttributeError) as error:
        raise TraceUnavailable(f"this model cannot checkpoint activations: {error}") from error


def wants_checkpointing(arguments: TrainingArguments) -> bool:
    """Whether the arguments ask for it, under either name."""
    return bool(_first(arguments, "activation_checkpointing", "gradient_checkpointing"))


def _first(arguments: TrainingArguments, *names: str) -> Any:
    return next((value for name in names if (value := getattr(arguments, name, None)) is not None), None)


def in_loading_order(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers in the order in which `Module.to` moves them: children first."""
    tensors: list[Tensor] = []
    for child in model.children():
        tensors += in_loading_order(child)
    tensors += [p for p in model._parameters.values() if p is not None]
    return tensors + [b for b in model._buffers.values() if b is not None]


def device_of(settings: StepSettings) -> torch.device:
    """The device of the step: the first card, or the CPU."""
    return torch.device("cuda", 0) if settings.device_type == "cuda" else torch.device("cpu")


class TrainingLoop:
    """Runs the steps of one trace.

    Args:
        subject: model and batches.
        settings: how to train.
        tracer: active while `run` runs.
    """

    def __init__(self, subject: StepSubject, settings: StepSettings, tracer: StorageTracer) -> None:
        self.subject, self.settings, self.tracer = subject, settings, tracer
        self.model: Any = subject.model
        self.device = device_of(settings)
        self.arguments = training_arguments(settings)
        smoothing = self.arguments.label_smoothing_factor
        self.label_smoother = LabelSmoother(epsilon=smoothing) if smoothing else None
        inner = without_adapters(self.model)  # the Trainer looks inside, too
        self.accepts_loss_kwargs = accepts_loss_kwargs(inner)
        self.shifts_labels = shifts_labels(inner)
        fp16 = settings.autocast_dtype == "float16"
        self.scaler = torch.amp.GradScaler(settings.device_type) if fp16 else None

    def run(self) -> None:
        """Load, then `settings.steps` optimizer steps."""
        self.load()
        self.train()

    def load(self) -> None:
        """Take over the model that is on the device, and prepare it as the Trainer does."""
        self.tracer.mark(Moment.MODEL)
        parameters = {id(p) for p in self.model.parameters()}
        for tensor in in_loading_order(self.model):
            kind = Kind.WEIGHTS if id(tensor) in parameters else Kind.OTHER
            self.tracer.adopt([tensor], kind, "parameter" if kind is Kind.WEIGHTS else "buffer")
        self.model.train()
        if hasattr(self.model, "config"):
            self.model.config.use_cache = False
        if wants_checkpointing(self.arguments):
            enable_checkpointing(self.model, self.arguments)
        if self.settings.autocast_dtype is not None:
            self._wrap_forward(getattr(torch, self.settings.autocast_dtype))

    def _wrap_forward(self, dtype: torch.dtype) -> None:
        """Autocast and fp32 outputs as `Accelerator.prepare_model` puts them around the model's forward."""
        autocast = torch.autocast(device_type=self.settings.device_type, dtype=dtype)
        forward = autocast(self.model.forward.__func__)
        self.model.forward = MethodType(convert_outputs_to_fp32(forward), self.model)

    def train(self) -> None:
        """All optimizer steps."""
        optimizer = self.make_optimizer()
        total_loss = torch.tensor(0.0, device=self.device)
        self.model.zero_grad()
        batches: list[Batch] = []
        grad_norm = loss = inputs = None
        for step in range(self.settings.steps):
            last = step == self.settings.steps - 1
            self.tracer.mark(Moment.INPUT, step=step)
            batches, count = self._fetch()
            for micro_step, inputs in enumerate(batches):
                if last and micro_step == self.settings.accumulation - 1:
                    self.tracer.builder.forget_ops()
                    self.tracer.recording_costs = self.settings.costs
                loss = self._micro_step(inputs, count, step, micro_step)
                if not (torch.isnan(loss) or torch.isinf(loss)):
                    total_loss += loss
            self.tracer.mark(Moment.CLIP, step=step)
            grad_norm = self._clip(optimizer)
            self.tracer.mark(Moment.UPDATE, step=step)
            self._update(optimizer)
            self.tracer.mark(Moment.ZERO, step=step)
            self.reset_gradients()
        self.tracer.recording_costs = False
        self.tracer.mark(Moment.END, step=self.settings.steps)
        del batches, grad_norm, loss, inputs, total_loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the arguments name."""
        return optimizers.create(self.model, self.arguments)

    def reset_gradients(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad()

    def _fetch(self) -> tuple[list[Batch], Tensor | None]:
        """All batches of an optimizer step, on the device, and the number of labels in them where the loss wants it."""
        batches = []
        for _ in range(self.settings.accumulation):
            host = self.subject.make_batch()
            batch: Batch = tree_map_only(Tensor, lambda value: value.to(self.device), host)
            self.tracer.classify(tensors_of(batch), Kind.INPUTS)
            batches.append(batch)
        if not self.accepts_loss_kwargs or not isinstance(batches[0].get("labels"), Tensor):
            return batches, None
        labels = [batch["labels"][..., 1:] if self.shifts_labels else batch["labels"] for batch in batches]
        count = sum(label.ne(-100).sum() for label in labels)
        assert isinstance(count, Tensor)
        return batches, count / 1  # divided by the number of devices that share a batch

    def _micro_step(self, inputs: Batch, count: Tensor | None, step: int, micro_step: int) -> Tensor:
        self.tracer.mark(Moment.FORWARD, step=step, micro_step=micro_step)
        loss = self._loss(dict(inputs), count)
        if not (self.accepts_loss_kwargs and count is not None):
            loss = loss / self.settings.accumulation
        self.tracer.mark(Moment.BACKWARD, step=step, micro_step=micro_step)
        scaled = loss / 1  # accelerate divides by its own accumulation, which the Trainer leaves at 1
        if self.scaler is not None:
            self.scaler.scale(scaled).backward()
        else:
            scaled.backward()
        self.tracer.classify((p.grad for p in self.model.parameters()), Kind.GRADIENTS)
        return loss.detach()

    def _loss(self, inputs: dict[str, Any], count: Tensor | None) -> Tensor:
        labels = inputs.pop("labels") if self.label_smoother is not None and "labels" in inputs else None
        if self.accepts_loss_kwargs and count is not None:
            inputs["num_items_in_batch"] = count
        outputs = self.model(**inputs)
        if labels is not None:
            assert self.label_smoother is not None
            shift = type(without_adapters(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=count)
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if self.accepts_loss_kwargs and count is not None:
            loss *= 1  # times the number of processes, over which the count was averaged
        result: Tensor = loss
        return result

    def _clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        limit = self.arguments.max_grad_norm
        # The Trainer wants the norm for its log even when it does not clip.
        norm: Tensor = torch.nn.utils.clip_grad_norm_(
            list(self.model.parameters()), limit if limit > 0 else float("inf")
        )
        return norm

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        self.tracer.classify(optimizer_tensors(optimizer), Kind.OPTIMIZER_STATE)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Those of a batch, in lists and mappings too."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Every tensor in the state of an optimizer (accelerate's wrapper included)."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Whether the Trainer hands the number of labels to the model, and so leaves the loss unscaled."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of the model predicts the next label, so that the first of each row does not count."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifted = LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
    return shifted and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
