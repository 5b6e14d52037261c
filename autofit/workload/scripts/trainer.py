"""A Trainer that the user's script built, made ready for a trial: silent, with data that never runs short, and with the knobs that arguments do not reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.training_args import OptimizerNames

from autofit.errors import ScriptError
from autofit.problem.arguments import model_arguments
from autofit.problem.config import PRECISION_FACTS, TrialConfig
from autofit.workload.construct import in_dtype, set_attention, without_adapters
from autofit.workload.knobs import checkpointing_active, weight_dtype
from autofit.workload.scripts.guard import TrainingStopped
from autofit.workload.subject import lengthened

MAKING_OPTIMIZERS = ("create_optimizer", "get_optimizer_cls_and_kwargs")  #: methods of Trainer that a class may have its own way in
AS_NAMED = "_autofit_optimizer"  #: in a Trainer: the optimizer that it made before its training, as `optim` says
SWITCHED_OFF = "_autofit_switched_off"  #: in a Trainer: that its model came with checkpointing, and trains without
REPORTERS = "transformers.integrations"  #: callbacks defined there write for trackers


class NothingElse(TrainerCallback):
    """Keeps other callbacks from saving, evaluating and logging in the middle of what is measured."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """After a step."""
        control.should_save = control.should_evaluate = control.should_log = False
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """As after a step: the epochs of a trial end where its data does."""
        control.should_save = control.should_evaluate = control.should_log = False
        return control


class LeaveWhenStopped(NothingElse):
    """Leaves the training at the end of the step after which the clock has stopped it: no saving, no final callbacks."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Leave, or go on undisturbed."""
        if control.should_training_stop:
            raise TrainingStopped
        return super().on_step_end(args, state, control, **kwargs)


def make_ready(trainer: Trainer, model: nn.Module, config: TrialConfig) -> None:
    """Silence the Trainer, look at its data, and bring weights, attention and checkpointing to what `config` says.

    Raises:
        ScriptError: the script has no training data.
        UserError: the model does not take the attention.
    """
    silence(trainer)
    trainer.train_dataset = long_enough(trainer.train_dataset, 1)
    wanted = PRECISION_FACTS[config.precision].weight_dtype
    if wanted == "bfloat16" and weight_dtype(model) != wanted:
        in_dtype(model, torch.bfloat16)
    attention = model_arguments(config).get("attn_implementation")
    if attention is not None:
        inner = without_adapters(model)
        assert isinstance(inner, PreTrainedModel)  # no other is described as having attention to choose
        set_attention(inner, attention)
    checkpointing_as_asked(trainer, model, config)
    trainer.model_init = None  # type: ignore[assignment]  # it has made this model, and would make another one, as the script has it, when the training begins
    go_on_at_the_end(trainer.lr_scheduler)
    refuse_missing_loss(trainer)


def go_on_at_the_end(scheduler: Any) -> None:
    """Have a schedule of the script's own, which is as long as its training, stay where it ends: a trial may have more steps."""
    total = getattr(scheduler, "total_steps", None)
    if total is None:
        return
    step = scheduler.step

    def endless_step(*args: Any, **kwargs: Any) -> None:
        if scheduler.last_epoch < total:
            step(*args, **kwargs)

    scheduler.step = endless_step


def checkpointing_as_asked(trainer: Trainer, model: Any, config: TrialConfig) -> None:
    """Switch off checkpointing that code has switched on, where `config` is without, and mark it; on is the Trainer's own work."""
    if not config.gradient_checkpointing and checkpointing_active(model):
        newer = "activation_checkpointing_disable"
        getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_disable")()
        vars(trainer)[SWITCHED_OFF] = True


def silence(trainer: Trainer) -> None:
    """Take out the callbacks that print, report to trackers, or need evaluations to decide when to stop."""
    for callback in list(trainer.callback_handler.callbacks):
        silent = isinstance(callback, PrinterCallback | ProgressCallback | EarlyStoppingCallback)
        if silent or any(cls.__module__.startswith(REPORTERS) for cls in type(callback).__mro__):
            trainer.remove_callback(callback)


def long_enough(data: Any, length: int) -> Any:
    """The script's training data, repeated to `length` rows where it has fewer; streams and data without a length as they are.

    Raises:
        ScriptError: no data, or an empty dataset.
    """
    if data is None:
        raise ScriptError("the script's Trainer has no train_dataset")
    if hasattr(data, "__len__") and not isinstance(data, torch.utils.data.IterableDataset) and len(data) == 0:
        raise ScriptError("the script's training dataset is empty")
    return lengthened(data, length)


def ignores_optim(trainer: Trainer) -> bool:
    """Whether the script makes its own optimizer, so that `optim` changes nothing."""
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        return True
    if trainer.optimizer is not None:
        return trainer.optimizer is not vars(trainer).get(AS_NAMED)
    if all(getattr(type(trainer), name) is getattr(Trainer, name) for name in MAKING_OPTIMIZERS):
        return False
    try:
        return _made_for(trainer, OptimizerNames.SGD) is _made_for(trainer, OptimizerNames.ADAMW_TORCH)
    except Exception:  # the user's own code may want what only its training sets: then the training will tell
        return False


def noting_optimizer(create: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.create_optimizer` that remembers what it made: the script may have its Trainer make the optimizer before it trains."""

    @functools.wraps(create)
    def noted(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        before = trainer.optimizer
        made = create(trainer, *args, **kwargs)
        if before is None:
            vars(trainer)[AS_NAMED] = trainer.optimizer
        return made

    return noted


def _made_for(trainer: Trainer, name: OptimizerNames) -> type:
    """The class of the optimizer that the Trainer makes for a name."""
    asked, trainer.args.optim = trainer.args.optim, name
    try:
        trainer.create_optimizer()
        return type(trainer.optimizer)
    finally:
        trainer.args.optim, trainer.optimizer = asked, None


def refuse_missing_loss(trainer: Trainer) -> None:
    """Have a `compute_loss` that returns None say so by name."""
    loss = trainer.compute_loss

    def checked_loss(*args: Any, **kwargs: Any) -> Any:
        result = loss(*args, **kwargs)
        value = result[0] if isinstance(result, tuple) else result
        if value is None:
            raise ValueError(f"{type(trainer).__name__}.compute_loss returned None instead of a loss")
        return result

    trainer.compute_loss = checked_loss  # type: ignore[method-assign]
