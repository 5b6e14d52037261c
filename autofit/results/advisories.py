"""What a reader of a result must be told, computed once from the records and stored in the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.results.loader import loader_facts, without_settings
from autofit.results.result import Estimate, TuneResult, Warning
from autofit.results.wording import BASELINE_NAMES, format_factor, format_percent, format_speed, says
from autofit.trials.estimates import counted_of
from autofit.trials.trial import (
    OUTSIDE,
    PREPARATION,
    SEARCH_ROLES,
    Outcome,
    Reason,
    Role,
    TrialRecord,
)
from autofit.units import format_bytes, format_seconds

NOISY_SPREAD = 0.15  #: MAD over median of micro-steps
PRESSURE_PERCENT = 20.0
INPUT_BOUND_SHARE = 0.2
PREDICTION_ERROR = 0.05
DRIFT = 0.1  #: logarithm of a machine's speed in the search and after it
PREPARATION_SHARE, PREPARATION_SECONDS = 0.5, 5.0  #: of the trials' time, and each time, above which a script's preparation is worth a word


def of_device(device: Device) -> list[Warning]:
    """A busy card, or no card at all."""
    found = []
    if device.kind == "cpu":
        found.append(
            Warning(
                code="cpu",
                message="measured on a CPU: the answer holds for training on this CPU only",
                next_step="run the same command on the GPU machine that will train",
            )
        )
    if device.holders:
        held = ", ".join(
            f"{h.name} (pid {h.pid}{', ' + format_bytes(h.used_bytes) if h.used_bytes else ''})" for h in device.holders
        )
        found.append(
            Warning(
                code="busy_device",
                message=f"other processes hold memory of {device.name}: {held}",
                next_step="end them and search again: they cost memory and speed",
            )
        )
    return found


def of_winner(best: Estimate, records: Sequence[TrialRecord], *, confirmed: bool, interrupted: bool) -> list[Warning]:
    """What weakens the answer itself."""
    own = [r for r in records if r.config == best.config and r.measurement is not None]
    tuned = any(r.role is Role.LOADER and not r.interrupted for r in records)
    found = [*_noise(own), *_input_bound(own, tuned=tuned), *_few_rows(best, own)]
    if interrupted:
        found.append(
            Warning(code="interrupted", message="the search was interrupted: this is the best so far", next_step="the same command with --study goes on")
        )
    if not confirmed:
        found.append(_not_confirmed(best, records))
    if any((r.measurement.facts or {}).get("checkpointing_switched_off") for r in own if r.measurement is not None):
        found.append(
            Warning(
                code="checkpointing_switched_off",
                message="checkpointing is on in the model before its arguments have a say, and the winner trains without: they do not switch it off",
                next_step="call model.activation_checkpointing_disable() before the training, as the trials did",
            )
        )
    late = sum(int(((r.measurement.facts or {}).get("compile") or {}).get("measured_steps_that_compiled", 0)) for r in own if r.measurement)
    if late:
        found.append(
            Warning(
                code="recompiles",
                message=f"the winner went on compiling in {late} measured steps: each new shape of a batch is compiled anew",
                next_step="pad to fixed lengths (pad_to_multiple_of), or search without --tune compile",
            )
        )
    if any(r.measurement is not None and r.measurement.skipped_steps for r in own):
        found.append(
            Warning(
                code="skipped_steps",
                message="the fp16 loss scaler skipped optimizer steps at the start, as it does while it finds its scale",
            )
        )
    return found


def failed_confirmations(config: TrialConfig, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Runs of a configuration at full accumulation and longest length that ended with a failure of their own."""
    own = [r for r in records if r.config == config and r.role is Role.CONFIRMATION]
    return [r for r in own if r.failure is not None and not r.interrupted]


def _not_confirmed(best: Estimate, records: Sequence[TrialRecord]) -> Warning:
    failed = failed_confirmations(best.config, records)
    message, step = "the winner completed no run at full accumulation and longest length", "autofit confirm best.json"
    if failed and failed[-1].failure is not None:
        times = f" {len(failed)} times" if len(failed) > 1 else ""
        message = f"the winner was run{times} at full accumulation and longest length, and failed: {says(failed[-1].failure)}"
        step = "look at trials[].failure in the result file before you train with it; autofit confirm best.json runs it again"
    return Warning(code="not_confirmed", message=message, next_step=step)


