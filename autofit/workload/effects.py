"""Proof that the knobs of `--tune` took effect: attention in the modules that ran, checkpointed layers, offloaded activations, foreign kernels.

Made before the training and read after it. `compilation` watches torch.compile.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer
from transformers import modeling_utils as _modeling_utils

from autofit.problem.config import Scalar, TrialConfig
from autofit.workload.compilation import CompileWatch

LIGER = "liger_kernel"


class EffectWitness:
    """Watches a training for what the extras of its configuration did.

    Args:
        trainer: before it trains.
        config: what was asked for.
    """

    def __init__(self, trainer: Trainer, config: TrialConfig) -> None:
        self._asked = dict(config.extra)
        self.compiled = CompileWatch(active=bool(getattr(trainer.args, "torch_compile", False)))
        self._called: set[str] = set()
        self._offloaded = 0
        self._handles: list[Any] = []
        if "attn_implementation" in self._asked and not self.compiled.active:  # a hook would be compiled too
            self._watch_attention(trainer.model)
        if self._asked.get("offload"):
            self._count_offloads()

    def facts(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """(asked, seen), the same keys in both."""
        asked: dict[str, Scalar] = {}
        seen: dict[str, Scalar] = {}
        for name, value in self._asked.items():
            found = self._seen(name, model)
            if found is not None:
                asked[name], seen[name] = value, found
        return asked, seen

    def _seen(self, name: str, model: nn.Module) -> Scalar:
        """What the run had of one extra; None where nothing is looked at."""
        if name == "attn_implementation":
            return self._attention(model)
        if name == "every_n_layers":
            return checkpointed_every(model)
        if name == "offload":
            return self._offloaded > 0
        if name == "use_liger_kernel":
            return runs_liger(model)
        if name == "torch_compile":
            return self.compiled.graphs > 0
        return None

    def _attention(self, model: nn.Module) -> str:
        """What the config says and what the attention modules that ran had; both where they differ."""
        configured = getattr(getattr(model, "config", None), "_attn_implementation", None)
        return ", ".join(sorted({str(configured), *self._called}))

    def _watch_attention(self, model: nn.Module | None) -> None:
        for module in [] if model is None else model.modules():
            if "attention" in type(module).__name__.lower() and hasattr(
                getattr(module, "config", None), "_attn_implementation"
            ):
                self._handles.append(module.register_forward_pre_hook(self._note_attention))

    def _note_attention(self, module: nn.Module, args: Any) -> None:
        self._called.add(str(module.config._attn_implementation))  # type: ignore[union-attr]

    def busy(self) -> bool:
        """Asked after each step: whether it compiled something, and is no sample of speed. The first takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self.compiled.busy()

    def _count_offloads(self) -> None:
        """Count the entries into the context that moves saved tensors to the host."""
        modeling_utils: Any = _modeling_utils
        original = modeling_utils.save_on_cpu
        witness = self

        class Counted(original):  # type: ignore[misc,valid-type]
            def __enter__(self) -> Any:
                witness._offloaded += 1
                return super().__enter__()

        modeling_utils.save_on_cpu = Counted  # this process is the trial's own


def checkpointed_every(model: nn.Module) -> int | None:
    """The `n` for which exactly every n-th layer recomputes its activations; 0 when the pattern is another; None without such layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    flags = [m.gradient_checkpointing is True for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not flags:
        return None
    for every in range(1, len(flags) + 1):
        if flags == [index % every == 0 for index in range(len(flags))]:
            return every
    return 0


def runs_liger(model: nn.Module) -> bool:
    """Whether any module's forward is one of Liger's."""
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        if LIGER in (type(module).__module__.partition(".")[0], str(getattr(forward, "__module__", "")).partition(".")[0]):
            return True
    return False
