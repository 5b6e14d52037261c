"""Which choices leave the mathematics of training as it is, and why the others do not. Pure.

The mathematics of a training is its update rule in exact arithmetic: loss, gradient, and what the optimizer makes of it, with weights and
optimizer state kept in the precision in which the user keeps them. So

- another optimizer *algorithm* changes it, and so does state that is stored in 8 or 4 bits: it is quantised at every step and fed back;
- `pure_bf16` changes it: weights and moments are rounded to 8 bits of significand, and updates below half a unit in the last place are lost;
- tf32, bf16 and fp16 under autocast do not: they round single matrix products, while weights, their gradients' sum, the moments and the update
  stay in fp32 (whether that rounding is harmless for a model is another question, which `soundness` asks of a run);
- batch against accumulation, checkpointing, attention kernels, compilation and fused kernels do not: they compute the same function
  in another order (whether a model's loss keeps its promise over a split is asked of a run as well).

The reference is the optimizer that the user asks for in their own arguments or script, else the library's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.problem.config import Precision, TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An update rule: optimizers that share it differ in kernels only.

    Attributes:
        name: as people say it.
        against_adamw: what it does otherwise than AdamW with fp32 state; empty for AdamW itself.
        optims: `TrainingArguments(optim=...)` names that follow it.
    """

    name: str
    against_adamw: str
    optims: tuple[str, ...]