def of_records(records: Sequence[TrialRecord]) -> list[Warning]:
    """Trials that failed, predictions that were off, and time that went into a script's preparation."""
    found = []
    ended = [r for r in records if not r.after_search]  # those have warnings of their own
    failed = [r for r in ended if r.outcome is Outcome.FAILED and r.failure and r.failure.reason is not Reason.INTERRUPTED]
    if failed:
        first = failed[0].failure
        assert first is not None
        found.append(
            Warning(
                code="failed_trials",
                message=f"{len(failed)} trial{'s' if len(failed) > 1 else ''} failed for another reason than memory: {first.message}",
                next_step="the tracebacks are in the result file under trials[].failure",
            )
        )
    found += _preparation(records)
    worst = max(((abs(e), e, r) for r in records if (e := prediction_error(r)) is not None), default=None, key=lambda x: x[0])
    if worst is not None and worst[0] > PREDICTION_ERROR:
        found.append(
            Warning(
                code="prediction_off",
                message=f"memory was predicted {100 * worst[1]:+.0f} % off for {worst[2].config.label()}",
                next_step="the measured numbers count; the prediction only ordered the trials",
            )
        )
    return found


def _preparation(records: Sequence[TrialRecord]) -> list[Warning]:
    told = [(float(seconds), r.seconds) for r in records if r.measurement and (seconds := (r.measurement.facts or {}).get(PREPARATION))]
    prepared, whole = (sum(times) for times in zip(*told)) if told else (0.0, 0.0)
    if prepared <= PREPARATION_SHARE * whole or prepared <= PREPARATION_SECONDS * len(told):
        return []
    return [
        Warning(
            code="script_preparation",
            message=f"{100 * prepared / whole:.0f} % of the time of trials went into what the script does before it trains, {format_seconds(prepared / len(told))} each time",
            next_step="have the script keep what it prepares (datasets.map does, of data that was loaded from files), or search with fewer rows",
        )
    ]


def prediction_error(record: TrialRecord) -> float | None:
    """(predicted - measured) / measured device bytes; None when one of them is missing."""
    if record.measurement is None or record.predicted_bytes is None:
        return None
    needed = record.measurement.memory.needed_bytes
    return None if not needed else (record.predicted_bytes - needed) / needed


def _noise(own: Sequence[TrialRecord]) -> list[Warning]:
    spreads = [_spread(r.measurement.typical_micro_seconds) for r in own if r.measurement and r.role is not Role.CONFIRMATION]
    pressures = [float((r.measurement.facts or {}).get("cpu_pressure_percent", 0.0)) for r in own if r.measurement]
    if spreads and statistics.median(spreads) > NOISY_SPREAD:
        message = f"the machine is noisy: micro-steps of one trial spread by {100 * statistics.median(spreads):.0f} %"
    elif pressures and max(pressures) > PRESSURE_PERCENT:
        message = f"other work competed for the processors ({max(pressures):.0f} % of the time)"
    else:
        return []
    return [Warning(code="noise", message=message, next_step="search again on a quiet machine")]


def _few_rows(best: Estimate, own: Sequence[TrialRecord]) -> list[Warning]:
    known = [((r.measurement.facts or {}).get("loader") or {}).get("rows") for r in own if r.measurement]
    rows, wanted = next((n for n in known if isinstance(n, int)), None), best.config.effective_batch()
    if rows is None or rows >= wanted:
        return []
    return [
        Warning(
            code="few_rows",
            message=f"the training data has {rows} rows, fewer than the effective batch of {wanted}: it was repeated, which a training does not do",
            next_step="search with the data that will be trained on",
        )
    ]


