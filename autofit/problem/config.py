"""One point of the search space: what a trial is told to run.

Field names are TrainingArguments' own. *precision* is what the user says; `PRECISION_FACTS` says what it is
inside: weight dtype, autocast dtype and fp32 matmul mode are three separate things (a bf16 checkpoint that is
"trained in fp32" is really trained in pure bf16).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from autofit.errors import UserError

Scalar = str | int | float | bool | None


class Precision(StrEnum):
    """What the user says; see `PRECISION_FACTS` for what it means."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    PURE_BF16 = "pure_bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFacts:
    """The three facts behind a precision's name.

    Attributes:
        weight_dtype: dtype of the parameters (and of gradients and optimizer state), a torch dtype name.
        autocast_dtype: dtype of `torch.autocast` in forward, None when autocast is off.
        fp32_matmul: `ieee` or `tf32`, how fp32 matrix products are computed.
        arguments: TrainingArguments keywords that ask for it.
    """

    weight_dtype: str
    autocast_dtype: str | None
    fp32_matmul: str
    arguments: Mapping[str, bool]


PRECISION_FACTS: Mapping[Precision, PrecisionFacts] = {
    Precision.FP32: PrecisionFacts(
        weight_dtype="float32", autocast_dtype=None, fp32_matmul="ieee", arguments={}
    ),
    Precision.TF32: PrecisionFacts(
        weight_dtype="float32", autocast_dtype=None, fp32_matmul="tf32", arguments={"tf32": True}
    ),
    Precision.BF16: PrecisionFacts(
        weight_dtype="float32", autocast_dtype="bfloat16", fp32_matmul="ieee", arguments={"bf16": True}
    ),
    Precision.FP16: PrecisionFacts(
        weight_dtype="float32", autocast_dtype="float16", fp32_matmul="ieee", arguments={"fp16": True}
    ),
    Precision.PURE_BF16: PrecisionFacts(
        weight_dtype="bfloat16", autocast_dtype=None, fp32_matmul="ieee", arguments={}
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TrialConfig:
    """One configuration.

    Attributes:
        per_device_train_batch_size: samples per micro-step and device, >= 1.
        gradient_accumulation_steps: micro-steps per optimizer step, >= 1.
        gradient_checkpointing: whether activations are recomputed in backward.
        precision: see `Precision`.
        optim: a name that `TrainingArguments(optim=...)` accepts.
        extra: further TrainingArguments keywords or `attn_implementation`, as sorted pairs, kept as given.
    """

    per_device_train_batch_size: int
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    precision: Precision = Precision.FP32
    optim: str = "adamw_torch_fused"
    extra: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.gradient_checkpointing, bool):
            raise UserError(
                f"gradient_checkpointing must be true or false, got {self.gradient_checkpointing!r}"
            )
        try:
            object.__setattr__(self, "precision", Precision(self.precision))
        except ValueError:
            known = ", ".join(Precision)
            raise UserError(f"unknown precision {self.precision!r}", hint=f"choose from {known}") from None
        if not isinstance(self.optim, str) or not self.optim:
            raise UserError(f"optim must be the name of an optimizer, got {self.optim!r}")
        object.__setattr__(self, "extra", tuple(sorted((str(k), v) for k, v in self.extra)))

    def effective_batch(self, world_size: int = 1) -> int:
        """Samples per optimizer step over `world_size` devices."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size

    def but(self, **changes: Any) -> TrialConfig:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The configuration as a flat JSON object; `extra` keys stand beside the named ones."""
        return {
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
            "precision": str(self.precision),
            "optim": self.optim,
            **dict(self.extra),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialConfig:
        """Inverse of `to_json`. Unknown keys go to `extra`.

        Raises:
            UserError: a missing or impossible field, by name.
        """
        if not isinstance(data, Mapping):
            raise UserError(f"a configuration must be an object, got {type(data).__name__}")
        known = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "gradient_checkpointing",
            "precision",
            "optim",
        )
        missing = [name for name in known if name not in data]
        if missing:
            raise UserError(f"a configuration lacks {', '.join(missing)}")
        extra = tuple((k, v) for k, v in data.items() if k not in known)
        for key, value in extra:
            if not isinstance(value, str | int | float | bool | None):
                raise UserError(f"configuration field {key!r} must be a scalar, got {type(value).__name__}")
        return cls(**{name: data[name] for name in known}, extra=extra)

    def key(self) -> str:
        """A canonical string: equal configurations, and only those, have equal keys."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def label(self) -> str:
        """A short name for tables: `8x8 bf16 ckpt adafactor` (batch x accumulation, ...)."""
        parts = [
            f"{self.per_device_train_batch_size}x{self.gradient_accumulation_steps}",
            str(self.precision),
        ]
        if self.gradient_checkpointing:
            parts.append("ckpt")
        parts.append(self.optim)
        parts += [f"{k}={v}" for k, v in self.extra]
        return " ".join(parts)


def parse_precisions(names: Sequence[str] | str | None) -> tuple[Precision, ...] | None:
    """Precisions from names (or one string with commas); None stays None.

    Raises:
        UserError: an unknown name, or no name at all.
    """
    if names is None:
        return None
    if not isinstance(names, Collection) or isinstance(names, bytes):
        raise UserError(f"precisions are names, got {names!r}", hint=f"choose from {', '.join(Precision)}")
    wanted = [str(name).strip() for name in (names.split(",") if isinstance(names, str) else names)]
    for name in wanted:
        if name not in set(Precision):
            raise UserError(f"unknown precision {name!r}", hint=f"choose from {', '.join(Precision)}")
    if not wanted:
        raise UserError("an empty list of precisions", hint="leave it out to search them all")
    return tuple(dict.fromkeys(Precision(name) for name in wanted))
