"""From a finding and its records to the result that the user keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from autofit.beliefs.predict import is_memory_failure
from autofit.devices.device import Device
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.spec import SearchSpec
from autofit.problem.terms import Finding
from autofit.results import advisories, advisories_after
from autofit.results.data_result import data_of, data_problems
from autofit.results.evaluation import Evaluation
from autofit.results.result import Baseline, Cost, Estimate, TuneResult, Warning, break_even_hours, estimates
from autofit.search.baselines import plain_defaults
from autofit.trials.soundness import departed
from autofit.trials.trial import SEARCH_ROLES, Outcome, Role, TrialRecord


def assemble(
    *,
    finding: Finding,
    records: Sequence[TrialRecord],
    spec: SearchSpec,
    space: Space,
    device: Device,
    memory_limit_bytes: int,
    default_optim: str,
    untested: Mapping[str, int],
    as_it_is: TrialConfig | None = None,
    starting_seconds: float = 0.0,
    predicting_seconds: float = 0.0,
    certificate: Mapping[str, Any] | None = None,
    software: Mapping[str, str] | None = None,
    model: Mapping[str, Any] | None = None,
    argument_defaults: Mapping[str, Any] | None = None,
    reference_optim: str | None = None,
    soundness: Mapping[str, Any] | None = None,
    evaluation: Evaluation | None = None,
    warnings: Sequence[Warning] = (),
) -> TuneResult:
    """Return the result. A function of the records but for `finding`, which is itself one of them and the clock.

    `as_it_is` is what a tuned script asks for itself: a baseline, where its effective batch is the one that was asked for.
    """
    every, records = records, [r for r in records if r.role is not Role.EVALUATION]
    known = estimates(records)
    best = known[finding.winner.key()]
    plain = plain_defaults(spec.effective_batch, default_optim, argument_defaults or {}, weights_dtype=(model or {}).get("weights_dtype"))
    baselines = {
        "defaults": _baseline(plain, known, records),
        "hand_recipe": _recipe(finding, known, records),
    }
    other = as_it_is is not None and as_it_is.effective_batch() != spec.effective_batch
    if as_it_is is not None and not other:
        baselines["as_it_is"] = _baseline(as_it_is, known, records)
    speedup = {name: _ratio(best, baseline.estimate) for name, baseline in baselines.items()}
    data = data_of(model or {}, records, finding.winner)
    result = TuneResult(
        best=best,
        confirmed=finding.confirmed,
        settled=finding.settled,
        tied=tuple(known[c.key()] for c in finding.tied if c != finding.winner and c.key() in known),
        baselines=baselines,
        speedup=speedup,
        spec=spec,
        device=device,
        software=software or {},
        model=_kept_facts(model or {}),
        data=data,
        memory_limit_bytes=memory_limit_bytes,
        trials=tuple(records),
        removals=tuple(asdict(removal) for removal in space.removals),
        untested=untested,
        stopped=finding.stopped,
        certificate=certificate,
        warnings=(
            *warnings,
            *advisories.of_device(device),
            *advisories.of_winner(best, records, confirmed=finding.confirmed, interrupted=finding.interrupted),
            *advisories.of_records(records),
            *advisories_after.of_loader(finding.winner, records),
            *advisories_after.of_evaluation(evaluation),
            *(Warning(code=code, message=said, next_step=step) for code, said, step in data_problems(data)),
            *(Warning(code="space", message=note) for note in space.notes),
            *((_other_batch(as_it_is.effective_batch(), spec.effective_batch),) if as_it_is is not None and other else ()),
        ),
        cost=_cost(finding, every, speedup, best, starting=starting_seconds, predicting=predicting_seconds),
        evaluation=evaluation,
        argument_defaults=argument_defaults or {},
        reference_optim=reference_optim or default_optim,
        soundness=soundness or {},
    )
    told = (advisories.of_numerics, advisories.of_baselines, advisories.of_playoff, advisories.of_drift)
    return replace(result, warnings=(*result.warnings, *(warning for of in told for warning in of(result))))


def _other_batch(own: int, asked: int) -> Warning:
    said = f"as it is, the script trains at effective batch {own}, not {asked}: it is no baseline here"
    return Warning(code="effective_batch", message=said)


def _kept_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's facts without its whole config, of which only the dtype of its checkpoint matters to the reader."""
    kept = {name: value for name, value in model.items() if name != "config"}
    dtype = (model.get("config") or {}).get("dtype")
    return {**kept, "config": {"dtype": dtype}} if dtype is not None else kept


def _baseline(config: TrialConfig, known: Mapping[str, Estimate], records: Sequence[TrialRecord]) -> Baseline:
    estimate = known.get(config.key())
    if estimate is not None:
        return Baseline(config=config, estimate=estimate)
    if any(r.config == config and r.outcome is Outcome.COMPLETED for r in records) and config.precision in departed(records):
        return Baseline(config=config, note=_departs(config))
    own = next((r for r in records if r.config == config and r.failure is not None), None)
    note = "was not run" if own is None or own.failure is None else own.failure.message
    if own is not None and own.outcome is Outcome.INFEASIBLE:
        note = "does not fit" if is_memory_failure(own) else note
    return Baseline(config=config, note=note)


def _recipe(finding: Finding, known: Mapping[str, Estimate], records: Sequence[TrialRecord]) -> Baseline:
    config = finding.hand_recipe
    if config is None:
        return Baseline(config=None, note=finding.no_recipe or "was not run")
    estimate = known.get(config.key())
    unsound = config.precision in departed(records)
    note = _departs(config) if unsound else "was not run"
    return Baseline(config=config, estimate=estimate, note=None if estimate is not None else note)


def _departs(config: TrialConfig) -> str:
    return f"{config.precision} was found to depart from fp32"


def _ratio(best: Estimate, baseline: Estimate | None) -> float | None:
    return None if baseline is None else best.samples_per_second / baseline.samples_per_second


def _cost(
    finding: Finding,
    records: Sequence[TrialRecord],
    speedup: Mapping[str, float | None],
    best: Estimate,
    *,
    starting: float,
    predicting: float,
) -> Cost:
    compiling, seconds = compile_seconds(records, best.config), finding.seconds + starting
    spent = seconds + compiling
    ran = [r for r in records if r.outcome is not Outcome.SKIPPED]
    return Cost(
        seconds=seconds,
        device_seconds=sum(r.seconds for r in ran),
        trials=sum(r.role in SEARCH_ROLES and not r.interrupted for r in ran),
        out_of_memory=sum(is_memory_failure(r) for r in ran if not r.after_search),
        break_even_hours={name: break_even_hours(spent, ratio) for name, ratio in speedup.items()},
        compile_seconds=compiling,
        predicting_seconds=predicting,
    )


def compile_seconds(records: Sequence[TrialRecord], config: TrialConfig) -> float:
    """What compiling `config` takes without a warm cache: the longest of its trials; 0.0 where nothing is compiled."""
    own = [r.measurement.facts for r in records if r.config == config and r.measurement and r.measurement.facts]
    return max((float(facts["compile"]["seconds"]) for facts in own if "compile" in facts), default=0.0)