def _spread(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle if middle > 0 else 0.0


def _input_bound(own: Sequence[TrialRecord], *, tuned: bool) -> list[Warning]:
    shares = [m.t_fetch / (m.t_micro + m.t_fetch) for r in own if (m := r.measurement) is not None and m.t_micro + m.t_fetch > 0]
    if not shares or statistics.median(shares) <= INPUT_BOUND_SHARE:
        return []
    repeats = any(loader_facts(r).get("repeats") for r in own)
    workers = "divide the stream among workers (torch.utils.data.get_worker_info) and raise" if repeats else "raise"
    return [
        Warning(
            code="input_bound",
            message=f"{100 * statistics.median(shares):.0f} % of the time goes into fetching data, not into training",
            next_step="prepare the data beforehand" if tuned else f"{workers} dataloader_num_workers, or prepare the data beforehand",
        )
    ]


def of_baselines(result: TuneResult) -> list[Warning]:
    """A baseline that the search was told to leave out, and that is faster than what it found."""
    faster = [
        (BASELINE_NAMES.get(name, name), baseline.estimate)
        for name, baseline in result.baselines.items()
        if baseline.estimate is not None and baseline.estimate.interval.low > result.best.interval.high
        if any(r.config == baseline.config and r.why == OUTSIDE for r in result.trials)
    ]
    return [
        Warning(
            code="faster_baseline",
            message=f"faster than the winner, and outside of what was to be searched: {name} ({estimate.config.label()}), at {format_speed(estimate.samples_per_second)} samples/s",
            next_step="search again with fewer of --precision, --optim, --checkpointing and --batch-size",
        )
        for name, estimate in sorted(faster, key=lambda found: -found[1].samples_per_second)[:1]
    ]


def of_playoff(result: TuneResult) -> list[Warning]:
    """A play-off that ended before the winner and those not separated from it had all played: runs of different times stand against each other."""
    played = {r.config for r in result.trials if r.role is Role.PLAYOFF and r.outcome is Outcome.COMPLETED}
    contenders = [e.config for e in (result.best, *result.tied)]
    without = [c.label() for c in contenders if c not in played]
    if result.settled or not 0 < len(without) < len(contenders):
        return []
    return [
        Warning(
            code="half_a_round",
            message=f"the play-off ended before all had run in it: {without[0]}{f' and {len(without) - 1} more' if len(without) > 1 else ''} ran in the search only, "
            "the others again later, so that what the machine did in between is part of the difference",
            next_step="give it more --timeout; with --study the same command goes on",
        )
    ]


def of_drift(result: TuneResult) -> list[Warning]:
    """A machine that was faster or slower when the winner ran last than when its baselines did: run against run of their time says more."""
    best, searched = result.best, without_settings(result.best.config)
    done = [r for r in result.trials if r.outcome is Outcome.COMPLETED]
    last = counted_of([r for r in done if r.config == best.config])
    if searched != best.config:  # settings of the loader came after all others
        first, met = counted_of([r for r in done if r.config == searched]), set[TrialConfig]()
    else:
        first, met = [r for r in done if r.config == searched and r.role in SEARCH_ROLES], {r.config for r in done if r.role is Role.PLAYOFF}
    beside = [(BASELINE_NAMES.get(n, n), b.estimate) for n, b in result.baselines.items() if b.estimate is not None and b.config not in (*met, searched, best.config)]
    if not (first and beside):
        return []
    change = math.log(_micro_seconds(first) / _micro_seconds(last))
    interval = first[0].interval
    if abs(change) < DRIFT or (searched == best.config and interval is not None and interval.overlaps(best.interval)):
        return []
    speed = statistics.fmean(s for r in first if (s := r.samples_per_second) is not None)
    share = format_percent(math.expm1(abs(change))).removeprefix("+")
    ratios = " and ".join(f"{format_factor(speed / e.samples_per_second)} {name}" for name, e in beside)
    return [
        Warning(
            code="drift",
            message=f"the machine was {share} {'faster' if change > 0 else 'slower'} when the winner ran last than beside its baselines, which its speed-ups hold: "
            f"at their time {searched.label()} ran at {format_speed(speed)} samples/s, {ratios}",
            next_step="search again on a quiet machine",
        )
    ]


def _micro_seconds(records: Sequence[TrialRecord]) -> float:
    return statistics.fmean(r.measurement.t_micro for r in records if r.measurement is not None)


def of_numerics(result: TuneResult) -> list[Warning]:
    """A winner that changes the mathematics of training, with the fastest that does not beside it."""
    reasons = result.changes(result.best.config)
    if not reasons:
        return []
    code = "pure_bf16" if result.best.config.precision is Precision.PURE_BF16 else "other_optimizer"
    kept = result.fastest_kept
    beside = "no configuration that keeps it was measured"
    if kept is not None:
        share = kept.samples_per_second / result.best.samples_per_second - 1
        beside = f"the fastest measured that keeps it is {kept.config.label()}, at {format_speed(kept.samples_per_second)} samples/s ({format_percent(share)})"
    return [
        Warning(
            code=code,
            message=f"the winner changes the mathematics of training: {'; '.join(reasons)}; {beside}",
            next_step="have the training keep its weights in float32, or compare loss curves before you rely on it"
            if result.best.config.precision in result.recast
            else "search again with --keep-numerics, or compare loss curves before you rely on it",
        )
    ]
