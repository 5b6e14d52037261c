"""Stage *memory*: real counters of many configurations, what was predicted for each, and two allocator histories compared event by event."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autofit.errors import AutofitError, WorkerError
from autofit.forecasts.estimation import asking
from autofit.forecasts.laws import Ask, ClassLaws, Setting, collect, law_class, versions
from autofit.memory.events import Trace
from autofit.memory.law import MemoryLaw
from autofit.problem.spec import Workload
from autofit.processes.protocol import Kind, TrialOrder
from autofit.trials.runner import TrialRequest
from benchmarks.evidence.bench import Bench, Stopwatch, point, record
from benchmarks.evidence.box import Box
from benchmarks.evidence.plan import Case
from benchmarks.evidence.store import Sheet

STEPS = 8  #: what the allocator holds can grow until then
DRY_CAPABILITY = "9.0"
MAX_WORKERS = 12
TRACE_SECONDS = 300.0
TRIALS_SHARE = (
    0.65  #: of the box for real trials; predictions can follow in a later call, or on another machine
)


def planned(bench: Bench) -> list[str]:
    """Keys of this stage."""
    trials, snapshots = bench.plan.memory, bench.plan.snapshots
    keys = [f"trial {case.key}" for case in trials] + [f"snapshot {case.key}" for case in snapshots]
    return [*keys, *(f"predicted {case.key}" for case in trials), "native and patched traces"]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Trials first: only a card can give them."""
    _trials(bench, sheet, box.share(TRIALS_SHARE))
    for number, case in enumerate(bench.plan.snapshots):
        if not sheet.settled(f"snapshot {case.key}") and box.holds(5.0):
            with point(sheet, f"snapshot {case.key}"):
                _snapshot(bench, sheet, box, case, number)
    _predictions(bench, sheet, box)
    if not sheet.settled("native and patched traces") and box.holds(5.0):
        with point(sheet, "native and patched traces"):
            _both_paths(bench, sheet, box, bench.plan.snapshots[0])


def _trials(bench: Bench, sheet: Sheet, box: Box) -> None:
    for case in bench.plan.memory:
        key = f"trial {case.key}"
        if sheet.settled(key):
            continue
        if not box.holds(bench.least_seconds):
            return
        with point(sheet, key):
            _trial(bench, sheet, box, case, key)


def _trial(bench: Bench, sheet: Sheet, box: Box, case: Case, key: str) -> None:
    reason = bench.problem(case.workload, case.config)
    if reason is not None:
        sheet.skip(key, reason)
        sheet.skip(f"predicted {case.key}", reason)
        return
    result = bench.trial(case.workload, case.config, box, optimizer_steps=STEPS)
    model = bench.describe(case.workload)["model"]
    facts = {name: model[name] for name in ("task", "seq_len", "digest", "n_params", "attn_implementation")}
    record(sheet, key, result, case.config, model=case.model, facts=facts)
    bench.say(f"{key}: {result.outcome} in {result.seconds:.1f} s")


def _predictions(bench: Bench, sheet: Sheet, box: Box) -> None:
    for workload in dict.fromkeys(case.workload for case in bench.plan.memory):
        cases = [
            c for c in bench.plan.memory if c.workload == workload and not sheet.settled(f"predicted {c.key}")
        ]
        if not cases:
            continue
        workers = worker_count()
        for chunk in _chunks(cases, 2 * workers):
            if not box.holds(3.0):
                return
            with point(sheet, f"predicted {chunk[0].key}"):
                _predict(bench, sheet, box, _setting(bench, workload), chunk, workers)


def _predict(
    bench: Bench, sheet: Sheet, box: Box, setting: Setting, cases: Sequence[Case], workers: int
) -> None:
    """As the search predicts, beside the card; where that fails, in a process that sees no card, and that is said."""
    watch, configs = Stopwatch(), [case.config for case in cases]
    single = any(config.per_device_train_batch_size == 1 for config in configs)
    trouble: str | None = None
    laws: dict[str, ClassLaws] = {}
    try:
        laws = collect(setting, configs, _ask(bench, setting.workload, box), workers=workers, single=single)
        if all(found.laws is None for found in laws.values()):
            trouble = next(iter(laws.values())).reason
    except WorkerError as error:
        trouble = f"{error.message}: {(error.hint or '')[-500:]}"
    if trouble is not None and not box.holds():
        return  # it was the box that ended it: the next call asks again
    if trouble is not None and bench.on_cuda:
        sheet.note(
            f"tracing beside the card failed ({trouble}); predictions come from a process that sees no card"
        )
        try:
            with asking(setting.workload) as (_, ask):
                laws = collect(setting, configs, ask, workers=workers, single=single)
        except WorkerError as error:  # the other models' predictions still count
            trouble = f"{trouble}; where no card is seen: {error.message}: {(error.hint or '')[-500:]}"
    bench.say(f"traced {len(laws)} classes of {cases[0].model} in {watch.seconds:.1f} s")
    for case in cases:
        if law_class(setting, case.config) in laws:
            sheet.put(f"predicted {case.key}", **predicted(setting, laws, case))
        else:
            sheet.fail(f"predicted {case.key}", str(trouble))


