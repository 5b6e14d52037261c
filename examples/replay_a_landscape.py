"""Searching on a recorded grid: no device is needed, and what was chosen can be held against the whole record.

    python examples/replay_a_landscape.py grid.json
"""

from __future__ import annotations

import sys

from autofit.problem.spec import SearchSpec, Workload
from autofit.search.tuning import run_search
from autofit.trials.landscape import Landscape

landscape = Landscape.load(sys.argv[1])
workload = Workload(model=str(landscape.spec.get("model") or "recorded"))
spec = SearchSpec(workload=workload, effective_batch=landscape.effective_batch)
result = run_search(spec, landscape=landscape, predict=False)


def recorded_speed(point):
    config = point.config
    return point.measurement.samples_per_second(
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )


fitting = [point for point in landscape.points if point.measurement is not None]
best = max(fitting, key=recorded_speed)
chosen = next(point for point in fitting if point.config == result.best.config)
print(f"chosen after {result.cost.trials} trials of {len(landscape.points)}: {chosen.config.label()}")
print(f"regret against the best of the record: {1 - recorded_speed(chosen) / recorded_speed(best):.2%}")
