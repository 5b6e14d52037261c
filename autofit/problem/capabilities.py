"""What device, packages and model allow, and why a choice cannot run here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.problem.config import Precision

#: What a part of an optimizer's name needs; the first that matches counts (`Trainer.get_optimizer_cls_and_kwargs`).
OPTIM_PACKAGES: tuple[tuple[str, str], ...] = (
    ("galore", "galore_torch"),
    ("apollo", "apollo_torch"),
    ("adalomo", "lomo_optim"),
    ("lomo", "lomo_optim"),
    ("grokadamw", "grokadamw"),
    ("schedule_free", "schedulefree"),
    ("stable_adamw", "optimi"),
    ("adamw_torch_4bit", "torchao"),
    ("adamw_torch_8bit", "torchao"),
    ("xla", "torch_xla"),
    ("npu", "torch_npu"),
    ("anyprecision", "torchdistx"),
    ("apex", "apex"),
    ("bnb", "bitsandbytes"),
    ("8bit", "bitsandbytes"),
    ("ademamix", "bitsandbytes"),
    ("lion", "bitsandbytes"),
    ("paged", "bitsandbytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What device, packages and model allow, as a child reported it.

    Attributes:
        device_kind: `cuda` or `cpu`.
        precisions: computed natively by the device.
        optims: every name that the installed TrainingArguments accepts.
        missing_packages: package -> why it cannot be used (`not installed`, an import error).
        supports_checkpointing: whether the model class implements it.
        model_name: for messages.
        weights_dtype: dtype of a live model's own parameters; None when autofit builds the model.
        quantization: how the frozen weights are quantised (`4bit`, `8bit`); None = they are not.
        adapter: peft's name of the adapter that is trained; None = the model itself.
        extras: what the space can be widened by, as `workload.extras_facts` reports it; empty = nobody looked.
    """

    device_kind: str
    precisions: tuple[Precision, ...]
    optims: tuple[str, ...]
    missing_packages: Mapping[str, str] = field(default_factory=dict)
    supports_checkpointing: bool = True
    model_name: str = "the model"
    weights_dtype: str | None = None
    quantization: str | None = None
    adapter: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


def precision_problem(precision: Precision, caps: Capabilities) -> str | None:
    """Why `precision` cannot (or should not) run here; None when it can."""
    needs = Precision.BF16 if precision is Precision.PURE_BF16 else precision
    if caps.weights_dtype not in (None, "float32") and precision in (
        Precision.FP32,
        Precision.TF32,
        Precision.FP16,
    ):
        return f"the model's own weights are {caps.weights_dtype}: load it in float32 to train in {precision}"
    quantised = quantised_problem(precision, caps)
    if quantised is not None:
        return quantised
    if needs in caps.precisions:
        return None
    if precision is Precision.FP16 and caps.device_kind == "cpu":
        return "fp16 has no effect on the CPU (the library ignores it silently)"
    if needs is Precision.TF32:
        return "tf32 needs an NVIDIA card of compute capability 8.0 or newer"
    if needs is Precision.BF16:
        return "bf16 is not native on this device: it would be emulated and slow"
    return f"{precision} is not supported on this device"


def quantised_problem(precision: Precision, caps: Capabilities) -> str | None:
    """Why `precision` has no effect, or is too slow, on a quantised model; None when it is neither, or nothing is quantised.

    What is not quantised (adapters, attention, norms, the head) follows the precision as in any model, so fp32 and tf32 are not the same as
    bf16, although the quantised layers themselves multiply in 16 bit.
    """
    if caps.quantization is None:
        return None
    if precision is Precision.PURE_BF16 and caps.weights_dtype in (None, "float32"):
        return "what is not quantised is kept in float32 (peft's prepare_model_for_kbit_training), so that nothing is left to be stored in bf16"
    half = precision in (Precision.FP32, Precision.TF32) and caps.quantization == "4bit"
    if half and caps.device_kind == "cuda" and Precision.BF16 not in caps.precisions:
        return "the 4-bit layers would multiply in bf16, which is not native on this device: fp16 makes them multiply in fp16"
    return None


def optim_problem(optim: str, caps: Capabilities) -> str | None:
    """Why `optim` cannot run here; None when it can."""
    if optim not in caps.optims:
        return "the installed transformers does not know it"
    package = next((package for part, package in OPTIM_PACKAGES if part in optim), None)
    if package is not None and package in caps.missing_packages:
        return f"needs {package}, which is {caps.missing_packages[package]}"
    if caps.device_kind == "cpu" and optim.startswith("paged_ademamix"):
        return "paged memory needs CUDA"
    return None


def checkpointing_problem(checkpointing: bool, caps: Capabilities) -> str | None:
    """Why checkpointing cannot be switched on; None when it can."""
    if checkpointing and not caps.supports_checkpointing:
        return f"{caps.model_name} does not implement gradient checkpointing"
    return None
