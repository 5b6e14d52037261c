"""The real `Trainer.train()` under the fake mode: for a Trainer class of the user's own, whose steps only it knows.

Slower than `loop` by the Trainer's own bookkeeping, and equal to it for the plain Trainer. A few of its habits need a device and
are switched off: moving the model, pinning memory, probing precision support.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from autofit.memory.events import Kind, Moment
from autofit.memory.request import TraceUnavailable
from autofit.problem.arguments import SILENT_ARGUMENTS, checkpointing_name
from autofit.processes.protocol import SCRATCH
from autofit.tracing.loop import UNTRACEABLE, in_loading_order, optimizer_tensors, tensors_of
from autofit.tracing.optimizers import without_kernels
from autofit.tracing.settings import StepSettings, StepSubject
from autofit.tracing.tracer import StorageTracer
from autofit.workload.scripts.arguments import NEEDS_EVALUATION

_OWN_ARGUMENTS: Mapping[str, Any] = {
    **SILENT_ARGUMENTS,
    "dataloader_pin_memory": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "train_sampling_strategy": "random",
    "group_by_length": False,
    "skip_memory_metrics": True,
    "debug": "",
    "use_cpu": True,
    "tf32": None,
}


class _Rows(Dataset[dict[str, int]]):
    """As many rows as the steps need; the collator does not look at them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"labels": 0}


class _Moments(TrainerCallback):
    """Marks what only callbacks see, and ends the recording of costs with the training."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.mark(Moment.UPDATE)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.after_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.after_step()


class _Watch:
    """Wraps the methods of one Trainer so that phases and kinds are recorded."""

    def __init__(self, trainer: Any, tracer: StorageTracer, settings: StepSettings) -> None:
        self.trainer, self.tracer, self.settings = trainer, tracer, settings
        self.step = self.micro_step = 0
        self._wrap("get_batch_samples", self._batches)
        self._wrap("training_step", self._training_step)
        self._mark_before("backward", Moment.BACKWARD)
        self._mark_before("clip_grad_norm_", Moment.CLIP)
        trainer.add_callback(_Moments(self))

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self.trainer, name)
        setattr(self.trainer, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _mark_before(self, name: str, moment: Moment) -> None:
        """`moment` begins when the Trainer calls `name` of its accelerator."""
        original = getattr(self.trainer.accelerator, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.mark(moment)
            return original(*args, **kwargs)

        setattr(self.trainer.accelerator, name, marked)

    def mark(self, moment: Moment) -> None:
        """A phase begins."""
        self.tracer.mark(moment, step=self.step, micro_step=self.micro_step)

    def _batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.micro_step = 0
        self.mark(Moment.INPUT)
        found = original(*args, **kwargs)
        for batch in found[0]:
            self.tracer.classify(tensors_of(batch), Kind.INPUTS)
        return found

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.step == self.settings.steps - 1 and self.micro_step == self.settings.accumulation - 1:
            self.tracer.builder.forget_ops()
            self.tracer.recording_costs = self.settings.costs
        self.mark(Moment.FORWARD)
        loss = original(*args, **kwargs)
        self.tracer.classify((p.grad for p in self.trainer.model.parameters()), Kind.GRADIENTS)
        self.micro_step += 1
        return loss

    def after_update(self) -> None:
        """The states exist; what follows is the reset of the gradients."""
        self.tracer.classify(optimizer_tensors(self.trainer.optimizer), Kind.OPTIMIZER_STATE)
        self.mark(Moment.ZERO)
        self.step, self.micro_step = self.step + 1, 0

    def after_step(self) -> None:
        """The gradients are gone; what dies after the last step dies with the Trainer."""
        if self.step == self.settings.steps:
            self.mark(Moment.END)


def train(
    trainer_cls: type[Trainer],
    keywords: Mapping[str, Any],
    subject: StepSubject,
    settings: StepSettings,
    tracer: StorageTracer,
) -> None:
    """Run `settings.steps` optimizer steps of `trainer_cls` on the subject, inside the fake mode and the tracer.

    Args:
        keywords: further arguments of the class's constructor.

    Raises:
        TraceUnavailable: an argument whose effect a trace cannot show.
    """
    for name, reason in UNTRACEABLE.items():
        if settings.arguments.get(name):
            raise TraceUnavailable(f"{name}: {reason}")
    model: Any = subject.model
    tracer.mark(Moment.MODEL)
    parameters = {id(p) for p in model.parameters()}
    for tensor in in_loading_order(model):
        known = id(tensor) in parameters
        tracer.adopt([tensor], Kind.WEIGHTS if known else Kind.OTHER, "parameter" if known else "buffer")
    model.to = lambda *_args, **_kwargs: model  # it is there already, and fake parameters cannot be swapped
    with (
        _on_device(settings.device_type) as device,
        tempfile.TemporaryDirectory(prefix="autofit-trace-", dir=os.environ.get(SCRATCH)) as directory,
    ):
        arguments = _arguments(settings, directory, device)
        trainer = trainer_cls(
            model=model,
            args=arguments,
            train_dataset=_Rows(settings.batch * settings.accumulation * (settings.steps + 1)),
            data_collator=lambda _rows: subject.make_batch(),
            **keywords,
        )
        others = [m for m in vars(trainer).values() if isinstance(m, nn.Module) and m is not model]  # a teacher's, a reference model's
        tracer.classify((p for module in others for p in module.parameters()), Kind.WEIGHTS)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        make = trainer.create_optimizer
        trainer.create_optimizer = lambda *a, **k: without_kernels(make(*a, **k))  # type: ignore[method-assign]
        _Watch(trainer, tracer, settings)
        trainer.train()
        tracer.recording_costs = False


def _arguments(settings: StepSettings, directory: str, device: torch.device) -> TrainingArguments:
    known = TrainingArguments.__dataclass_fields__
    own = {name: value for name, value in _OWN_ARGUMENTS.items() if name in known}
    kept = {**settings.arguments, **own, "output_dir": directory, "max_steps": settings.steps}
    if kept.get("lr_scheduler_type") in NEEDS_EVALUATION:
        kept["lr_scheduler_type"] = "constant"
    kept["per_device_train_batch_size"] = settings.batch
    kept["gradient_accumulation_steps"] = settings.accumulation
    name = checkpointing_name(known)
    if kept.get(name):
        options = kept.get(f"{name}_kwargs") or {"use_reentrant": False}
        kept[f"{name}_kwargs"] = {**options, "preserve_rng_state": False}  # random states live on the host
    arguments = TrainingArguments(**kept)
    # The state was made anew just now, for the CPU. Its device, and the cache of the property that reads it, decide.
    _ = arguments.device
    PartialState._shared_state["device"] = device
    arguments.__dict__["_setup_devices"] = device
    return arguments


@contextlib.contextmanager
def _on_device(device_type: str) -> Iterator[torch.device]:
    """The device that accelerate is made to believe in; its process-wide state is fresh, and forgotten afterwards."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    states = (PartialState, AcceleratorState, GradientState)
    for state in states:
        state._shared_state.clear()
    try:
        yield device
    finally:
        for state in states:
            state._shared_state.clear()
