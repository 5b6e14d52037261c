"""What changes the mathematics of training is named with its reason, and can be kept out of the space."""

from __future__ import annotations

import pytest

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.numerics import (
    ADAMW,
    RULES,
    changes,
    named_optim,
    optim_change,
    precision_change,
    rule_of,
)
from autofit.problem.space import DEFAULT_OPTIMS, Capabilities, build_space
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.result import TuneResult
from autofit.search.choices import space_of
from autofit.search.tuning import run_search
from autofit.testing import simulated_landscape
from tests.builders import make_config, make_record, make_result
from tests.refusals import refused

CARD = Capabilities(
    device_kind="cuda",
    precisions=tuple(Precision),
    optims=tuple(name for rule in RULES for name in rule.optims),
)
FACTS = {
    "device": {"kind": "cuda", "name": "card", "precisions": [str(p) for p in Precision], "total_memory_bytes": 1},
    "optims": CARD.optims,
    "missing_packages": {},
    "argument_defaults": {"optim": "adamw_torch_fused"},
}


def test_every_optimizer_of_the_installed_transformers_has_a_rule() -> None:
    from transformers.training_args import OptimizerNames

    assert [name.value for name in OptimizerNames if rule_of(name.value) not in RULES] == []


def test_no_optimizer_has_two_rules_and_every_other_rule_says_what_it_does_otherwise() -> None:
    names = [name for rule in RULES for name in rule.optims]
    assert len(names) == len(set(names))
    assert all(rule.against_adamw for rule in RULES if rule != ADAMW)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_apex_fused", "paged_adamw_32bit"])
def test_kernels_of_one_algorithm_change_nothing(optim: str) -> None:
    assert optim_change(optim, "adamw_torch_fused") is None
    assert optim_change("adamw_torch_fused", optim) is None


@pytest.mark.parametrize("optim", ["adafactor", "adamw_bnb_8bit", "lion_32bit", "sgd", "adagrad", "ademamix", "mine"])
def test_other_algorithms_are_named_with_the_reason(optim: str) -> None:
    reason = optim_change(optim, "adamw_torch_fused")
    assert reason is not None
    assert reason.startswith("trains otherwise than adamw_torch_fused: ")
    assert optim_change(optim, optim) is None
    assert "not by" in str(optim_change("adamw_torch", optim))


def test_rounding_in_between_keeps_the_mathematics_and_rounded_weights_do_not() -> None:
    kept = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
    assert [precision_change(p, None) for p in kept] == [None] * 4
    assert "small updates are lost" in str(precision_change(Precision.PURE_BF16, "float32"))
    assert precision_change(Precision.PURE_BF16, "bfloat16") is None  # the user's own weights are bf16


def test_all_changes_of_a_configuration_are_told() -> None:
    config = make_config(8, optim="adafactor", precision=Precision.PURE_BF16)
    assert len(changes(config, reference="adamw_torch")) == 2
    assert changes(make_config(8, gradient_checkpointing=True), reference="adamw_torch") == ()


