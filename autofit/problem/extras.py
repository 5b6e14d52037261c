"""What `--tune` adds to the space: further knobs, each with the reason why it cannot be used where it cannot. Pure.

    attn             attention implementations that the model's class and this machine have beside the default one
    compile          torch_compile
    liger            use_liger_kernel
    every_n_layers   checkpoint only every 2nd or 4th layer
    offload          keep checkpoints in pinned host memory
    pure_bf16        weights and optimizer state in bf16, without an fp32 copy

A configuration that leaves such a knob at its default does not name it, so that the plain space is a part of the wider one. What the knobs are worth is
measured; what is believed before the first trial are the wide priors below, as natural logarithms with their standard deviation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.errors import UserError
from autofit.problem.arguments import CHECKPOINTING_EXTRAS
from autofit.problem.capabilities import Capabilities, precision_problem
from autofit.problem.config import PRECISION_FACTS, Precision, Scalar, TrialConfig

KNOBS = ("attn", "compile", "liger", "every_n_layers", "offload", "pure_bf16")
OF_CHECKPOINTING = ("every_n_layers", "offload")
ARGUMENTS: Mapping[str, str] = {
    "attn": "attn_implementation",
    "compile": "torch_compile",
    "liger": "use_liger_kernel",
    "every_n_layers": "every_n_layers",
    "offload": "offload",
}  #: knob -> name in `TrialConfig.extra`
TRACED = ("attn_implementation", "every_n_layers", "use_reentrant")  #: in `TrialConfig.extra`: what a trace of memory and work can show
SIXTEEN_BIT_ATTENTION = ("flash_attention_2", "flash_attention_3")

Pair = tuple[str, Scalar]
Prior = tuple[float, float]
_UNKNOWN_TIME: Prior = (0.0, 0.2)
_UNKNOWN_MEMORY: Prior = (0.0, 0.25)
_TIME: Mapping[Pair, Prior] = {
    ("torch_compile", True): (-0.2, 0.25),  # fused kernels: from nothing to twice as fast
    ("use_liger_kernel", True): (-0.1, 0.15),
    ("offload", True): (0.2, 0.2),  # two copies over the bus in every micro-step
    ("attn_implementation", "eager"): (0.1, 0.2),  # the scores are written out and read again
}
_MEMORY: Mapping[Pair, Prior] = {
    ("torch_compile", True): (-0.15, 0.25),
    ("use_liger_kernel", True): (-0.3, 0.35),
    ("offload", True): (-0.5, 0.5),
    ("attn_implementation", "eager"): (0.3, 0.3),
}
_CHECKPOINTED_SHARE = 0.2  #: of the activations, that checkpointing leaves (as `learned_memory` believes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """What the space is widened by.

    Attributes:
        extras: alternatives for `TrialConfig.extra`, the plainest first.
        precisions: as asked, with `pure_bf16` where it is wanted; None = the default ones.
        notes: sentences for the user.
    """

    extras: tuple[tuple[Pair, ...], ...] = ((),)
    precisions: tuple[Precision, ...] | None = None
    notes: tuple[str, ...] = ()


def parse_tune(names: Sequence[str] | str | None) -> tuple[str, ...]:
    """Knobs from names (or one string with commas); none where nothing is given.

    Raises:
        UserError: an unknown name.
    """
    if names is None:
        return ()
    if not isinstance(names, Collection) or isinstance(names, bytes):
        raise UserError(f"--tune takes names, got {names!r}", hint=f"choose from {', '.join(KNOBS)}")
    wanted = [str(name).strip() for name in (names.split(",") if isinstance(names, str) else names)]
    for name in wanted:
        if name not in KNOBS:
            raise UserError(f"--tune does not know {name!r}", hint=f"choose from {', '.join(KNOBS)}")
    return tuple(dict.fromkeys(wanted))


def widen(
    tune: Sequence[str],
    capabilities: Capabilities,
    *,
    precisions: Sequence[Precision] | None,
    default_precisions: Sequence[Precision],
    checkpointing: Sequence[bool] | None,
) -> Widening:
    """Return what `tune` adds to the space.

    Args:
        tune: knobs, see `KNOBS`.
        capabilities: with what the child found out about them.
        precisions: the user's restriction; None = the default ones.
        default_precisions: what those are.
        checkpointing: the user's restriction.

    Raises:
        UserError: a knob cannot be used here; the message is the reason.
    """
    asked = None if precisions is None else tuple(precisions)
    notes = []
    for knob in tune:
        reason = problem(knob, capabilities, checkpointing)
        if reason is not None:
            raise UserError(f"--tune {knob} cannot be used: {reason}", hint=f"leave {knob} out of --tune")
    if "pure_bf16" in tune:
        wanted = default_precisions if asked is None else asked
        asked = tuple(dict.fromkeys((*wanted, Precision.PURE_BF16)))
    if "compile" in tune:
        notes.append(
            "memory of compiled models is not predicted: it is learned from their trials; compile time counts as cost of the search"
        )
    alternatives = [_alternatives(knob, capabilities.extras) for knob in tune if knob in ARGUMENTS]
    extras = [tuple(sorted(itertools.chain(*chosen))) for chosen in itertools.product(*alternatives)]
    extras.sort(key=len)
    return Widening(extras=tuple(extras), precisions=asked, notes=tuple(notes))


def problem(knob: str, capabilities: Capabilities, checkpointing: Sequence[bool] | None) -> str | None:
    """Why `knob` cannot be used; None when it can."""
    if knob == "pure_bf16":
        return precision_problem(Precision.PURE_BF16, capabilities)
    if knob in OF_CHECKPOINTING and checkpointing is not None and True not in checkpointing:
        return "it is a way of checkpointing, and --checkpointing off excludes that"
    found: Mapping[str, Any] | None = capabilities.extras.get(knob)
    if found is None:
        return "nothing is known about it here"
    reason = found.get("problem")
    return None if reason is None else str(reason)


def makes_sense(config: TrialConfig) -> bool:
    """Whether the knobs of `config` can go together."""
    extra = dict(config.extra)
    if not config.gradient_checkpointing and any(name in CHECKPOINTING_EXTRAS for name in extra):
        return False
    facts = PRECISION_FACTS[config.precision]
    sixteen = facts.autocast_dtype is not None or facts.weight_dtype != "float32"
    return sixteen or extra.get("attn_implementation") not in SIXTEEN_BIT_ATTENTION


def time_prior(pair: Pair) -> Prior:
    """Belief about the log factor of a knob's value on the time of a micro-step."""
    name, value = pair
    if name == "every_n_layers" and isinstance(value, int):
        # Recomputation costs a third of the plain step; of it, 1/n is left.
        return math.log((1 + 1 / (3 * value)) / (1 + 1 / 3)), 0.08
    return _TIME.get(pair, _UNKNOWN_TIME)


