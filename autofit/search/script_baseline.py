"""A third baseline for scripts: what the script asks for itself, where that is the effective batch that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autofit.errors import UserError
from autofit.problem.arguments import CHECKPOINTING_NAMES, DEFAULT_BATCH
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.search.baselines import plain_defaults
from autofit.search.conduct import cut_off
from autofit.search.scene import Scene
from autofit.trials.observer import Observer
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import OUTSIDE, Role, TrialRecord

if TYPE_CHECKING:
    from autofit.study.study import TrialStudy


def own_configuration(facts: Mapping[str, Any]) -> TrialConfig | None:
    """The configuration of the script's own arguments; None when it is no script, or they make no configuration of ours.

    Args:
        facts: a child's answer to `describe`.
    """
    model = facts.get("model") or {}
    own = (model.get("script") or {}).get("own")
    if own is None:
        return None
    stored = {"float32": Precision.FP32, "bfloat16": Precision.PURE_BF16}.get(str(model.get("weights_dtype")))
    asked = next((Precision(name) for name in ("bf16", "fp16", "tf32") if own.get(name)), stored)
    if asked is None:
        return None
    try:
        return TrialConfig(
            per_device_train_batch_size=own.get("per_device_train_batch_size", DEFAULT_BATCH),
            gradient_accumulation_steps=own.get("gradient_accumulation_steps", 1),
            gradient_checkpointing=any(own.get(name) for name in CHECKPOINTING_NAMES),
            precision=asked,
            optim=str(own.get("optim")),
        )
    except UserError:  # not what TrainingArguments promises: no baseline then
        return None


def run_as_it_is(
    config: TrialConfig, *, scene: Scene, spec: SearchSpec, study: TrialStudy, limit: int, observer: Observer
) -> float:
    """Run the script's own configuration once and store it; not where the effective batch differs, or where the search runs it anyway.

    Returns:
        Seconds of the time budget that it took.
    """
    plain = plain_defaults(spec.effective_batch, scene.default_optim, scene.argument_defaults, weights_dtype=scene.weights_dtype)
    if config.effective_batch() != spec.effective_batch or config.precision not in scene.device.precisions:
        return 0.0
    if config == plain or any(record.config == config and not record.interrupted for record in study.records):
        return 0.0
    why = "baseline: the script as it is" if config in scene.space else OUTSIDE
    observer.trial_started(config, Role.SEARCH, why)
    left = None if spec.timeout_seconds is None else max(1.0, spec.timeout_seconds - scene.predicting_seconds)
    bounds = [t for t in (spec.trial_timeout_seconds, left) if t is not None]
    request = TrialRequest(
        config=config,
        memory_limit_bytes=limit,
        timeout_seconds=min(bounds) if bounds else None,
        seed=spec.seed,
    )
    outcome = scene.runner.run(request)
    out_of_time = left is not None and outcome.seconds >= left
    record = TrialRecord(
        number=0,
        config=config,
        outcome=outcome.outcome,
        measurement=outcome.measurement,
        failure=cut_off(outcome.failure) if out_of_time else outcome.failure,
        seconds=outcome.seconds,
        why=why,
    )
    observer.trial_ended(study.add(record))
    if record.interrupted and not out_of_time:
        raise KeyboardInterrupt
    return record.seconds