class TestSpace:
    """`--keep-numerics`."""

    def test_what_changes_the_mathematics_is_taken_out_with_its_reason(self) -> None:
        space = build_space(effective_batch=8, capabilities=CARD, keep_numerics=True)
        assert {c.optim for c in space.configs} == {"adamw_torch_fused", "adamw_torch"}
        assert {c.precision for c in space.configs} == {"fp32", "tf32", "bf16", "fp16"}
        removed = {r.value: r.reason for r in space.removals}
        assert set(removed) == {"adafactor", "adamw_bnb_8bit"}
        assert "quantised to 8 bits" in removed["adamw_bnb_8bit"]

    def test_the_users_own_optimizer_is_searched_and_kept(self) -> None:
        free = build_space(effective_batch=8, capabilities=CARD, reference_optim="lion_32bit")
        assert {c.optim for c in free.configs} == {*DEFAULT_OPTIMS, "lion_32bit"}
        kept = build_space(effective_batch=8, capabilities=CARD, reference_optim="lion_32bit", keep_numerics=True)
        assert {c.optim for c in kept.configs} == {"lion_32bit"}

    def test_a_named_choice_that_changes_it_is_refused(self) -> None:
        with refused("^optim adafactor is not for --keep-numerics: trains otherwise than adamw_torch_fused", hint="or --keep-numerics"):
            build_space(effective_batch=8, capabilities=CARD, keep_numerics=True, optims=("adafactor",))
        with refused("^precision pure_bf16 is not for --keep-numerics: weights and optimizer state are rounded", hint="or --keep-numerics"):
            build_space(effective_batch=8, capabilities=CARD, keep_numerics=True, precisions=(Precision.PURE_BF16,))

    def test_a_scripts_own_optimizer_is_the_reference(self) -> None:
        spec = SearchSpec(workload=Workload(model="train.py"), effective_batch=8, keep_numerics=True)
        facts = {**FACTS, "model": {"script": {"own": {"optim": "sgd"}}}}
        assert {c.optim for c in space_of(spec, facts).configs} == {"sgd"}

    def test_a_script_that_makes_its_own_is_left_with_it(self) -> None:
        spec = SearchSpec(workload=Workload(model="train.py"), effective_batch=8, keep_numerics=True)
        facts = {**FACTS, "model": {"script": {"own": {"optim": "sgd"}, "own_optimizer": True}}}
        assert {c.optim for c in space_of(spec, facts).configs} == {"sgd"}
        facts = {**FACTS, "model": {"script": {"own": {"optim": "of_tomorrow"}, "own_optimizer": True}}}
        assert {c.optim for c in space_of(spec, facts).configs} == {"adamw_torch_fused"}

    def test_that_of_the_users_arguments_comes_first(self) -> None:
        spec = SearchSpec(workload=Workload(model="m"), effective_batch=8, keep_numerics=True, reference_optim="sgd")
        assert {c.optim for c in space_of(spec, FACTS).configs} == {"sgd"}

    def test_arguments_name_their_optimizer(self) -> None:
        from transformers import TrainingArguments

        assert named_optim(None) is None
        assert named_optim(TrainingArguments(output_dir="out", optim="adafactor", use_cpu=True)) == "adafactor"


def search(**fields: object) -> TuneResult:
    landscape = simulated_landscape(16, optims=("adamw_torch_fused", "sgd"), update_seconds=0.2)
    spec = SearchSpec(workload=Workload(model="simulated"), effective_batch=16, sampler="grid", **fields)  # type: ignore[arg-type]
    return run_search(spec, landscape=landscape, predict=False)


class TestResult:
    """What a search says of it."""

    def test_a_recorded_grid_is_restricted_too(self) -> None:
        free, kept = search(), search(keep_numerics=True)
        assert free.best.config.optim == "sgd"
        assert kept.best.config.optim == "adamw_torch_fused"
        assert [(r["knob"], r["value"]) for r in kept.removals] == [("optim", "sgd")]
        assert free.fastest_kept is not None
        assert free.fastest_kept.config == kept.best.config

    def test_trials_and_winner_are_marked_in_the_file(self) -> None:
        result = search()
        data = result.to_json()
        marked = {TrialConfig.from_json(t["config"]).optim: bool(t["changes"]) for t in data["trials"]}
        assert marked == {"sgd": True, "adamw_torch_fused": False}
        assert data["numerics"]["winner_changes"]
        assert data["numerics"]["fastest_kept"]["config"]["optim"] == "adamw_torch_fused"
        assert TuneResult.from_json(data) == result

    def test_the_table_marks_them(self) -> None:
        from autofit.reports.report_trials import measured_lines
        from autofit.results.knob_worth import measured

        config = make_config(8)
        result = make_result([make_record(0, config, 80.0), make_record(1, config.but(optim="sgd"), 100.0)])
        lines = measured_lines(result, measured(result), 120, None)
        assert [line.split()[0] for line in lines if "8x8" in line] == ["*~1", "0"]
        assert "~ changes the mathematics of training (against adamw_torch_fused)" in lines[-1]
        kept = make_result([make_record(0, config, 80.0)])
        assert "~" not in "".join(measured_lines(kept, measured(kept), 120, None))
