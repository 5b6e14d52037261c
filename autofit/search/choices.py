"""What a search may choose from: the space that the spec allows on a device, or in a recorded grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autofit.devices.device import Device
from autofit.errors import UserError
from autofit.problem.arguments import KNOWN_DEFAULTS
from autofit.problem.capabilities import Capabilities, optim_problem, precision_problem
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import widen
from autofit.problem.numerics import changes, optim_change, precision_change
from autofit.problem.space import Removal, Space, build_space, default_precisions
from autofit.problem.spec import SearchSpec
from autofit.trials.landscape import Landscape


def space_of(spec: SearchSpec, facts: Mapping[str, Any]) -> Space:
    """Every configuration that `spec` allows and the device of `facts` can run.

    Raises:
        UserError: a named choice is impossible here, or nothing is left.
    """
    capabilities = capabilities_of(facts)
    wider = widen(
        spec.tune,
        capabilities,
        precisions=spec.precisions,
        default_precisions=tuple(p for p in default_precisions(capabilities) if precision_problem(p, capabilities) is None),
        checkpointing=spec.checkpointing,
    )
    space = build_space(
        effective_batch=spec.effective_batch,
        capabilities=capabilities,
        precisions=wider.precisions,
        extras=wider.extras,
        optims=_optims(spec, facts),
        checkpointing=spec.checkpointing,
        batch_sizes=spec.batch_sizes,
        keep_numerics=spec.keep_numerics,
        reference_optim=reference_optim(spec, facts),
    )
    return replace(_without_hidden_tf32(space, capabilities), notes=(*space.notes, *wider.notes))


def _without_hidden_tf32(space: Space, capabilities: Capabilities) -> Space:
    """Compiled fp32 is tf32 on a card that has it: transformers and accelerate switch it on, whatever `tf32` says."""
    if capabilities.device_kind != "cuda" or Precision.TF32 not in capabilities.precisions:
        return space
    hidden = {c for c in space.configs if c.precision is Precision.FP32 and dict(c.extra).get("torch_compile")}
    if not hidden:
        return space
    reason = "transformers and accelerate switch tf32 on for compiled models: it is searched as tf32"
    removal = Removal(knob="torch_compile", value="in fp32", reason=reason)
    kept = tuple(c for c in space.configs if c not in hidden)
    return Space(configs=kept, removals=(*space.removals, removal), notes=space.notes)


def reference_optim(spec: SearchSpec, facts: Mapping[str, Any]) -> str:
    """The optimizer whose mathematics is the user's: of their arguments or script, else the library's default."""
    default = (facts.get("argument_defaults") or KNOWN_DEFAULTS).get("optim") or KNOWN_DEFAULTS["optim"]
    script = (facts.get("model") or {}).get("script") or {}
    named = str(spec.reference_optim or (script.get("own") or {}).get("optim") or default)
    if own_optimizer(facts) and optim_problem(named, capabilities_of(facts)) is not None:  # its code need not look at `optim`
        return str(default)
    return named


def own_optimizer(facts: Mapping[str, Any]) -> bool:
    """Whether the user's script or Trainer makes its own optimizer, whatever `optim` says."""
    model = facts.get("model") or {}
    return bool(model.get("own_optimizer") or (model.get("script") or {}).get("own_optimizer"))


def _optims(spec: SearchSpec, facts: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The optimizers that may be searched: where the training makes its own, the one that its arguments name anyway."""
    if not own_optimizer(facts):
        return spec.optims
    if spec.optims is not None:
        who = "script" if spec.workload.script is not None else "Trainer"
        raise UserError(f"the {who} makes its own optimizer: optim has no effect", hint="leave --optim (optim=) out")
    return (reference_optim(spec, facts),)


def capabilities_of(facts: Mapping[str, Any]) -> Capabilities:
    """Capabilities from a child's answer to `describe`."""
    model = facts.get("model") or {}
    device = Device.from_json(facts["device"])
    return Capabilities(
        device_kind=device.kind,
        precisions=device.precisions,
        optims=tuple(facts["optims"]),
        missing_packages=facts["missing_packages"],
        supports_checkpointing=bool(model.get("supports_gradient_checkpointing", True)),
        model_name=str(model.get("class", "the model")),
        weights_dtype=model.get("weights_dtype"),
        quantization=model.get("quantization"),
        adapter=model.get("adapter"),
        extras=model.get("extras") or {},
    )


def recorded_space(spec: SearchSpec, landscape: Landscape) -> Space:
    """The part of a recorded grid that `spec` allows."""
    wanted = [p.config for p in landscape.points if _wanted(p.config, spec)]
    if not spec.keep_numerics:
        return Space(configs=tuple(wanted))
    reference = reference_optim(spec, {})
    kept = tuple(c for c in wanted if not changes(c, reference=reference))
    removals: dict[tuple[str, str], Removal] = {}
    for optim in dict.fromkeys(c.optim for c in wanted):
        reason = optim_change(optim, reference)
        if reason is not None:
            removals["optim", optim] = Removal(knob="optim", value=optim, reason=reason)
    for precision in dict.fromkeys(c.precision for c in wanted):
        reason = precision_change(precision, None)
        if reason is not None:
            removals["precision", precision] = Removal(knob="precision", value=precision, reason=reason)
    return Space(configs=kept, removals=tuple(removals.values()))


def _wanted(config: TrialConfig, spec: SearchSpec) -> bool:
    return (
        (spec.precisions is None or config.precision in spec.precisions)
        and (spec.optims is None or config.optim in spec.optims)
        and (spec.checkpointing is None or config.gradient_checkpointing in spec.checkpointing)
        and (spec.batch_sizes is None or config.per_device_train_batch_size in spec.batch_sizes)
    )