ADAMW = Rule(
    name="AdamW",
    against_adamw="",
    optims=(
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_apex_fused",
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "paged_adamw",
        "paged_adamw_32bit",
    ),
)
RULES: tuple[Rule, ...] = (
    ADAMW,
    Rule(
        name="AdamW in 8 bit",
        against_adamw="its moments are quantised to 8 bits in blocks at every step",
        optims=("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
    ),
    Rule(
        name="AdamW of torchao in 8 bit",
        against_adamw="its moments are quantised to 8 bits at every step",
        optims=("adamw_torch_8bit",),
    ),
    Rule(
        name="AdamW of torchao in 4 bit",
        against_adamw="its moments are quantised to 4 bits at every step",
        optims=("adamw_torch_4bit",),
    ),
    Rule(
        name="AnyPrecision AdamW",
        against_adamw="optim_args decide how far its state is rounded, and are not read here",
        optims=("adamw_anyprecision",),
    ),
    Rule(
        name="Adafactor",
        against_adamw="its second moment is factored into rows and columns, there is no first moment, and updates are clipped",
        optims=("adafactor",),
    ),
    Rule(
        name="AdEMAMix", against_adamw="it adds a second, slow momentum", optims=("ademamix", "paged_ademamix_32bit")
    ),
    Rule(
        name="AdEMAMix in 8 bit",
        against_adamw="it adds a second, slow momentum, and state is quantised to 8 bits",
        optims=("ademamix_8bit", "paged_ademamix_8bit"),
    ),
    Rule(
        name="Lion",
        against_adamw="it steps by the sign of the momentum: every weight moves by the learning rate",
        optims=("lion", "lion_32bit", "paged_lion", "paged_lion_32bit"),
    ),
    Rule(
        name="Lion in 8 bit",
        against_adamw="it steps by the sign of a momentum that is quantised to 8 bits",
        optims=("lion_8bit", "paged_lion_8bit"),
    ),
    Rule(name="SGD", against_adamw="it has neither moments nor a step size for each weight", optims=("sgd",)),
    Rule(
        name="Adagrad",
        against_adamw="its step sizes only shrink, and it has no momentum",
        optims=("adagrad",),
    ),
    Rule(name="RMSprop", against_adamw="it has no momentum and no correction of the first steps", optims=("rmsprop",)),
    Rule(
        name="RMSprop of bitsandbytes",
        against_adamw="it has no momentum and no correction of the first steps",
        optims=("rmsprop_bnb", "rmsprop_bnb_32bit"),
    ),
    Rule(
        name="RMSprop in 8 bit",
        against_adamw="it has no momentum, and state is quantised to 8 bits",
        optims=("rmsprop_bnb_8bit",),
    ),
    Rule(
        name="GaLore",
        against_adamw="gradients are projected to a low rank before the update",
        optims=("galore_adamw", "galore_adamw_layerwise"),
    ),
    Rule(
        name="GaLore in 8 bit",
        against_adamw="gradients are projected to a low rank, and state is quantised to 8 bits",
        optims=("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
    ),
    Rule(
        name="GaLore with Adafactor",
        against_adamw="gradients are projected to a low rank, and the second moment is factored",
        optims=("galore_adafactor", "galore_adafactor_layerwise"),
    ),
    Rule(
        name="APOLLO",
        against_adamw="step sizes come from a random projection of low rank",
        optims=("apollo_adamw", "apollo_adamw_layerwise"),
    ),
    Rule(
        name="LOMO", against_adamw="it is SGD without state, applied while gradients are computed", optims=("lomo",)
    ),
    Rule(
        name="AdaLOMO", against_adamw="its second moment is factored, and it is applied during backward", optims=("adalomo",)
    ),
    Rule(name="GrokAdamW", against_adamw="it amplifies slow gradients", optims=("grokadamw",)),
    Rule(
        name="StableAdamW",
        against_adamw="updates are clipped by their own size instead of the gradient's",
        optims=("stable_adamw",),
    ),
    Rule(
        name="schedule-free AdamW",
        against_adamw="it averages weights in the place of a schedule",
        optims=("schedule_free_adamw",),
    ),
    Rule(
        name="schedule-free RAdam",
        against_adamw="it averages weights in the place of a schedule, and rectifies the first steps",
        optims=("schedule_free_radam",),
    ),
    Rule(
        name="schedule-free SGD",
        against_adamw="it averages weights in the place of a schedule, and has no step size for each weight",
        optims=("schedule_free_sgd",),
    ),
)  # fmt: skip
_RULE_OF: Mapping[str, Rule] = {optim: rule for rule in RULES for optim in rule.optims}
LOSSY_WEIGHTS = "weights and optimizer state are rounded to bf16, without an fp32 copy: small updates are lost"
ROUNDED_BASE = "the frozen weights are rounded to bf16; the adapter and its updates stay in float32"


def rule_of(optim: str) -> Rule:
    """The update rule behind a name; an unknown name is a rule of its own."""
    return _RULE_OF.get(optim) or Rule(name=optim, against_adamw="autofit does not know its update rule", optims=(optim,))


def optim_change(optim: str, reference: str) -> str | None:
    """How training with `optim` is another than with `reference`; None when it is the same algorithm."""
    own, other = rule_of(optim), rule_of(reference)
    if own == other:
        return None
    if other == ADAMW:
        return f"trains otherwise than {reference}: {own.against_adamw}"
    return f"trains by {own.name}, not by {other.name} as {reference} does"


def precision_change(precision: Precision, weights_dtype: str | None, *, adapter: bool = False) -> str | None:
    """How training in `precision` is another; None when it only rounds what is computed in between.

    Args:
        precision: asked for.
        weights_dtype: of the user's own model; None where autofit builds it (float32). Weights that are bf16 already stay as they are.
        adapter: whether an adapter is trained, which stays in float32, and the weights are only read.
    """
    lossy = precision is Precision.PURE_BF16 and weights_dtype in (None, "float32")
    return (ROUNDED_BASE if adapter else LOSSY_WEIGHTS) if lossy else None


def changes(
    config: TrialConfig, *, reference: str, weights_dtype: str | None = None, adapter: bool = False
) -> tuple[str, ...]:
    """Every way in which `config` changes the mathematics; empty when it keeps it."""
    optim = optim_change(config.optim, reference)
    found = (None if optim is None else f"{config.optim} {optim}", precision_change(config.precision, weights_dtype, adapter=adapter))
    return tuple(reason for reason in found if reason is not None)


def named_optim(arguments: Any) -> str | None:
    """The optimizer that the user's own TrainingArguments name; None without arguments."""
    optim = getattr(arguments, "optim", None)
    return None if optim is None else str(getattr(optim, "value", optim))
