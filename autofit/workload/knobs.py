"""Proof that each knob took effect: what was asked, beside what the model, the optimizer and the forward pass really are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from autofit.problem.config import PRECISION_FACTS, Precision, TrialConfig
from autofit.workload.effects import EffectWitness

OPTIMIZER_CLASSES = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "adafactor": "Adafactor",
    "adamw_bnb_8bit": "AdamW",
    "adamw_8bit": "AdamW",
    "sgd": "SGD",
}


class KnobWitness:
    """Watches the first forward pass of a model and then reads the rest from the Trainer.

    Args:
        model: what is trained.
        device: `cpu` or `cuda:N`.
        own_optimizer: whether the user's code makes the optimizer, whatever `optim` says.
        effects: watches the extras; None = there are none.
    """

    def __init__(
        self, model: nn.Module, device: str, *, own_optimizer: bool = False, effects: EffectWitness | None = None
    ) -> None:
        self._own_optimizer, self._effects = own_optimizer, effects
        self._device_type = device.partition(":")[0]
        self._looked = False
        self._autocast: str | None = None
        # Any module inside the model: accelerate puts autocast around the model's own `forward`, behind the hooks of the model itself.
        # Not where the model is compiled: the hooks would be compiled too, and again when they are gone.
        compiled = effects is not None and effects.compiled.active
        inner = [module for module in model.modules() if module is not model and not compiled]
        self._handles = [module.register_forward_pre_hook(self._look) for module in inner]

    def _look(self, module: nn.Module, args: Any) -> None:
        on = torch.is_autocast_enabled(self._device_type)
        self._autocast = _name(torch.get_autocast_dtype(self._device_type)) if on else None
        self._looked = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def facts(self, trainer: Trainer, config: TrialConfig, *, built_here: bool) -> dict[str, dict[str, Any]]:
        """`{"asked": {...}, "seen": {...}}`, the same keys in both, values that can be compared.

        Args:
            built_here: whether autofit built the model, and so its weight dtype was ours to choose.
        """
        model = trainer.model
        assert model is not None
        precision = PRECISION_FACTS[config.precision]
        optimizer = _unwrapped(trainer.optimizer)
        asked: dict[str, Any] = {"gradient_checkpointing": config.gradient_checkpointing}
        seen: dict[str, Any] = {"gradient_checkpointing": checkpointing_active(model)}
        if self._looked:
            asked["autocast_dtype"] = precision.autocast_dtype
            seen["autocast_dtype"] = self._autocast
        if built_here:
            asked["weight_dtype"] = precision.weight_dtype
            seen["weight_dtype"] = weight_dtype(model)
        if config.precision in (Precision.FP32, Precision.TF32) and self._device_type == "cuda":
            asked["fp32_matmul"] = precision.fp32_matmul
            seen["fp32_matmul"] = fp32_matmul()
        frozen = any(not p.requires_grad for p in model.parameters())
        if frozen and config.optim in OPTIMIZER_CLASSES and not self._own_optimizer:
            asked["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
            seen["trained_parameters"] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        if config.optim in OPTIMIZER_CLASSES and not self._own_optimizer:
            asked["optimizer"] = OPTIMIZER_CLASSES[config.optim]
            seen["optimizer"] = type(optimizer).__name__
        if config.optim in ("adamw_torch", "adamw_torch_fused") and not self._own_optimizer:
            asked["optimizer_fused"] = config.optim == "adamw_torch_fused"
            seen["optimizer_fused"] = bool(optimizer.defaults.get("fused"))
        if self._effects is not None:
            extra_asked, extra_seen = self._effects.facts(model)
            asked |= extra_asked
            seen |= extra_seen
            if self._effects.compiled.active:
                asked["autocast_dtype"], seen["autocast_dtype"] = precision.autocast_dtype, prepared_autocast(trainer)
        return {"asked": asked, "seen": seen}


def prepared_autocast(trainer: Trainer) -> str | None:
    """The autocast dtype that accelerate put around the model's forward; None where it put none."""
    accelerator = trainer.accelerator
    kinds = {"bf16": "bfloat16", "fp16": "float16"}
    return kinds.get(str(accelerator.mixed_precision)) if accelerator.native_amp else None


def checkpointing_active(model: nn.Module) -> bool:
    """Whether any module of the model recomputes its activations."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the older one warns where the newer exists
    if getattr(model, next((name for name in names if hasattr(type(model), name)), names[0]), False):
        return True
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def fp32_matmul() -> str:
    """`tf32` or `ieee`: how CUDA multiplies fp32 matrices now."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9 and newer
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def weight_dtype(model: nn.Module) -> str:
    """dtype of most of the floating-point parameters, frozen ones included: adapters are float32 on a model in 16 bit."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = _name(parameter.dtype)
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else "none"


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
