"""What of a named model is trained, and how the rest is stored: adapters (PEFT) and quantised weights (bitsandbytes), as the user says it.

Data only: `workload.adapters` and `workload.quantised` build what is said here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from typing import Any

from autofit.errors import UserError

DEFAULT_RANK = 16
MAX_RANK = 4096


class AdapterKind(StrEnum):
    """What `--adapter` accepts."""

    LORA = "lora"
    DORA = "dora"
    IA3 = "ia3"


class Quantization(StrEnum):
    """What `--quantize` accepts: how bitsandbytes stores the weights of linear layers."""

    FOUR_BIT = "4bit"  #: nf4 with double quantisation
    EIGHT_BIT = "8bit"  #: LLM.int8


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """An adapter, and how the frozen model under it is stored.

    Attributes:
        adapter: one of autofit's three; None where `peft_config` is given.
        rank: of LoRA and DoRA; None for IA3 and with `peft_config`.
        target: names of the modules that get an adapter, or `all-linear`; None = peft's choice for the architecture.
        peft_config: the user's own `PeftConfig` as JSON, in the place of the three above.
        quantization: None = the weights stay as they are.
    """

    adapter: AdapterKind | None = None
    rank: int | None = None
    target: tuple[str, ...] | None = None
    peft_config: str | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name, kind in (("adapter", AdapterKind), ("quantization", Quantization)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _choice(kind, value, "quantize" if name == "quantization" else name))
        if self.adapter is None and self.peft_config is None:
            self._refuse_without_adapter()
        if self.adapter is not None and self.peft_config is not None:
            raise UserError("an adapter and a peft_config were both given", hint="the peft_config says it all: leave the other out")
        if self.adapter is AdapterKind.IA3 and self.rank is not None:
            raise UserError("IA3 has no rank: it learns one factor per activation", hint="leave the rank out, or use lora")
        if self.rank is not None and (isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= MAX_RANK):
            raise UserError(f"the rank of an adapter must be between 1 and {MAX_RANK}, got {self.rank!r}")
        if self.adapter in (AdapterKind.LORA, AdapterKind.DORA) and self.rank is None:
            object.__setattr__(self, "rank", DEFAULT_RANK)

    def _refuse_without_adapter(self) -> None:
        if self.quantization is not None:
            raise UserError(
                f"a model quantised to {self.quantization} cannot be trained by itself: its weights are whole numbers, which have no gradients",
                hint="train an adapter on it: --adapter lora (in Python: peft_config=LoraConfig(...))",
            )
        raise UserError(
            "the rank or the target of an adapter was given without an adapter", hint="say which: --adapter lora, dora or ia3"
        )

    def label(self) -> str:
        """A few words for reports: `lora of rank 16 on a 4bit model`."""
        if self.peft_config is not None:
            name = str(json.loads(self.peft_config).get("peft_type", "an adapter")).lower()
        else:
            name = str(self.adapter) if self.rank is None else f"{self.adapter} of rank {self.rank}"
        where = "" if self.target is None else f" on {', '.join(self.target)}"
        return name + where + ("" if self.quantization is None else f", base quantised to {self.quantization}")

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        data = asdict(self)
        return {**data, "target": None if self.target is None else list(self.target)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Adaptation:
        """Inverse of `to_json`; unknown keys are ignored.

        Raises:
            UserError: a value that is none of the choices.
        """
        target = data.get("target")
        return cls(
            adapter=data.get("adapter"),
            rank=data.get("rank"),
            target=None if target is None else tuple(target),
            peft_config=data.get("peft_config"),
            quantization=data.get("quantization"),
        )


def refuse_on_device(adaptation: Adaptation | None, device_kind: str, quantises_on: Sequence[str] | None) -> None:
    """Check that what is asked for trains on this kind of device.

    Args:
        adaptation: None = nothing is asked for.
        device_kind: `cpu` or `cuda`.
        quantises_on: devices that the installed bitsandbytes supports; None = not known.

    Raises:
        UserError: quantised layers do not run there, or DoRA does not train on them.
    """
    if adaptation is None or adaptation.quantization is None:
        return
    if quantises_on is not None and device_kind not in quantises_on:
        raise UserError(
            f"the installed bitsandbytes runs quantised layers on {', '.join(sorted(quantises_on)) or 'no device'}, not on {device_kind}",
            hint="leave --quantize out, use another --device, or upgrade bitsandbytes",
        )
    dora = adaptation.adapter is AdapterKind.DORA or (
        adaptation.peft_config is not None and json.loads(adaptation.peft_config).get("use_dora")
    )
    if dora and device_kind == "cpu" and adaptation.quantization is Quantization.EIGHT_BIT:
        raise UserError(
            "DoRA on 8-bit layers fails on a CPU in its second step: peft puts the weights back without their scales",
            hint="use --quantize 4bit, or --adapter lora",
        )


def adaptation_of(
    *,
    adapter: str | None = None,
    rank: int | None = None,
    target: Sequence[str] | None = None,
    peft_config: Any = None,
    quantize: str | None = None,
) -> Adaptation | None:
    """What options or keywords say; None when they say nothing.

    Args:
        adapter: `lora`, `dora` or `ia3`.
        rank, target: of it.
        peft_config: a `PeftConfig` in its place.
        quantize: `4bit` or `8bit`.

    Raises:
        UserError: a contradiction, an unknown choice, or a quantised model without an adapter.
    """
    if adapter is None and rank is None and not target and peft_config is None and quantize is None:
        return None
    return Adaptation(
        adapter=None if adapter is None else _choice(AdapterKind, adapter, "adapter"),
        rank=rank,
        target=tuple(target) if target else None,
        peft_config=None if peft_config is None else peft_config_json(peft_config),
        quantization=None if quantize is None else _choice(Quantization, quantize, "quantize"),
    )


def peft_config_json(config: Any) -> str:
    """A `PeftConfig` as canonical JSON, so that it can be sent, compared and written to a file.

    Raises:
        UserError: it is something else, or holds something that JSON cannot.
    """
    if isinstance(config, type) or getattr(config, "peft_type", None) is None or not hasattr(config, "to_dict"):
        kind = config.__name__ if isinstance(config, type) else type(config).__name__
        raise UserError(f"peft_config must be a PeftConfig, got {kind}", hint="pass e.g. peft.LoraConfig(r=16, task_type=\"CAUSAL_LM\")")
    try:
        return json.dumps(config.to_dict(), sort_keys=True, default=_plain)
    except TypeError as error:
        raise UserError(f"this peft_config cannot be sent to a trial's process: {error}", hint="use plain values in it") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _choice(kind: type[StrEnum], value: Any, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"unknown {what} {value!r}", hint=f"choose from {', '.join(kind)}") from None
