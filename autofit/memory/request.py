"""What is asked of the tracer. Data only: neither torch nor transformers is imported here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofit.errors import AutofitError, UserError
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import TRACED
from autofit.problem.spec import Workload

OUT_OF_PATIENCE = "tracing took more than"  #: so begins the reason why a class was not traced when the time for it was over
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")


class TraceUnavailable(AutofitError):
    """This machine, model or configuration cannot be traced: the closed formula must answer. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One training step to trace.

    Attributes:
        workload: what is trained.
        config: how. Of `gradient_accumulation_steps` only 1 or more matters; the per-device batch is `batch`.
        batch: samples per micro-step, >= 1.
        seq_len: tokens per sample; None = the workload's own.
        compute_capability: of the card, `8.0`; decides which attention kernel runs and how large the GEMM workspace is.
        padded: whether batches hold padding, so that attention needs a mask.
        max_grad_norm: gradient clipping; 0 = the norm is computed all the same, as the Trainer does.
        label_smoothing_factor: as in TrainingArguments.
        device_type: `cuda`; `cpu` traces what a CPU run would allocate.
    """

    workload: Workload
    config: TrialConfig
    batch: int
    seq_len: int | None = None
    compute_capability: str = "8.0"
    padded: bool = False
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise UserError(f"batch must be a positive integer, got {self.batch!r}")
        if self.seq_len is not None and self.seq_len < 1:
            raise UserError(f"sequence length must be at least 1, got {self.seq_len}")
        if _CAPABILITY.fullmatch(self.compute_capability) is None:
            raise UserError(f"compute capability is not like 8.0: {self.compute_capability!r}")
        if self.device_type not in ("cuda", "cpu"):
            raise UserError(f"device type must be cuda or cpu, got {self.device_type!r}")

    @property
    def capability(self) -> tuple[int, int]:
        """`compute_capability` as (major, minor)."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step in the trace: gradients persist from the second on, more change nothing."""
        return min(2, self.config.gradient_accumulation_steps)

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "workload": self.workload.to_json(),
            "config": self.config.to_json(),
            "batch": self.batch,
            "seq_len": self.seq_len,
            "compute_capability": self.compute_capability,
            "padded": self.padded,
            "max_grad_norm": self.max_grad_norm,
            "label_smoothing_factor": self.label_smoothing_factor,
            "device_type": self.device_type,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TraceRequest:
        """Inverse of `to_json`.

        Raises:
            UserError: a missing or impossible field.
        """
        kept = dict(data)
        try:
            kept["workload"] = Workload.from_json(kept["workload"])
            kept["config"] = TrialConfig.from_json(kept["config"])
            return cls(**kept)
        except (KeyError, TypeError) as error:
            raise UserError(f"not a trace request: {error}") from None

    def class_key(self) -> str:
        """A canonical string of all that decides the sequence of events but the batch: equal keys share one law."""
        return self._key(self.config)

    def step_key(self) -> str:
        """As `class_key`, for all but the updates: equal keys share forward and backward."""
        return self._key(self.config.but(optim="any"))

    def update_key(self) -> str:
        """As `class_key`, for the updates alone: weights and gradients are in fp32 under bf16 autocast too."""
        autocast = self.config.precision is Precision.BF16
        config = self.with_plainest_step().config
        return self._key(config.but(precision=Precision.FP32) if autocast else config)

    def with_plainest_step(self) -> TraceRequest:
        """The request with the updates of this one after the least work."""
        kept = tuple((name, value) for name, value in self.config.extra if name not in TRACED)
        config = self.config.but(gradient_accumulation_steps=1, gradient_checkpointing=False, extra=kept)
        return replace(self, config=config)

    def _key(self, config: TrialConfig) -> str:
        data = self.to_json()
        accumulation = min(2, config.gradient_accumulation_steps)
        config = config.but(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation)
        data["config"] = config.to_json() | ({"precision": "fp32"} if config.precision == "tf32" else {})
        data["workload"] = [self.workload.identity(), self.workload.objects_path]
        del data["batch"]
        return json.dumps(data, sort_keys=True, separators=(",", ":"))