def memory_prior(pair: Pair) -> Prior:
    """Belief about the log factor of a knob's value on what a sample keeps for backward."""
    name, value = pair
    if name == "every_n_layers" and isinstance(value, int):
        kept = _CHECKPOINTED_SHARE / value + (1 - 1 / value)
        return math.log(kept / _CHECKPOINTED_SHARE), 0.4
    return _MEMORY.get(pair, _UNKNOWN_MEMORY)


def keeps_no_less(config: TrialConfig, other: TrialConfig) -> bool:
    """Whether `config` keeps at least as many activations as `other` by construction, as far as checkpointing and other extras decide.

    Without checkpointing everything is kept, whatever the way of checkpointing it is compared with. Ways of checkpointing are not ordered: a traced
    encoder of two layers needs 2 % less when only the first is checkpointed, because the last is recomputed at the moment of its peak.
    """
    if config.gradient_checkpointing:
        return other.gradient_checkpointing and config.extra == other.extra
    return _beside_checkpointing(config) == _beside_checkpointing(other)


def _beside_checkpointing(config: TrialConfig) -> tuple[Pair, ...]:
    return tuple(pair for pair in config.extra if pair[0] not in CHECKPOINTING_EXTRAS)


def _alternatives(knob: str, facts: Mapping[str, Any]) -> list[tuple[Pair, ...]]:
    """The default (which names nothing), then each other value."""
    found = facts[knob]
    values = [v for v in found.get("values", (True,)) if v != found.get("default")]
    return [(), *(((ARGUMENTS[knob], value),) for value in values)]
