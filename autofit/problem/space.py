"""The search space: every configuration that multiplies out exactly and that this machine can run.

Batch sizes are divisors only (`divisors(effective_batch / world_size)`), never rounded; accumulation follows. Multiples of 8 (tensor cores work
on tiles of 8 in 16 bit) come first in order, but every divisor stays legal: published winners were 93, 14 and 3 as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autofit.errors import UserError
from autofit.problem.capabilities import OPTIM_PACKAGES as OPTIM_PACKAGES
from autofit.problem.capabilities import Capabilities as Capabilities
from autofit.problem.capabilities import checkpointing_problem as checkpointing_problem
from autofit.problem.capabilities import optim_problem as optim_problem
from autofit.problem.capabilities import precision_problem as precision_problem
from autofit.problem.config import PRECISION_FACTS, Precision, Scalar, TrialConfig
from autofit.problem.extras import makes_sense
from autofit.problem.numerics import optim_change, precision_change

T = TypeVar("T")
GEMM_GRANULARITY = 8
DEFAULT_OPTIMS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit")
DEFAULT_PRECISIONS = (Precision.BF16, Precision.FP16, Precision.TF32, Precision.FP32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A choice that was taken out of the space: `knob` (a field of TrialConfig), the value, and why."""

    knob: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All legal configurations, most conventional first.

    Attributes:
        configs: no two equal, all with the exact product.
        removals: what is not in it, and why.
        notes: sentences for the user.
    """

    configs: tuple[TrialConfig, ...]
    removals: tuple[Removal, ...] = ()
    notes: tuple[str, ...] = ()
    _extras: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)
    _by_params: dict[str, TrialConfig] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.configs:
            raise UserError(
                "the space is empty: no configuration is left",
                hint="loosen --precision, --optim, --checkpointing or --batch-size",
            )
        names = dict.fromkeys(name for config in self.configs for name, _ in config.extra)
        object.__setattr__(self, "_extras", tuple(names))
        self._by_params.update((_params_key(self.params_of(config)), config) for config in self.configs)

    def __len__(self) -> int:
        return len(self.configs)

    def __contains__(self, config: object) -> bool:
        return (
            isinstance(config, TrialConfig)
            and self._by_params.get(_params_key(self.params_of(config))) == config
        )

    def choices(self) -> dict[str, tuple[Scalar, ...]]:
        """Parameter name -> its values in order of first appearance; extras under their own names."""
        found: dict[str, dict[Scalar, None]] = {}
        for config in self.configs:
            for name, value in self.params_of(config).items():
                found.setdefault(name, {}).setdefault(value, None)
        return {name: tuple(values) for name, values in found.items()}

    def params_of(self, config: TrialConfig) -> dict[str, Scalar]:
        """The configuration as Optuna parameters: accumulation is derived, so it is not one; an extra that only others have is None."""
        params = {**dict.fromkeys(self._extras), **config.to_json()}
        del params["gradient_accumulation_steps"]
        return params

    def config_of(self, params: Mapping[str, Scalar]) -> TrialConfig | None:
        """The legal configuration with these parameters; None when the combination is not in the space."""
        return self._by_params.get(_params_key(params))


def _params_key(params: Mapping[str, Scalar]) -> str:
    return json.dumps(params, sort_keys=True)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number` (>= 1), ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def preferred_order(sizes: Iterable[int]) -> tuple[int, ...]:
    """Multiples of the GEMM granularity first, each part ascending."""
    return tuple(sorted(sizes, key=lambda size: (size % GEMM_GRANULARITY != 0, size)))


def default_precisions(capabilities: Capabilities) -> tuple[Precision, ...]:
    """What is searched unless the user says otherwise: for a model whose weights are bf16 already also what it trains in when nothing is asked for."""
    stored = capabilities.weights_dtype == PRECISION_FACTS[Precision.PURE_BF16].weight_dtype
    return (*DEFAULT_PRECISIONS, Precision.PURE_BF16) if stored else DEFAULT_PRECISIONS


def build_space(
    *,
    effective_batch: int,
    capabilities: Capabilities,
    precisions: Sequence[Precision] | None = None,
    optims: Sequence[str] | None = None,
    checkpointing: Sequence[bool] | None = None,
    batch_sizes: Sequence[int] | None = None,
    extras: Sequence[tuple[tuple[str, Scalar], ...]] = ((),),
    keep_numerics: bool = False,
    reference_optim: str | None = None,
    world_size: int = 1,
) -> Space:
    """Return the space for this device and model.

    A choice that the user named and that cannot run is an error; a default choice that cannot run is removed with its reason.

    Args:
        effective_batch: samples per optimizer step over all devices.
        precisions, optims, checkpointing, batch_sizes: the user's restrictions; None = the defaults.
        extras: alternatives for further keywords; one empty alternative = none. Those of checkpointing go with checkpointing only.
        keep_numerics: whether choices that change the mathematics of training are taken out (see `numerics`).
        reference_optim: the user's own optimizer: it is searched with the default ones, and what others are compared with.
        world_size: devices that share the effective batch.

    Raises:
        UserError: a named choice is impossible here, or nothing is left.
    """
    if effective_batch % world_size:
        raise UserError(f"effective batch {effective_batch} is not a multiple of {world_size} devices")
    per_device = effective_batch // world_size
    removals: list[Removal] = []
    sizes = _batch_sizes(per_device, batch_sizes)
    reference = reference_optim or DEFAULT_OPTIMS[0]
    dtype = capabilities.weights_dtype

    def precision_changes(precision: Precision) -> str | None:
        return precision_change(precision, dtype, adapter=capabilities.adapter is not None) if keep_numerics else None

    def optim_changes(optim: str) -> str | None:
        return optim_change(optim, reference) if keep_numerics else None

    own = () if reference in DEFAULT_OPTIMS else (reference,)
    kept_precisions = _kept("precision", precisions, default_precisions(capabilities), lambda p: precision_problem(p, capabilities), removals, precision_changes)
    kept_optims = _kept("optim", optims, (*DEFAULT_OPTIMS, *own), lambda o: optim_problem(o, capabilities), removals, optim_changes)
    kept_ckpt = _kept(
        "gradient_checkpointing",
        checkpointing,
        (False, True),
        lambda c: checkpointing_problem(bool(c), capabilities),
        removals,
    )
    configs = tuple(
        config
        for ckpt in kept_ckpt
        for precision in kept_precisions
        for optim in kept_optims
        for extra in extras
        for size in sizes
        if makes_sense(config := _config(size, per_device, ckpt, precision, optim, extra))
    )
    return Space(
        configs=configs,
        removals=tuple(removals),
        notes=_granularity_note(per_device, sizes) if batch_sizes is None else (),
    )


def _config(
    size: int, per_device: int, checkpointing: bool, precision: Precision, optim: str, extra: tuple[tuple[str, Scalar], ...]
) -> TrialConfig:
    return TrialConfig(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=per_device // size,
        gradient_checkpointing=bool(checkpointing),
        precision=Precision(precision),
        optim=str(optim),
        extra=extra,
    )


def _granularity_note(per_device: int, sizes: Sequence[int]) -> tuple[str, ...]:
    """A sentence where no batch size suits tensor cores although the effective batch is large enough for one."""
    if per_device < GEMM_GRANULARITY or any(size % GEMM_GRANULARITY == 0 for size in sizes):
        return ()
    return (
        f"{per_device} has no divisor that is a multiple of {GEMM_GRANULARITY}: tensor cores prefer such batch sizes; all divisors are searched",
    )


def _batch_sizes(per_device: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    legal = divisors(per_device)
    if asked is None:
        return preferred_order(legal)
    for size in asked:
        if size not in legal:
            near = sorted(legal, key=lambda d: abs(d - size))[:3]
            raise UserError(
                f"batch size {size} does not divide the effective batch {per_device} exactly",
                hint=f"nearest that do: {', '.join(map(str, sorted(near)))}",
            )
    return preferred_order(dict.fromkeys(asked))


def _kept(
    knob: str,
    asked: Sequence[T] | None,
    defaults: Sequence[T],
    problem: Callable[[T], str | None],
    removals: list[Removal],
    changes: Callable[[T], str | None] = lambda value: None,
) -> list[T]:
    """Choices of one knob that can run, and may; fills `removals`, raises for a choice that the user named."""
    kept = []
    for value in dict.fromkeys(defaults if asked is None else asked):
        trouble, changed = problem(value), changes(value)
        reason = trouble or changed
        if reason is None:
            kept.append(value)
        elif asked is not None and trouble is None:
            raise UserError(f"{knob} {value} is not for --keep-numerics: {reason}", hint=f"leave {value} out, or --keep-numerics (keep_numerics)")
        elif asked is not None:
            raise UserError(f"{knob} {value} cannot be used: {reason}", hint=_knob_hint(knob))
        else:
            removals.append(Removal(knob=knob, value=str(value), reason=reason))
    return kept


def _knob_hint(knob: str) -> str:
    return (
        "autofit doctor lists what this machine can search"
        if knob != "optim"
        else "autofit doctor lists the optimizers that work here"
    )
