"""Problems, rivals and the regret report, on a small scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autofit.problem.config import TrialConfig
from benchmarks.modelled import ARCHITECTURES, CARDS, Laws, modelled_landscape
from benchmarks.problems import LANDSCAPES, ModelledForecast, Problem, modelled_problems, recorded_problems
from benchmarks.regret import BUDGET, choose, run_ours, run_rival
from benchmarks.regret_report import write_report
from benchmarks.rivals import RIVALS

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """bert-large on a modelled V100 at effective batch 16, 12 GiB."""
    card, model = CARDS["V100"], ARCHITECTURES["bert-large"]
    landscape = modelled_landscape(card, model, seq_len=256, effective_batch=16)
    laws = Laws(card=card, model=model, seq_len=256)
    return Problem(name="small", landscape=landscape, memory_limit_bytes=12 << 30, laws=laws)


def test_there_are_at_least_twenty_problems_from_five_cards_and_five_models() -> None:
    names = [p.name for p in modelled_problems()]
    assert len(names) >= 20
    assert len(set(names)) == len(names)
    for part in (*CARDS, *ARCHITECTURES):
        assert any(part in name for name in names)
    assert 20 <= len(choose(24)) <= 60


def test_modelled_landscapes_say_that_they_are(problem: Problem) -> None:
    assert problem.landscape.modelled


def test_modelled_laws_keep_to_physics(problem: Problem) -> None:
    assert problem.laws is not None
    for config in problem.space.configs:
        doubled = config.but(
            per_device_train_batch_size=2 * config.per_device_train_batch_size,
            gradient_accumulation_steps=max(2, config.gradient_accumulation_steps),
        )
        kept = config.but(gradient_checkpointing=True)
        bare = config.but(gradient_checkpointing=False)
        assert problem.laws.reserved_bytes(doubled) >= problem.laws.reserved_bytes(config)
        assert problem.laws.reserved_bytes(kept) <= problem.laws.reserved_bytes(bare)
        assert problem.laws.micro_seconds(kept) >= problem.laws.micro_seconds(bare)
        assert problem.laws.micro_seconds(config, ideal=True) <= problem.laws.micro_seconds(config)


def test_forecasts_err_by_a_few_percent(problem: Problem) -> None:
    assert problem.laws is not None
    forecast = ModelledForecast(problem.laws, seed=3)
    for config in problem.space.configs:
        found = forecast.needed(config)
        true = problem.laws.reserved_bytes(config) + problem.laws.card.context_bytes
        assert abs(found.bytes / true - 1) < 0.1
        assert found.low_bytes < found.bytes < found.high_bytes


@pytest.mark.parametrize("name", [n for n in RIVALS if n != "Optuna GP"])
def test_every_rival_ends_within_the_budget_and_repeats_nothing(name: str, problem: Problem) -> None:
    outcome = run_rival(name, problem, seed=0)
    assert 1 <= len(outcome.regrets) <= BUDGET
    assert 0.0 <= outcome.final_regret <= 1.0
    proposed: list[TrialConfig] = []
    rival = RIVALS[name](problem.space, 0)
    config = next(rival)
    try:
        for _ in range(BUDGET):
            proposed.append(config)
            config = rival.send(problem.truth.get(config))
    except StopIteration:
        pass
    assert len({c.key() for c in proposed}) == len(proposed)


def test_bisection_returns_the_largest_batch_that_fits(problem: Problem) -> None:
    tried: list[TrialConfig] = []
    rival = RIVALS["Lightning bisection"](problem.space, 0)
    config = next(rival)
    try:
        while True:
            tried.append(config)
            config = rival.send(problem.truth.get(config))
    except StopIteration:
        pass
    ladder = [c for c in problem.truth if c.but(per_device_train_batch_size=1, gradient_accumulation_steps=1)
              == tried[0].but(per_device_train_batch_size=1, gradient_accumulation_steps=1)]  # fmt: skip
    largest = max(c.per_device_train_batch_size for c in ladder)
    assert max(c.per_device_train_batch_size for c in tried if c in problem.truth) == largest


@pytest.mark.parametrize("predicted", [True, False])
def test_our_search_beats_the_rivals_after_ten_trials(problem: Problem, predicted: bool) -> None:
    ours = run_ours(problem, 0, predicted=predicted)
    assert ours.final_regret <= 0.02
    assert ours.stopped is not None
    for name in ("Optuna TPE", "Optuna random", "hand recipe", "Ludwig doubling"):
        theirs = run_rival(name, problem, 0)
        assert ours.regrets[-1] <= theirs.regrets[min(10, len(theirs.regrets)) - 1] + 0.01


def test_the_report_holds_tables_plots_and_numbers(problem: Problem, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcomes = [run_ours(problem, 0, predicted=True), run_rival("hand recipe", problem, 0)]
    summary = write_report(tmp_path, outcomes, [problem], seeds=1, seconds=1.0)
    text = (tmp_path / "regret.md").read_text(encoding="utf-8")
    assert summary in text
    assert "autofit, memory predicted" in summary
    assert all(
        (tmp_path / f"{n}.png").stat().st_size > 1000 for n in ("regret", "out_of_memory", "device_seconds")
    )
    assert json.loads(json.dumps(outcomes[0].regrets))


def test_grids_of_a_card_and_of_a_cpu_stand_apart_and_one_that_is_not_whole_says_so(problem: Problem, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = problem.landscape
    card = replace(grid, modelled=False, device=replace(grid.device, name="NVIDIA H200"), spec={**grid.spec, "complete": False, "space_size": 999})
    cpu = replace(grid, modelled=False, device=replace(grid.device, kind="cpu", name="a CPU"))
    found = [replace(problem, name=name, landscape=landscape, laws=None) for name, landscape in (("card", card), ("cpu", cpu))]
    outcomes = [run_rival("hand recipe", p, 0) for p in (*found, problem)]
    summary = write_report(tmp_path, outcomes, [*found, problem], seeds=1, seconds=1.0)
    assert [line for line in summary.splitlines() if line.startswith("On ")] == [
        "On modelled landscapes:", "On landscapes recorded on NVIDIA H200:", "On landscapes recorded on a CPU:"
    ]  # fmt: skip
    text = (tmp_path / "regret.md").read_text(encoding="utf-8")
    assert f"- card is on {len(problem.space)} of 999 configurations" in text
    assert "- Landscapes recorded on NVIDIA H200: 1 run of each configuration, pooled." in text
    assert "- Landscapes recorded on a CPU: 1 run of each configuration, pooled: what other work took is in them." in text


@pytest.mark.parametrize("path", sorted(LANDSCAPES.glob("*.json")), ids=lambda path: path.stem)
def test_a_search_on_every_recorded_grid_ends_near_its_best(path: Path) -> None:
    recorded = next((p for p in recorded_problems() if p.name.startswith(f"{path.stem} ")), None)
    if recorded is None:
        pytest.skip("it holds too few configurations for a search to speak of")
    ours = run_ours(recorded, 0, predicted=False)
    assert ours.stopped is not None
    assert ours.final_regret <= 0.05
