"""The regret report: our search and its rivals on the same landscapes, same budgets, many seeds.

    python -m benchmarks.regret [--seeds 20] [--problems N] [--output DIR] [--processes 2]

Writes `regret.md`, `regret.json` and PNG plots to `benchmarks/reports/<date>-regret/`, and prints the summary table last. Everything is
replayed from recorded or modelled grids: no device is needed, and anyone gets the same numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna

from autofit.problem.config import TrialConfig
from autofit.problem.terms import Terms
from autofit.search.search import Search
from autofit.study.journal import open_study
from autofit.study.sampler import CostModelSampler
from autofit.study.study import TrialStudy
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome, Role, TrialRecord
from benchmarks.problems import ModelledForecast, Problem, modelled_problems, recorded_problems
from benchmarks.regret_report import BUDGET, Outcomes, write_report
from benchmarks.rivals import RIVALS, SLOW

SLOW_SEEDS = 1
PREDICTED, UNKNOWN = "autofit, memory predicted", "autofit, unknown model"
ROOT = Path(__file__).parent / "reports"


class _Curve:
    """Collects the three curves of a run."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.regrets: list[float] = []
        self.out_of_memory: list[int] = []
        self.seconds: list[float] = []
        self._best: tuple[float, TrialConfig | None] = (0.0, None)

    def add(self, config: TrialConfig, speed: float | None, seconds: float, *, memory: bool) -> None:
        """One trial."""
        if speed is not None and speed > self._best[0]:
            self._best = (speed, config)
        self.regrets.append(self._problem.regret(self._best[1]))
        self.out_of_memory.append((self.out_of_memory[-1] if self.out_of_memory else 0) + memory)
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + seconds)

    @property
    def final(self) -> float:
        """Regret of the best so far."""
        return self.regrets[-1] if self.regrets else 1.0


def run_ours(problem: Problem, seed: int, *, predicted: bool) -> Outcomes:
    """A whole search by the real coordinator: baselines, proposals, certificate, play-off."""
    limit = problem.memory_limit_bytes
    forecast = ModelledForecast(problem.laws, seed) if predicted and problem.laws is not None else None
    sampler = CostModelSampler(
        problem.space, seed=seed, memory_limit_bytes=limit, memory=forecast, time=forecast
    )
    study = TrialStudy(open_study(None, sampler=sampler, identity={}), problem.space)
    precisions = tuple(dict.fromkeys(c.precision for c in problem.space.configs))
    search = Search(
        terms=Terms(
            effective_batch=problem.landscape.effective_batch,
            memory_limit_bytes=limit,
            trials=BUDGET,
            seed=seed,
            native_precisions=precisions,
            baselines_outside_space=False,
        ),
        space=problem.space,
        study=study,
        runner=ReplayRunner(problem.landscape, seed=seed),
        memory=forecast,
    )
    finding = search.run()
    curve = _Curve(problem)
    for record in study.records:
        if record.role in (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH) and _ran(record):
            memory = record.outcome is Outcome.INFEASIBLE
            curve.add(record.config, record.samples_per_second, record.seconds, memory=memory)
    trials = len(curve.regrets)
    return Outcomes(
        method=PREDICTED if predicted else UNKNOWN,
        problem=problem.name,
        seed=seed,
        regrets=tuple(curve.regrets),
        out_of_memory=tuple(curve.out_of_memory),
        seconds=tuple(curve.seconds),
        stopped=trials if sampler.certificate(study.records) is not None else None,
        final_regret=problem.regret(finding.winner),
        playoff_runs=sum(r.role is Role.PLAYOFF for r in study.records),
    )


def run_rival(name: str, problem: Problem, seed: int) -> Outcomes:
    """A rival until it ends or the budget does."""
    runner, curve = ReplayRunner(problem.landscape, seed=seed), _Curve(problem)
    rival = RIVALS[name](problem.space, seed)
    stopped: int | None = None
    try:
        config = next(rival)
        while len(curve.regrets) < BUDGET:
            result = runner.run(TrialRequest(config=config, memory_limit_bytes=problem.memory_limit_bytes))
            speed = None
            if result.measurement is not None:
                speed = result.measurement.samples_per_second(
                    per_device_train_batch_size=config.per_device_train_batch_size,
                    gradient_accumulation_steps=config.gradient_accumulation_steps,
                )
            curve.add(config, speed, result.seconds, memory=speed is None)
            config = rival.send(speed)
    except StopIteration:
        stopped = len(curve.regrets)
    rival.close()
    return Outcomes(
        method=name,
        problem=problem.name,
        seed=seed,
        regrets=tuple(curve.regrets) or (1.0,),
        out_of_memory=tuple(curve.out_of_memory) or (0,),
        seconds=tuple(curve.seconds) or (0.0,),
        stopped=stopped,
        final_regret=curve.final,
    )


def run_problem(job: tuple[Problem, int]) -> list[Outcomes]:
    """Every method on one problem; the slow ones with fewer seeds."""
    problem, seeds = job
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = [
        run_ours(problem, seed, predicted=predicted)
        for predicted in (True, False)
        for seed in range(seeds)
        if problem.laws is not None or not predicted
    ]
    for name in RIVALS:
        count = seeds if name not in SLOW else min(seeds, SLOW_SEEDS)
        found += [run_rival(name, problem, seed) for seed in range(count)]
    return found


def choose(count: int) -> list[Problem]:
    """All recorded problems, and modelled ones evenly over cards and models up to `count` in all."""
    recorded, modelled = list(recorded_problems()), list(modelled_problems())
    rest = min(len(modelled), max(0, count - len(recorded)))
    return recorded[:count] + [modelled[i * len(modelled) // rest] for i in range(rest)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, write the report, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--problems", type=int, default=24, help="this many; recorded first, modelled ones evenly chosen"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    for name in ("seeds", "problems", "processes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    chosen = choose(options.problems)
    begin = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the children: threads of one would wait for those of another, six times as long
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        groups = pool.map(run_problem, [(p, options.seeds) for p in chosen], chunksize=1)
    outcomes = [outcome for group in groups for outcome in group]
    folder = options.output or ROOT / f"{datetime.date.today().isoformat()}-regret"
    folder.mkdir(parents=True, exist_ok=True)
    data = {"budget": BUDGET, "outcomes": [_rounded(asdict(o)) for o in outcomes]}
    (folder / "regret.json").write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
    seconds = time.monotonic() - begin
    print(write_report(folder, outcomes, chosen, seeds=options.seeds, seconds=seconds))


def _rounded(outcome: dict[str, Any]) -> dict[str, Any]:
    """As the file keeps it: curves of tens of thousands of runs, to what the plots can show."""
    return {
        **outcome,
        "regrets": [round(x, 5) for x in outcome["regrets"]],
        "seconds": [round(x, 2) for x in outcome["seconds"]],
        "final_regret": round(outcome["final_regret"], 5),
    }


def _ran(record: TrialRecord) -> bool:
    return record.outcome is not Outcome.SKIPPED


if __name__ == "__main__":
    main()
