"""Everything that decides one traced step, free of names and files: what `loop` and `trainer` take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autofit.problem.config import PRECISION_FACTS, Precision

Batch = dict[str, Any]  #: tensors, for most; a collator may add what else the model's `forward` takes (`return_loss`)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a model is trained while it is watched.

    Attributes:
        batch, seq_len: for the record; the batches come from `StepSubject.make_batch`.
        arguments: TrainingArguments keywords (optimizer, its options, checkpointing, clipping, label smoothing, ...).
        precision: decides autocast and the gradient scaler.
        accumulation: micro-steps per optimizer step.
        steps: optimizer steps; 2 is the shortest trace that holds the optimizer's state beside activations.
        capability: compute capability of the card, (major, minor).
        padded: whether batches hold padding.
        device_type: `cuda` or `cpu`.
        costs: whether the work of the last step is recorded.
        smooth: whether kernels' workspaces ignore thresholds in the batch, see `kernels.Card`.
    """

    batch: int
    seq_len: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.FP32
    accumulation: int = 1
    steps: int = 2
    capability: tuple[int, int] = (8, 0)
    padded: bool = False
    device_type: str = "cuda"
    costs: bool = True
    smooth: bool = False

    @property
    def autocast_dtype(self) -> str | None:
        """Name of the torch dtype of autocast, None when it is off (the Trainer ignores fp16 on a CPU)."""
        if self.device_type == "cpu" and self.precision is Precision.FP16:
            return None
        return PRECISION_FACTS[self.precision].autocast_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSubject:
    """What is trained.

    Attributes:
        model: on the (fake) device.
        make_batch: a batch on the CPU, as the collator makes it; called under the fake mode.
    """

    model: nn.Module
    make_batch: Callable[[], Batch]
