"""A finding and its records become a result whose every figure can be computed again from the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autofit.problem.config import Precision
from autofit.problem.space import Capabilities, Space, build_space
from autofit.problem.spec import SearchSpec, Workload
from autofit.problem.terms import Finding
from autofit.reports.report import report_lines
from autofit.results.result import TuneResult, Warning, estimates
from autofit.search.assemble import assemble
from autofit.testing import simulated_landscape
from autofit.trials.trial import OUTSIDE, Failure, Reason, Role, TrialRecord
from autofit.units import GIB
from tests.builders import ARGUMENT_DEFAULTS, GPU, make_config, make_record
from tests.searching import prepare

OPTIM = "adamw_torch_fused"
SPACE: Space = build_space(
    effective_batch=50,
    capabilities=Capabilities(
        device_kind="cuda",
        precisions=(Precision.FP32, Precision.BF16),
        optims=("adamw_torch_fused", "adafactor"),
    ),
)
SPEC = SearchSpec(workload=Workload(model="bert-base-uncased"), effective_batch=50)
DEFAULTS = make_config(5, 50, optim=OPTIM)
RECIPE = make_config(2, 50, precision=Precision.BF16, optim=OPTIM)
WINNER = make_config(25, 50, precision=Precision.BF16, optim=OPTIM)
RIVAL = make_config(10, 50, precision=Precision.BF16, optim=OPTIM)
TOO_BIG = make_config(50, 50, optim=OPTIM)
RECORDS = (
    make_record(0, DEFAULTS, 100.0, role=Role.DEFAULTS, seconds=3.0),
    make_record(1, RECIPE, 200.0, role=Role.HAND_RECIPE, seconds=3.0),
    make_record(2, TOO_BIG, reason=Reason.OUT_OF_MEMORY, seconds=2.0),
    make_record(3, WINNER, 400.0, seconds=3.0),
    make_record(4, RIVAL, 399.0, seconds=3.0),
    make_record(5, make_config(50, 50, optim="adafactor"), reason=Reason.PREDICTED_TOO_BIG),
    make_record(6, WINNER, 410.0, role=Role.PLAYOFF, seconds=3.0),
    make_record(7, WINNER, 390.0, role=Role.CONFIRMATION, seconds=9.0),
)
FINDING = Finding(
    winner=WINNER,
    tied=(WINNER, RIVAL),
    confirmed=True,
    stopped="every configuration was run, or cannot fit",
    interrupted=False,
    seconds=36.0,
    hand_recipe=RECIPE,
)


def assembled(
    records: Sequence[TrialRecord] = RECORDS, finding: Finding = FINDING, **more: Any
) -> TuneResult:
    return assemble(
        finding=finding,
        records=records,
        spec=SPEC,
        space=SPACE,
        device=GPU,
        memory_limit_bytes=16 * GIB,
        default_optim=OPTIM,
        untested={"dominated": 3},
        argument_defaults=ARGUMENT_DEFAULTS,
        **more,
    )


def test_defaults_that_ran_in_a_precision_that_departs_are_not_said_not_to_have_run() -> None:
    half = make_config(5, 50, precision=Precision.BF16, optim=OPTIM)
    plain = make_config(25, 50, optim=OPTIM)
    records = [
        make_record(0, half, 100.0, role=Role.DEFAULTS),
        make_record(1, plain, 90.0),
        make_record(2, RIVAL, 300.0),
        make_record(3, RIVAL, reason=Reason.DEPARTS_FROM_FP32, role=Role.CONFIRMATION),
    ]
    finding = replace(FINDING, winner=plain, tied=(plain,), hand_recipe=None)
    result = assemble(
        finding=finding, records=records, spec=SPEC, space=SPACE, device=GPU, memory_limit_bytes=16 * GIB, default_optim=OPTIM,
        untested={}, argument_defaults={**ARGUMENT_DEFAULTS, "bf16": True},
    )  # fmt: skip
    assert result.baselines["defaults"].config == half
    assert result.baselines["defaults"].note == "bf16 was found to depart from fp32"


def test_interrupted_trials_are_not_counted_as_searched() -> None:
    cut = make_record(8, RIVAL, reason=Reason.INTERRUPTED, seconds=2.0)
    assert assembled([*RECORDS, cut]).cost.trials == assembled().cost.trials


def test_the_figures_are_those_of_the_records() -> None:
    result = assembled()
    known = estimates(RECORDS)
    assert result.best == known[WINNER.key()]
    assert result.best.samples_per_second == pytest.approx(410.0)
    assert result.tied == (known[RIVAL.key()],)
    assert result.trials == RECORDS
    assert result.confirmed
    assert result.baselines["defaults"].estimate == known[DEFAULTS.key()]
    assert result.baselines["hand_recipe"].estimate == known[RECIPE.key()]
    assert result.speedup == {"defaults": pytest.approx(4.1), "hand_recipe": pytest.approx(2.05)}


def test_the_cost_counts_what_ran() -> None:
    cost = assembled().cost
    assert cost.seconds == 36.0
    assert cost.device_seconds == pytest.approx(26.0)
    assert (cost.trials, cost.out_of_memory) == (5, 1)
    assert cost.break_even_hours["defaults"] == pytest.approx(36.0 / 3.1 / 3600)


def test_what_was_not_run_is_taken_over() -> None:
    assert assembled().untested == {"dominated": 3}


def test_it_survives_json() -> None:
    result = assembled(
        software={"torch": "2.13.0"}, model={"task": "causal-lm"}, certificate={"statement": "done"}
    )
    assert TuneResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def test_removals_notes_and_warnings_reach_the_reader() -> None:
    result = assembled(warnings=[Warning(code="model", message="a preset stands for it")])
    assert {(r["knob"], r["value"]) for r in result.removals} >= {
        ("precision", "fp16"),
        ("precision", "tf32"),
    }
    codes = [warning.code for warning in result.warnings]
    assert codes[0] == "model"
    assert "space" in codes
    assert "not_confirmed" not in codes
    worse = assembled(finding=replace(FINDING, confirmed=False, interrupted=True))
    assert {"not_confirmed", "interrupted"} <= {warning.code for warning in worse.warnings}


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        (Reason.OUT_OF_MEMORY, "does not fit"),
        (Reason.SUSPECTED_OUT_OF_MEMORY, "does not fit"),
        (Reason.NON_FINITE_LOSS, "the loss is nan"),
        (Reason.CRASH, "killed by signal 11"),
        (None, "was not run"),
    ],
)
def test_a_baseline_without_a_speed_says_why(reason: Reason | None, note: str) -> None:
    records = list(RECORDS[1:])
    if reason is not None:
        records.append(make_record(0, DEFAULTS, reason=reason, message=note, role=Role.DEFAULTS))
    result = assembled(records)
    assert (result.baselines["defaults"].estimate, result.baselines["defaults"].note) == (None, note)
    assert result.speedup["defaults"] is None
    assert result.cost.break_even_hours["defaults"] is None


def test_a_hand_that_found_nothing_says_so() -> None:
    result = assembled(finding=replace(FINDING, hand_recipe=None, no_recipe="why there is none"))
    baseline = result.baselines["hand_recipe"]
    assert (baseline.config, baseline.estimate) == (None, None)
    assert baseline.note == "why there is none"


def test_the_model_is_described_without_its_whole_config() -> None:
    assert assembled(model={"task": "causal-lm", "config": {"hidden_size": 8}}).model == {"task": "causal-lm"}


def test_a_hand_recipe_in_an_unsound_precision_is_said_to_be_that() -> None:
    landscape = simulated_landscape(8)
    play = prepare(landscape, sampler="grid")
    play.search._check = lambda winner, records, seconds: (
        Failure(reason=Reason.DEPARTS_FROM_FP32, message="it departs") if winner.precision is Precision.BF16 else None
    )
    finding = play.run()
    result = assemble(
        finding=finding,
        records=play.records,
        spec=SearchSpec(workload=Workload(model="simulated"), effective_batch=8),
        space=Space(configs=tuple(p.config for p in landscape.points)),
        device=landscape.device,
        memory_limit_bytes=landscape.device.total_memory_bytes,
        default_optim="adamw_torch_fused",
        untested={},
    )
    recipe = result.baselines["hand_recipe"]
    assert recipe.estimate is None
    assert recipe.note == "bf16 was found to depart from fp32"
    assert result.best.config.precision is Precision.FP32
    text = " ".join(" ".join(line.text for line in report_lines(result, 120)).split())
    assert "no comparison with the hand recipe (bf16 was found to depart from fp32)" in text
    assert "not sound: it departs" in text
    assert TuneResult.from_json(result.to_json()).best == result.best


def test_the_script_as_it_is_stands_among_the_baselines() -> None:
    told = assembled(as_it_is=RIVAL)
    assert told.speedup["as_it_is"] == pytest.approx(410.0 / 399.0)
    assert told.baselines["as_it_is"].estimate is not None
    assert told.cost.break_even_hours["as_it_is"] is not None
    assert TuneResult.from_json(told.to_json()).baselines["as_it_is"] == told.baselines["as_it_is"]
    assert any("1.03x the script as it is" in " ".join(line.text.split()) for line in report_lines(told, 200))


def test_a_script_that_is_faster_as_it_is_than_all_that_was_to_be_searched_is_a_warning() -> None:
    own = make_config(50, 50, precision=Precision.FP16, optim=OPTIM)
    told = assembled([*RECORDS, make_record(8, own, 800.0, why=OUTSIDE)], as_it_is=own)
    (warning,) = [w for w in told.warnings if w.code == "faster_baseline"]
    assert "the script as it is" in warning.message
    assert own.label() in warning.message


def test_another_effective_batch_is_no_baseline_and_said() -> None:
    told = assembled(as_it_is=make_config(8))
    assert "as_it_is" not in told.baselines
    (warning,) = [w for w in told.warnings if w.code == "effective_batch"]
    assert warning.message == "as it is, the script trains at effective batch 64, not 50: it is no baseline here"
