"""The plans: what is asked for is in them, they name only what exists, and both have the same stages."""

from __future__ import annotations

from pathlib import Path

from autofit.problem import presets
from autofit.units import MIB
from benchmarks.evidence import founding, oom
from benchmarks.evidence.__main__ import STAGES
from benchmarks.evidence.inside import oom as inside_oom
from benchmarks.evidence.plan import EIGHT_BIT, STAGE_NAMES, full_plan, tiny_plan
from benchmarks.evidence.search import key


def test_the_full_plan_has_forty_memory_configurations_over_five_models_even_without_eight_bit_optimizers() -> (
    None
):
    cases = [case for case in full_plan().memory if case.config.optim != EIGHT_BIT]
    assert len(cases) >= 40
    assert len({case.model for case in cases}) == 5
    knobs = [
        {getattr(case.config, name) for case in cases}
        for name in ("precision", "gradient_checkpointing", "optim", "gradient_accumulation_steps")
    ]
    assert [len(values) for values in knobs] == [4, 2, 3, 2]


def test_a_box_that_is_cut_short_has_seen_every_model() -> None:
    assert len({case.model for case in full_plan().memory[:5]}) == 5


def test_no_point_is_planned_twice(tmp_path: Path) -> None:
    for plan in (full_plan(), tiny_plan(tmp_path)):
        for cases in (plan.memory, plan.snapshots, plan.fidelity):
            assert len({case.key for case in cases}) == len(cases)
        keys = [key(problem, limit) for problem in plan.problems for limit in problem.limits]
        assert len(set(keys)) == len(keys)


def test_snapshots_are_of_configurations_that_no_other_case_excludes() -> None:
    assert all(case.config.optim != EIGHT_BIT for case in full_plan().snapshots)


def test_every_model_of_the_full_plan_is_bundled() -> None:
    plan = full_plan()
    names = {case.workload.model for case in (*plan.memory, *plan.fidelity, *plan.snapshots, *plan.limits)}
    names |= {problem.workload.model for problem in plan.problems} | {plan.founding.model}
    assert all(presets.canonical(name) is not None for name in names)


def test_both_plans_and_the_command_line_have_the_same_stages(tmp_path: Path) -> None:
    assert tuple(STAGES) == STAGE_NAMES == tuple(full_plan().shares) == tuple(tiny_plan(tmp_path).shares)


def test_the_stage_and_its_script_mean_the_same_cases() -> None:
    assert oom.CASES == inside_oom.CASES


def test_the_founding_table_has_nine_configurations_of_today() -> None:
    configs = [founding.config_of(row) for row in founding.rows()]
    assert len({config.key() for config in configs}) == 9
    assert {config.effective_batch() for config in configs} == {4}


def test_the_limit_takes_second_gradients_of_the_provoking_layer_and_no_moments() -> None:
    weights, workspaces = 4 * inside_oom.WIDTH**2, 96 * MIB
    assert 3 * weights + workspaces <= full_plan().oom_limit_bytes < 4 * weights
