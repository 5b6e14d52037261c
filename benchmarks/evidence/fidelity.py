"""Stage *fidelity*: is a trial of a second as fast as the training it stands for? Long runs beside trials, and `confirm` of every winner."""

from __future__ import annotations

import statistics
from typing import Any

from autofit.problem.config import TrialConfig
from autofit.results.result import load
from autofit.search.confirmation import confirm
from autofit.trials.measurement import Measurement
from benchmarks.evidence.bench import Bench, outcome_row, point, record
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import Case
from benchmarks.evidence.store import DONE, FAILED, Sheet

LEAST_STEPS = 20  #: a shorter run is no long run
DRY_LEAST_STEPS = 3
LONG_SHARE = 0.75  #: of the box for long runs; the rest for confirmations
START_SECONDS = 8.0  #: what a run costs beside its steps
PARTS = 10  #: of a long run, for its drift


def planned(bench: Bench) -> list[str]:
    """Keys of this stage."""
    return [
        *(f"long {case.key}" for case in bench.plan.fidelity),
        *(f"confirm {name}" for name in _winners(bench)),
    ]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Long runs, those of least cost first, then confirmations."""
    inner = box.share(LONG_SHARE)
    open_cases = [case for case in bench.plan.fidelity if not sheet.settled(f"long {case.key}")]
    for position, case in enumerate(open_cases):
        if not inner.holds(START_SECONDS if bench.on_cuda else 2.0):
            break
        with point(sheet, f"long {case.key}"):
            _long(bench, sheet, inner.share(1 / (len(open_cases) - position)), case)
    _confirm_all(bench, sheet, box)


def _long(bench: Bench, sheet: Sheet, box: Box, case: Case) -> None:
    """A trial as the search runs it, the long run, and the trial again."""
    key = f"long {case.key}"
    reason = bench.problem(case.workload, case.config)
    if reason is not None:
        sheet.skip(key, reason)
        return
    before = bench.trial(case.workload, case.config, box)
    if before.measurement is None:
        record(sheet, key, before, case.config)
        return
    steps = affordable_steps(
        before.measurement, case.config, box.left - _start(bench) - before.seconds, bench.plan.long_steps
    )
    if steps < (LEAST_STEPS if bench.on_cuda else DRY_LEAST_STEPS):
        sheet.fail(key, f"only {steps} optimizer steps would have fitted into the box")
        return
    result = bench.trial(case.workload, case.config, box, most=600.0, optimizer_steps=steps, full_length=True)
    if result.measurement is None:
        record(sheet, key, result, case.config)
        return
    after = bench.trial(case.workload, case.config, box)
    sheet.put(
        key,
        model=case.model,
        steps=steps,
        planned_steps=bench.plan.long_steps,
        trial_before=outcome_row(before, case.config),
        long=outcome_row(result, case.config),
        trial_after=outcome_row(after, case.config),
        long_run=overall(result.measurement, case.config),
    )
    bench.say(f"{key}: {steps} steps in {result.seconds:.0f} s")


def affordable_steps(measurement: Measurement, config: TrialConfig, seconds: float, most: int) -> int:
    """Optimizer steps of `config` that fit into `seconds`, at most `most`."""
    return max(0, min(most, int(0.85 * seconds / step_seconds(measurement, config))))


def step_seconds(measurement: Measurement, config: TrialConfig) -> float:
    """Seconds of one optimizer step at the configuration's own accumulation."""
    micro = measurement.t_micro + measurement.t_fetch
    return config.gradient_accumulation_steps * micro + measurement.t_update


def overall(measurement: Measurement, config: TrialConfig) -> dict[str, Any]:
    """Throughput of a run from the wall time of its steps, by no formula: mean, and median of each tenth.

    The three times of a step add up to its wall time exactly (see `workload.clock`); the first step is not among them.
    """
    accumulation = config.gradient_accumulation_steps
    micro = measurement.micro_step_seconds
    walls = [
        sum(micro[row * accumulation : (row + 1) * accumulation]) + accumulation * fetch + update
        for row, (fetch, update) in enumerate(zip(measurement.fetch_seconds, measurement.update_seconds))
    ]
    batch = config.effective_batch()
    size = max(1, len(walls) // PARTS)
    parts = [walls[start : start + size] for start in range(0, len(walls) - size + 1, size)]
    return {
        "measured_steps": len(walls),
        "seconds": sum(walls),
        "samples_per_second": batch * len(walls) / sum(walls),
        "samples_per_second_by_part": [batch / statistics.median(part) for part in parts],
    }


def _winners(bench: Bench) -> list[str]:
    directory = bench.folder.path / "searches"
    return sorted(path.stem for path in directory.glob("*.json"))


def _confirm_all(bench: Bench, sheet: Sheet, box: Box) -> None:
    names = [name for name in _winners(bench) if not sheet.settled(f"confirm {name}")]
    for name in names:
        if not box.holds(2 * START_SECONDS if bench.on_cuda else 2.0):
            return
        with point(sheet, f"confirm {name}"):
            _confirm(bench, sheet, box, name)


def _confirm(bench: Bench, sheet: Sheet, box: Box, name: str) -> None:
    result = load(bench.folder.path / "searches" / f"{name}.json")
    config, speed = result.best.config, result.best.samples_per_second
    room = box.left - 2 * _start(bench)
    steps = max(2, min(bench.plan.confirm_steps, int(0.85 * room * speed / config.effective_batch())))
    said: list[str] = []
    found = confirm(result, steps=steps, timeout_seconds=box.timeout(600.0), say=said.append)
    row = outcome_row(found, config)
    if found.measurement is not None:
        row["long_run"] = overall(found.measurement, config)
    sheet.put(
        f"confirm {name}",
        FAILED if str(found.outcome) == "failed" else DONE,
        steps=steps,
        planned_steps=bench.plan.confirm_steps,
        searched_samples_per_second=speed,
        limit_bytes=result.memory_limit_bytes,
        said=said,
        error=None if found.failure is None else found.failure.message,
        **row,
    )
    bench.say(f"confirm {name}: {found.outcome} over {steps} steps")


def _start(bench: Bench) -> float:
    return START_SECONDS if bench.on_cuda else 0.5
