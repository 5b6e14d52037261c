"""The details of a report as plain lines: every configuration's fate, what each knob was worth, what was not tried, why it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.errors import UserError
from autofit.problem.config import TrialConfig
from autofit.reports.report_after import after_trials
from autofit.results.knob_worth import Evidence, Share, ValueWorth, Waterfall, knob_worths, waterfall
from autofit.results.loader import without_settings
from autofit.results.result import Estimate, TuneResult, by_config, estimates
from autofit.results.wording import (
    BASELINE_NAMES,
    ROLE_NAMES,
    Column,
    format_factor,
    format_interval,
    format_percent,
    format_speed,
    knob_name,
    knob_value,
    says,
    standing,
    text_table,
    wrapped,
)
from autofit.trials.trial import Outcome, Role, TrialRecord
from autofit.units import format_bytes, format_seconds

Found = Mapping[str, Estimate]  #: configuration key -> what is known of it, see `knob_worth.measured`
WIDE = 110  #: from this width on, tables have all their columns
UNTESTED_REASONS: Mapping[str, str] = {
    "predicted_too_big": "predicted not to fit",
    "dominated": "cannot fit: they need at least as much memory as one that did not",
    "departs_from_fp32": "in a precision that was found to depart from fp32",
    "not_promising": "the search ended first",
    "not_promising_certified": "could run, but are not expected to win: see below",
}


def peers(result: TuneResult) -> tuple[Estimate, ...]:
    """Of those that the play-off did not separate from the winner the ones that its figures do not either; all of them, where it was cut off."""
    return tuple(e for e in result.tied if not result.settled or e.interval.overlaps(result.best.interval))


def measured_lines(result: TuneResult, found: Found, width: int, limit: int | None) -> list[str]:
    """One row per configuration that completed and never failed to fit, fastest first."""
    groups = by_config(result.trials)
    ranked = sorted(found.values(), key=lambda e: (e.config != result.best.config, -e.samples_per_second))
    rows = [_measured_row(result, e, groups.get(e.config.key(), [])) for e in ranked[:limit]]
    wide = width >= WIDE
    columns = [
        Column(title="#", right=True),
        Column(title="configuration", folds=True),
        Column(title="roles" if wide else "role", folds=wide),
        Column(title="runs", right=True),
        Column(title="samples/s", right=True),
        Column(title="95 %" if wide else "+-", right=True),
        Column(title="memory", right=True),
        Column(title="predicted", right=True),
        Column(title="error", right=True),
    ]
    kept = [i for i in range(len(columns)) if wide or columns[i].title != "predicted"]
    cells = [[(row[i][wide] if isinstance(row[i], tuple) else str(row[i])) for i in kept] for row in rows]
    lines = text_table([columns[i] for i in kept], cells, width, gap=2 if wide else 1)
    legend = ["* the winner"]
    if peers(result):
        legend.append("= tied with it" if result.settled else "= not separated from it yet")
    if any(result.changes(e.config) for e in ranked[:limit]):
        legend.append(f"~ changes the mathematics of training (against {result.reference_optim})")
    if any(row[-1] for row in rows):
        legend.append("error: of the predicted memory")
    return [*lines, *more(len(ranked) - len(rows)), *wrapped("; ".join(legend), width, indent="  ")]


def _measured_row(
    result: TuneResult, estimate: Estimate, records: Sequence[TrialRecord]
) -> list[str | tuple[str, str]]:
    """Cells; a pair is (narrow, wide)."""
    config, speed, interval = estimate.config, estimate.samples_per_second, estimate.interval
    tied = any(e.config == config for e in peers(result))
    mark = "*" if config == result.best.config else "=" if tied else ""
    mark += "~" if result.changes(config) else ""
    roles = dict.fromkeys(ROLE_NAMES[r.role] for r in records) or {"": None}
    needed = estimate.memory.needed_bytes
    predicted = next((r.predicted_bytes for r in records if r.predicted_bytes is not None), None)
    return [
        mark + (str(records[0].number) if records else ""),
        config.label(),
        (next(iter(roles)), ", ".join(roles)),
        str(len(records)),
        format_speed(speed),
        (
            ""
            if interval.low == interval.high
            else "?"
            if not interval.known
            else f"{(interval.high - interval.low) / 2 / speed:.1%}".replace("%", " %"),
            format_interval(interval),
        ),
        "" if needed is None else format_bytes(needed),
        "" if predicted is None else format_bytes(predicted),
        "" if predicted is None or not needed else format_percent(predicted / needed - 1),
    ]


def unmeasured_lines(result: TuneResult, found: Found, width: int, limit: int | None) -> list[str]:
    """One row per configuration without a speed: first those that did not fit, then those that failed, then those skipped. One that failed
    in some of its runs and has a speed from others is among those that failed, once per role."""
    ended = []
    for key, records in by_config(result.trials).items():
        if key in found:
            failed = [r for r in records if r.outcome is Outcome.FAILED and not r.interrupted]
            ended += list({r.role: r for r in failed}.values())
        else:
            # Without a failure of its own it completed in a precision that was then found unsound.
            told = [r for r in records if r.failure is not None] or records
            ended.append(min(told, key=lambda r: (standing(r), r.number)))
    ended.sort(key=lambda r: (standing(r), r.number))
    if not ended:
        return []
    rows = []
    for record in ended[:limit]:
        if record.failure is None:
            rows.append([str(record.number), record.config.label(), f"not sound: {record.config.precision} was found to depart from fp32"])
            continue
        foretold = record.predicted_bytes is not None and record.outcome is not Outcome.SKIPPED
        predicted = f"predicted {format_bytes(record.predicted_bytes or 0)}" if foretold else ""
        said = says(record.failure, predicted)
        if record.config.key() in found:
            said = f"{ROLE_NAMES[record.role]} run, others completed: {said}"
        rows.append([str(record.number), record.config.label(), said])
    columns = [
        Column(title="#", right=True),
        Column(title="configuration", folds=True),
        Column(title="what became of it", folds=True),
    ]
    return [*text_table(columns, rows, width), *more(len(ended) - len(rows))]


def more(left_out: int) -> list[str]:
    """What stands for rows that are not shown."""
    return [f"  ... and {left_out} more: autofit show --all"] if left_out > 0 else []


def knob_lines(result: TuneResult, found: Found, width: int) -> list[str]:
    """What each knob was worth, by value and as a walk from the baseline."""
    worths = knob_worths(result, found)
    if not worths:
        return ["  no knob took more than one value in the trials that ran"]
    columns = [
        Column(title="knob"),
        Column(title="best speed measured with each value, winner = 1", folds=True),
    ]
    rows = [[knob_name(w.knob), ", ".join(_worth(w.knob, value) for value in w.values)] for w in worths]
    lines = text_table(columns, rows, width)
    fall = waterfall(result, found)
    if fall is None:
        return [
            *lines,
            "",
            *wrapped("Without a baseline that ran, the gain cannot be shared out.", width, indent="  "),
        ]
    return [*lines, "", *_waterfall_lines(fall, width)]


def _worth(knob: str, worth: ValueWorth) -> str:
    name = knob_value(knob, worth.value)
    if worth.relative is not None:
        return f"{name} {worth.relative:.2f}"
    if worth.departed and not worth.unsound and knob != "precision":
        return f"{name} ran only in a precision that departs from fp32"
    what = "train soundly" if worth.unsound or worth.departed else "fit" if worth.misfits else "complete"
    return f"{name} did not {what}"


def _waterfall_lines(found: Waterfall, width: int) -> list[str]:
    baseline = BASELINE_NAMES[found.baseline]
    if not found.shares:
        return wrapped(f"The winner is {baseline}: no knob was changed.", width, indent="  ")
    start, end = found.start.samples_per_second, found.end.samples_per_second
    head = f"From {baseline} to the winner: {format_speed(start)} to {format_speed(end)} samples/s, {format_factor(end / start)}"
    columns = [
        Column(title="changed", folds=True),
        Column(title="speed", right=True),
        Column(title="how known", folds=True),
    ]
    rows = [[_changed(share), format_factor(share.factor), _how_known(share)] for share in found.shares]
    lines = [*wrapped(head, width, indent="  "), *text_table(columns, rows, width)]
    if found.fitted_trials:
        check = (
            f"its typical miss is {found.miss:.1%}".replace("%", " %")
            if found.miss is not None
            else "no trial is left to check it"
        )
        note = f"Fitted: averaged over all orders from an additive fit of {found.fitted_trials} measured configurations; {check}."
        lines += wrapped(note, width, indent="  ")
    return lines


def _changed(share: Share) -> str:
    parts = [
        f"{knob_name(c.knob)} {knob_value(c.knob, c.before)} -> {knob_value(c.knob, c.after)}"
        for c in share.changes
    ]
    return " and ".join(parts)


def _how_known(share: Share) -> str:
    together = ", cannot be told apart" if len(share.changes) > 1 else ""
    return ("measured" if share.evidence is Evidence.MEASURED else "fitted") + together


def left_out_lines(result: TuneResult, width: int) -> list[str]:
    """Choices that are not in the space, and configurations that were not run, with reasons."""
    lines = []
    if result.removals:
        rows = [[knob_name(r["knob"]), str(r["value"]), r["reason"]] for r in result.removals]
        columns = [Column(title="not searched"), Column(title="value"), Column(title="because", folds=True)]
        lines += text_table(columns, rows, width)
    counts = {reason: count for reason, count in result.untested.items() if count}
    if counts:
        certified = "_certified" if result.certificate is not None else ""
        rows = [[str(count), _untested(reason, certified)] for reason, count in counts.items()]
        columns = [Column(title="configurations", right=True), Column(title="not run because", folds=True)]
        lines += ([""] if lines else []) + text_table(columns, rows, width)
    return lines


def _untested(reason: str, suffix: str) -> str:
    return UNTESTED_REASONS.get(reason + suffix) or UNTESTED_REASONS.get(reason) or reason.replace("_", " ")


def ending_lines(result: TuneResult, width: int) -> list[str]:
    """Why the search ended, and the closest of what it left."""
    certificate = result.certificate or {}
    sentences = dict.fromkeys(str(text) for text in (result.stopped, certificate.get("statement")) if text)
    told = [*sentences, *_measured_best(result, certificate)]
    lines = [line for text in told for line in wrapped(sentence(text), width, indent="  ")]
    rows = [_contender_row(c) for c in certificate.get("contenders") or ()]
    if rows:
        columns = [
            Column(title="closest of what was left", folds=True),
            Column(title="predicted samples/s", right=True),
            Column(title="chance to fit", right=True),
            Column(title="to win", right=True),
        ]
        lines += ["", *text_table(columns, rows, width)]
    return lines


def _measured_best(result: TuneResult, certificate: Mapping[str, Any]) -> list[str]:
    """How the winner compares with the configuration that the certificate is about, where that is another: what links the two is measured."""
    winner, named = result.best, certificate.get("best")
    known = [e for e in estimates(result.trials).values() if e.config.to_json() == named]
    if not known or known[0].config == without_settings(winner.config):
        return []
    return [f"{known[0].config.label()} was measured at {format_speed(known[0].samples_per_second)} samples/s, the winner at {format_speed(winner.samples_per_second)}"]


def _contender_row(contender: Mapping[str, Any]) -> list[str]:
    low, high = contender["interval"]["low"], contender["interval"]["high"]
    return [
        _label(contender["config"]),
        f"{format_speed(low)} to {format_speed(high)}",
        f"{contender['fit_probability']:.0%}".replace("%", " %"),
        f"{contender['beats_probability']:.1%}".replace("%", " %"),
    ]


def _label(config: Any) -> str:
    try:
        return TrialConfig.from_json(config).label()
    except UserError:
        return str(config)


def cost_lines(result: TuneResult, width: int) -> list[str]:
    """What the search cost and when it has paid for itself."""
    cost = result.cost
    settling = sum(r.role in (Role.PLAYOFF, Role.CONFIRMATION) and not r.after_search and not r.interrupted for r in result.trials)
    after = after_trials(result)
    parts = [f"{cost.trials} to search", f"{settling} to settle ties and to confirm" if settling else ""]
    parts += [f"{after} on the winner's loader and evaluation" if after else ""]
    out_of_memory = f"; {cost.out_of_memory} ran out of memory" if cost.out_of_memory else ""
    replayed = cost.seconds < cost.device_seconds  # the trials are a record, or a study's from before
    rest = f"the recorded trials took {format_seconds(cost.device_seconds)}" if replayed else f"{format_seconds(cost.device_seconds)} of it in trials"
    predicted = f"{format_seconds(cost.predicting_seconds)} of it to predict memory and time, " if cost.predicting_seconds >= 1.0 else ""
    text = (
        f"{format_seconds(cost.seconds)} in all, {predicted}{rest}: "
        f"{', '.join(filter(None, parts))}{out_of_memory}."
    )
    lines = wrapped(text, width, indent="  ")
    if cost.compile_seconds:
        said = f"Each training with the winner begins with about {format_seconds(cost.compile_seconds)} of compilation; it is no part of the speed, and counts below."
        lines += wrapped(said, width, indent="  ")
    for name, hours in cost.break_even_hours.items():
        baseline = result.baselines.get(name)
        if baseline is None or baseline.estimate is None or baseline.config == result.best.config:
            continue
        paid = (
            f"pays back after {format_seconds(hours * 3600)} of training"
            if hours is not None
            else "saves nothing"
        )
        lines += wrapped(f"Against {BASELINE_NAMES.get(name, name)} it {paid}.", width, indent="  ")
    return lines


def sentence(text: str) -> str:
    """Return `text` with a capital and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