def predicted(setting: Setting, laws: dict[str, ClassLaws], case: Case) -> dict[str, Any]:
    """Peaks of one configuration, as the search is told them and as the replay at this very batch has them."""
    found = laws[law_class(setting, case.config)]
    row: dict[str, Any] = {
        "model": case.model,
        "config": case.config.to_json(),
        "versions": versions(),
        "reason": found.reason,
    }
    if found.laws is None:
        return row | {"predicted": None, "replayed": None}
    law, batch = found.laws.memory, case.config.per_device_train_batch_size
    watch, peaks, seen = Stopwatch(), law.predict(batch), law.replay(batch)
    return row | {
        "predicted": {name: getattr(peaks, name) for name in peaks.__slots__},
        "replayed": {
            "peak_allocated_bytes": seen.peak_allocated_bytes,
            "peak_reserved_bytes": seen.peak_reserved_bytes,
        },
        "sdpa": dict(law.base.facts.sdpa),
        "trace_notes": list(law.base.facts.notes),
        "replay_seconds": watch.seconds,
    }


def _snapshot(bench: Bench, sheet: Sheet, box: Box, case: Case, number: int) -> None:
    key, path = f"snapshot {case.key}", bench.folder.file("snapshots", f"history-{number}.json")
    reason = bench.problem(case.workload, case.config)
    if reason is not None:
        sheet.skip(key, reason)
        return
    order = TrialOrder(
        request=TrialRequest(config=case.config, optimizer_steps=2),
        workload=case.workload.to_json(),
        device=bench.device,
        context_bytes=bench.machine.context_bytes,
    )
    path.unlink(missing_ok=True)
    *found, end = bench.inside("snapshot", {"trial": order.to_json(), "path": str(path)}, box)
    if end["status"] != 0 or not path.exists() or not found:
        sheet.fail(key, f"status {end['status']}: {end['log']}")
        return
    try:
        trace = exact_trace(bench, box, case)
    except AutofitError as error:  # the predictions that follow still count
        sheet.fail(key, f"recorded, but not traced: {error.message}: {(error.hint or '')[-500:]}")
        return
    packed = bench.folder.file("snapshots", f"traced-{number}.json.gz")
    packed.write_bytes(gzip.compress(json.dumps(trace.to_json(), separators=(",", ":")).encode()))
    sheet.put(
        key,
        config=case.config.to_json(),
        model=case.model,
        recorded_by=found[0],
        files=[path.name, packed.name],
    )
    bench.say(f"{key}: {found[0]['births']} births recorded")


def exact_trace(bench: Bench, box: Box, case: Case) -> Trace:
    """Our trace of `case` at its own batch, for the device at hand.

    Raises:
        AutofitError: it cannot be traced.
    """
    request = replace(
        _setting(bench, case.workload).request(case.config), device_type="cuda" if bench.on_cuda else "cpu"
    )
    answer = _ask(bench, case.workload, box)({"requests": [request.to_json()], "batches": [1, 2, 4]})[
        "answers"
    ][0]
    if answer["law"] is not None:
        return MemoryLaw.from_json(answer["law"]).trace(case.config.per_device_train_batch_size)
    if answer["trace"] is None:
        raise AutofitError(f"{case.key} cannot be traced: {answer['reason']}")
    return Trace.from_json(answer["trace"])


def _both_paths(bench: Bench, sheet: Sheet, box: Box, case: Case) -> None:
    """Is a trace made beside a usable card the same as one made where there is none?"""
    if not bench.on_cuda:
        sheet.skip("native and patched traces", "needs a CUDA device")
        return
    setting = _setting(bench, case.workload)
    payload = {"requests": [setting.request(case.config).to_json()], "batches": [2, 4]}
    watch = Stopwatch()
    here, beside = _ask(bench, case.workload, box)(payload)["answers"][0], watch.seconds
    with asking(case.workload) as (_, ask):
        watch = Stopwatch()
        there, apart = ask(payload)["answers"][0], watch.seconds
    same = (
        here["law"] is not None
        and there["law"] is not None
        and here["law"]["base"]["sizes"] == there["law"]["base"]["sizes"]
    )
    sheet.put(
        "native and patched traces",
        config=case.config.to_json(),
        same_births=same,
        same_events=same and here["law"]["base"]["events"] == there["law"]["base"]["events"],
        reasons=[here["reason"], there["reason"]],
        seconds=[beside, apart],
    )


def _setting(bench: Bench, workload: Workload) -> Setting:
    capability = bench.machine.compute_capability or DRY_CAPABILITY
    return Setting(workload=workload, facts=bench.describe(workload)["model"], compute_capability=capability)


def _ask(bench: Bench, workload: Workload, box: Box) -> Ask:
    def ask(payload: dict[str, Any]) -> dict[str, Any]:
        bench.runner.workload = workload
        return bench.runner.ask(Kind.ESTIMATE, payload, timeout=box.timeout(TRACE_SECONDS, least=15.0))

    return ask


def worker_count() -> int:
    """Processes that trace at a time."""
    return max(1, min(MAX_WORKERS, (os.cpu_count() or 2) - 1))


def _chunks(cases: Sequence[Case], size: int) -> Iterable[Sequence[Case]]:
    return (cases[start : start + size] for start in range(0, len(cases), size))
