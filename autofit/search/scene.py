"""Where a search takes place: a runner, a device, a space, and what can be predicted; on the real device or on a recorded one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.devices import nvml
from autofit.devices.device import Device
from autofit.errors import NothingFits, UserError, WorkerError
from autofit.forecasts.estimation import asking
from autofit.forecasts.prediction import PATIENCE_SECONDS, Predictor, capability_of, predictor_for
from autofit.problem.adaptation import Adaptation, refuse_on_device
from autofit.problem.arguments import KNOWN_DEFAULTS
from autofit.problem.script_command import shown, without_secrets
from autofit.problem.space import Space
from autofit.problem.spec import SearchSpec, Workload
from autofit.processes.process import DEFAULT_TRIAL_TIMEOUT_SECONDS, ProcessRunner
from autofit.processes.protocol import Kind
from autofit.results.result import Warning
from autofit.search.choices import capabilities_of as capabilities_of
from autofit.search.choices import own_optimizer, recorded_space
from autofit.search.choices import reference_optim as reference_optim
from autofit.search.choices import space_of as space_of
from autofit.trials.landscape import ENFORCED, Landscape
from autofit.trials.observer import Observer
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import Runner
from autofit.units import format_bytes

PREDICTING_SHARE = 0.25  #: of the time budget that traces may use
REPLAY_PATIENCE_SECONDS = 10.0  #: for traces before a replay, whose own trials cost nothing; what was traced is kept for the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a search takes place: everything but the search.

    Attributes:
        runner: runs the trials.
        device: what they run on.
        space: what may run.
        facts: a child's answer to `describe`, or what a landscape says of itself.
        predictor: limit -> forecasts of memory and time; None = nothing is predicted.
        warnings: what is known to be worth a word already.
        replayed: whether a landscape stands for the device.
        ceiling_bytes: memory limit that a landscape was recorded under; None = none.
        starting_seconds: spent on imports and on describing device and model.
        predicting_seconds: spent on traces before the first trial.
    """

    runner: Runner
    device: Device
    space: Space
    facts: Mapping[str, Any]
    predictor: Predictor | None = None
    warnings: tuple[Warning, ...] = ()
    replayed: bool = False
    ceiling_bytes: int | None = None
    argument_defaults: Mapping[str, Any] = field(default_factory=dict)
    starting_seconds: float = 0.0
    predicting_seconds: float = 0.0

    @property
    def weights_dtype(self) -> str | None:
        """Of the model as it was described; None of a recorded one."""
        return (self.facts.get("model") or {}).get("weights_dtype")

    @property
    def default_optim(self) -> str:
        """The optimizer that TrainingArguments would use by itself; where the training makes its own, the only one that is searched."""
        if own_optimizer(self.facts):
            return self.space.configs[0].optim
        return str(self.argument_defaults.get("optim") or KNOWN_DEFAULTS["optim"])


@contextlib.contextmanager
def real_scene(spec: SearchSpec, observer: Observer, *, predict: bool) -> Iterator[Scene]:
    """The device that `spec` names, with a runner on it.

    Raises:
        UserError: device, model or a named choice cannot be used.
        WorkerError: the libraries cannot be imported.
    """
    begin, name = time.monotonic(), choose_device(spec.device)
    if predict and spec.workload.script is not None:
        observer.note("memory and time of a script are not predicted: they are learned from its trials")
        predict = False
    with ProcessRunner(spec.workload, name) as runner:
        facts = runner.describe()
        device = Device.from_json(facts["device"])
        runner.context_bytes = device.context_bytes
        model = facts["model"]
        refuse_on_device(spec.workload.adaptation, device.kind, model.get("quantises_on"))
        space = space_of(spec, facts)
        started = time.monotonic()
        predictor = (
            None
            if not predict
            else predictor_for(
                device=device,
                workload=spec.workload,
                facts=model,
                space=space,
                ask=lambda payload: runner.ask(Kind.ESTIMATE, payload, timeout=DEFAULT_TRIAL_TIMEOUT_SECONDS),
                say=observer.note,
                patience_seconds=_patience(spec),
            )
        )
        yield Scene(
            runner=runner,
            device=device,
            space=space,
            facts=facts,
            predictor=predictor,
            warnings=tuple(Warning(code="model", message=text) for text in model["warnings"]),
            argument_defaults=facts["argument_defaults"],
            starting_seconds=started - begin,
            predicting_seconds=time.monotonic() - started,
        )


def _patience(spec: SearchSpec) -> float:
    """Seconds for traces: they count in the time budget, and most of that is for trials."""
    return PATIENCE_SECONDS if spec.timeout_seconds is None else min(PATIENCE_SECONDS, PREDICTING_SHARE * spec.timeout_seconds)


@contextlib.contextmanager
def replayed_scene(
    spec: SearchSpec, landscape: Landscape, observer: Observer, *, predict: bool
) -> Iterator[Scene]:
    """The landscape as a device; `spec` restricts its grid.

    Raises:
        UserError: another effective batch than the landscape's, or nothing of its grid is wanted.
    """
    if spec.effective_batch != landscape.effective_batch:
        raise UserError(
            f"the landscape was recorded at effective batch {landscape.effective_batch}, not {spec.effective_batch}",
            hint=f"use --effective-batch {landscape.effective_batch}",
        )
    space = recorded_space(spec, landscape)
    precisions = tuple(dict.fromkeys(c.precision for c in space.configs))
    described = {k: v for k, v in landscape.spec.items() if k in ("model", "task", "seq_len")}
    facts = {"software": dict(landscape.software), "model": described, "landscape": landscape.digest()}
    foreign = {name: None for config in space.configs for name, _ in config.extra}  # nothing of the installed software is asked here
    yield Scene(
        predictor=_recorded_predictor(landscape, space, observer) if predict else None,
        runner=ReplayRunner(landscape, seed=spec.seed),
        device=replace(landscape.device, precisions=precisions),
        space=space,
        facts=facts,
        warnings=(Warning(code="replayed", message=_origin(landscape)),),
        replayed=True,
        ceiling_bytes=_recorded_limit(landscape),
        argument_defaults={**foreign, **KNOWN_DEFAULTS},
    )


