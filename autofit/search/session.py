"""One search in its scene: study, sampler and search are put together, run, and what they found becomes the result."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.problem.config import TrialConfig
from autofit.problem.numerics import changes
from autofit.problem.script_command import without_secrets
from autofit.problem.spec import SearchSpec, Workload
from autofit.problem.terms import Terms
from autofit.processes.process import DEFAULT_TRIAL_TIMEOUT_SECONDS
from autofit.results.result import TuneResult, Warning
from autofit.search.assemble import assemble
from autofit.search.epilogue import Epilogue, play
from autofit.search.scene import Scene, identity, memory_limit, reference_optim
from autofit.search.script_baseline import own_configuration, run_as_it_is
from autofit.search.search import Search
from autofit.search.soundness_check import SoundnessCheck, check_of
from autofit.trials.estimates import recast
from autofit.trials.observer import Observer, Timekeeper

if TYPE_CHECKING:
    from autofit.forecasts.forecast import TracedForecast
    from autofit.study.study import TrialStudy


def search_in(
    scene: Scene, spec: SearchSpec, study_path: str | Path | None, observer: Observer
) -> TuneResult:
    """Search where `scene` says, as `spec` says. See `tuning.tune` for what is raised.

    Args:
        scene: runner, device and space.
        spec: the terms.
        study_path: journal file; None = in memory.
        observer: told of every trial.
    """
    from autofit.study.journal import stored_identity

    stored = stored_identity(study_path) if study_path is not None else None
    limit = memory_limit(spec, scene.device, stored, ceiling_bytes=scene.ceiling_bytes)
    for removal in scene.space.removals:
        observer.note(f"not searched: {removal.knob} {removal.value}: {removal.reason}")
    begin = time.monotonic()
    forecast = scene.predictor(limit) if scene.predictor is not None else None
    study = _study(scene, spec, study_path, limit, forecast, spent_seconds=scene.starting_seconds + scene.predicting_seconds + time.monotonic() - begin)
    if forecast is not None:  # the sampler has asked it for every configuration
        scene = replace(scene, predicting_seconds=scene.predicting_seconds + time.monotonic() - begin)
    if isinstance(observer, Timekeeper):
        observer.spent(scene.predicting_seconds)
        observer.earlier(study.records)
    as_it_is, spent = own_configuration(scene.facts), scene.predicting_seconds
    if as_it_is is not None:
        spent += run_as_it_is(as_it_is, scene=scene, spec=spec, study=study, limit=limit, observer=observer)
    check = None if scene.replayed else check_of(scene, spec, limit_bytes=limit, say=observer.note)
    search = Search(
        terms=_terms(scene, spec, limit, spent),
        space=scene.space,
        study=study,
        runner=scene.runner,
        memory=forecast,
        observer=observer,
        check=check,
        keeps=lambda config: not _changes(scene, spec, config, study),
    )
    epilogue = play(
        search.run(), search=search, study=study, scene=scene, spec=spec, limit_bytes=limit, observer=observer
    )
    return _result(scene, spec, study, limit, search=search, epilogue=epilogue, check=check, as_it_is=as_it_is)


def _changes(scene: Scene, spec: SearchSpec, config: TrialConfig, study: TrialStudy) -> bool:
    """Whether a configuration changes the mathematics of the user's training; as `TuneResult.changes`, before there is a result."""
    model = scene.facts.get("model") or {}
    found = changes(
        config,
        reference=reference_optim(spec, scene.facts),
        weights_dtype=model.get("weights_dtype"),
        adapter=model.get("adapter") is not None,
    )
    return bool(found) or config.precision in recast(study.records, model.get("weights_dtype"))


def _study(
    scene: Scene,
    spec: SearchSpec,
    path: str | Path | None,
    limit: int,
    forecast: TracedForecast | None,
    *,
    spent_seconds: float,
) -> TrialStudy:
    """The study with its sampler; a file is gone on with."""
    from autofit.study.journal import open_study
    from autofit.study.sampler import CostModelSampler, make_sampler
    from autofit.study.study import TrialStudy

    sampler = make_sampler(
        spec.sampler,
        space=scene.space,
        seed=spec.seed,
        tolerance=spec.tolerance,
        memory_limit_bytes=limit,
        memory=forecast,
        time=forecast,
    )
    study = TrialStudy(open_study(path, sampler=sampler, identity=identity(scene, spec, limit)), scene.space, spent_seconds=spent_seconds)
    forgotten = study.forget_failures(trial_timeout_seconds=spec.trial_timeout_seconds or DEFAULT_TRIAL_TIMEOUT_SECONDS)
    if isinstance(sampler, CostModelSampler):
        sampler.forget(forgotten)
    return study


def _terms(scene: Scene, spec: SearchSpec, limit: int, spent_seconds: float) -> Terms:
    return Terms(
        effective_batch=spec.effective_batch,
        memory_limit_bytes=limit,
        trials=spec.trials,
        timeout_seconds=spec.timeout_seconds,
        trial_timeout_seconds=spec.trial_timeout_seconds,
        tolerance=spec.tolerance,
        seed=spec.seed,
        native_precisions=scene.device.precisions,
        default_optim=scene.default_optim,
        argument_defaults=scene.argument_defaults,
        weights_dtype=scene.weights_dtype,
        spent_seconds=spent_seconds,
        baselines_outside_space=not scene.replayed,
    )


def _result(
    scene: Scene,
    spec: SearchSpec,
    study: TrialStudy,
    limit: int,
    *,
    search: Search,
    epilogue: Epilogue,
    check: SoundnessCheck | None,
    as_it_is: TrialConfig | None,
) -> TuneResult:
    fallback = getattr(scene.runner, "fallback_reason", None)
    spawned = () if fallback is None else (Warning(code="spawned", message=fallback),)
    return assemble(
        finding=epilogue.finding,
        evaluation=epilogue.evaluation,
        records=study.records,
        spec=replace(spec, workload=_kept_workload(spec.workload)),
        space=scene.space,
        device=scene.device,
        memory_limit_bytes=limit,
        default_optim=scene.default_optim,
        as_it_is=as_it_is,
        starting_seconds=scene.starting_seconds,
        predicting_seconds=scene.predicting_seconds,
        untested=search.untested,
        certificate=_certificate(study),
        software=scene.facts.get("software"),
        model=scene.facts.get("model"),
        reference_optim=reference_optim(spec, scene.facts),
        argument_defaults={k: scene.argument_defaults[k] for k in sorted(scene.argument_defaults)},
        soundness=None if check is None else check.summary,
        warnings=(*scene.warnings, *epilogue.warnings, *(check.warnings if check else ()), *spawned),
    )


def _kept_workload(workload: Workload) -> Workload:
    """The workload as a file keeps it: no path of a private file, no secret of a command line."""
    script = None if workload.script is None else without_secrets(workload.script)
    return replace(workload, objects_path=None, script=script)


def _certificate(study: TrialStudy) -> dict[str, Any] | None:
    """The sampler's certificate over the search's own trials, as JSON; None where it has none."""
    finished = getattr(study.sampler, "certificate", None)
    searched = [record for record in study.records if not record.after_search]
    certificate = finished(searched) if finished is not None else None
    return None if certificate is None else certificate_json(certificate)


def certificate_json(certificate: Any) -> dict[str, Any]:
    """The sampler's certificate as JSON."""
    contenders = [{**asdict(contender), "config": contender.config.to_json()} for contender in certificate.contenders]
    return {**asdict(certificate), "best": certificate.best.to_json(), "contenders": contenders}