def _recorded_predictor(landscape: Landscape, space: Space, observer: Observer) -> Predictor | None:
    """Predictions for a recorded device and model, as far as both are known here; a replay needs neither."""
    spec = landscape.spec
    if capability_of(landscape.device) is None:
        return None
    try:
        workload = Workload(
            model=str(spec.get("model") or ""),
            task=spec.get("task"),
            seq_len=spec.get("seq_len"),
            attn_implementation=spec.get("attention"),
            adaptation=Adaptation.from_json(spec["adaptation"]) if spec.get("adaptation") else None,
        )
        with asking(workload) as (facts, ask):
            return predictor_for(
                device=landscape.device,
                workload=workload,
                facts=facts,
                space=space,
                ask=ask,
                say=observer.note,
                patience_seconds=REPLAY_PATIENCE_SECONDS,
                releases=False,
            )
    except (UserError, WorkerError) as error:
        observer.note(f"nothing is predicted for this landscape: {error.message}")
        return None


def _recorded_limit(landscape: Landscape) -> int | None:
    """What its trials could use at most: as was asked, else what was free then; None where it does not say."""
    for name in ("memory_limit_bytes", ENFORCED):
        limit = landscape.spec.get(name)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _origin(landscape: Landscape) -> str:
    kind = "modelled, not measured" if landscape.modelled else "recorded"
    return f"replayed from a landscape ({kind}) of {landscape.device.name}: nothing was run here"


def memory_limit(
    spec: SearchSpec, device: Device, stored: Mapping[str, Any] | None, *, ceiling_bytes: int | None = None
) -> int:
    """The bytes that trials may use: as asked, else as the study had it, else what is free less the margin.

    Args:
        spec: what was asked.
        device: with what it has.
        stored: identity of the study that is gone on with; None = a new one.
        ceiling_bytes: of a landscape: the limit that it was recorded under, above which nothing is known.

    Raises:
        UserError: more than the device has, or than the landscape knows of.
        NothingFits: less than the context takes.
    """
    asked = spec.memory_limit_bytes
    if asked is None and stored is not None and isinstance(stored.get("memory_limit"), int):
        return int(stored["memory_limit"])
    if ceiling_bytes is not None and asked is not None and asked > ceiling_bytes:
        raise UserError(
            f"the memory limit {format_bytes(asked)} is above {format_bytes(ceiling_bytes)}, under which the landscape was recorded",
            hint="leave --memory out, or give a smaller one",
        )
    if ceiling_bytes is not None and asked is None:
        return ceiling_bytes
    if device.total_memory_bytes == 0:  # a landscape that does not say
        return asked if asked is not None else 1 << 60
    if asked is None:
        return device.default_limit_bytes()
    if asked <= device.context_bytes:
        raise NothingFits(
            f"the memory limit {format_bytes(asked)} does not even hold the CUDA context",
            shortfall_bytes=device.context_bytes - asked,
            hint="raise --memory",
        )
    if asked > device.total_memory_bytes:
        raise UserError(
            f"the memory limit {format_bytes(asked)} is larger than {device.name} has ({format_bytes(device.total_memory_bytes)})",
            hint="leave --memory out to use what is free",
        )
    return asked


def identity(scene: Scene, spec: SearchSpec, limit: int) -> dict[str, Any]:
    """What must agree for records to be comparable."""
    software = scene.facts.get("software", {})
    model = scene.facts.get("model", {})
    script = spec.workload.script
    own = {} if script is None else {"script": f"{shown(without_secrets(script))} {(model.get('script') or {}).get('digest')}"}
    if model.get("adapter") or model.get("quantization"):
        own |= {name: software[name] for name in ("peft", "bitsandbytes") if name in software}
    if model.get("training"):
        own |= {"training": model["training"]}
    if scene.facts.get("landscape"):
        own |= {"landscape": scene.facts["landscape"]}
    return {
        **own,
        "model": f"{spec.workload.model} {model.get('digest', '')}".strip(),
        "task": model.get("task", spec.workload.task),
        "sequence_length": model.get("seq_len", spec.workload.seq_len),
        "effective_batch": spec.effective_batch,
        "device": scene.device.name,
        "memory_limit": limit,
        **data_identity(model),
        "attention": spec.workload.attn_implementation,
        "torch": software.get("torch"),
        "transformers": software.get("transformers"),
    }


def data_identity(model: Mapping[str, Any]) -> dict[str, str]:
    """The rows that are trained on, where their lengths matter."""
    data = model.get("data") or {}
    return {"data": f"{data.get('source')} {data['digest']}"} if data.get("digest") else {}


def choose_device(asked: str | None) -> str:
    """`cpu` or `cuda:N`, checked for form; without a wish the first card that a driver shows, else the CPU.

    Raises:
        UserError: not a device's name.
    """
    if asked is None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        return (
            "cuda:0"
            if not hidden and (nvml.used_bytes() is not None or os.path.exists("/dev/kfd"))
            else "cpu"
        )
    kind, _, index = asked.partition(":")
    if asked == "cuda":
        return "cuda:0"
    if kind not in ("cuda", "cpu") or (kind == "cpu" and index) or (kind == "cuda" and not index.isdigit()):
        raise UserError(f"unknown device {asked!r}", hint="use cpu, cuda or cuda:N")
    return asked
