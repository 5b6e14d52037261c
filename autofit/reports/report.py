"""The report of a search: what won and why, on one screen; the details; and last, the lines to copy.

`report_lines` makes it of plain text, so that it reads the same in a file; `render` adds weight and colour, which carry no meaning of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autofit.errors import UserError
from autofit.reports.report_after import after_lines
from autofit.reports.report_script import usage
from autofit.reports.report_soundness import checked_sentence
from autofit.reports.report_trials import (
    WIDE,
    cost_lines,
    ending_lines,
    knob_lines,
    left_out_lines,
    measured_lines,
    peers,
    sentence,
    unmeasured_lines,
)
from autofit.results.advisories import failed_confirmations
from autofit.results.data_result import data_lines
from autofit.results.export import arguments_call, cli_flags, is_live, model_lines, model_note
from autofit.results.knob_worth import measured
from autofit.results.result import Baseline, Estimate, TuneResult
from autofit.results.wording import (
    BASELINE_NAMES,
    NARROWEST,
    Column,
    describe,
    format_factor,
    format_interval,
    format_speed,
    printable,
    text_table,
    wrapped,
)
from autofit.trials.trial import Outcome, Role
from autofit.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

TRIAL_ROWS = 20
PLAIN, TITLE, STRONG, ALERT, CODE = "", "bold", "bold green", "bold yellow", "cyan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the report and how it is dressed (a rich style; empty = not at all)."""

    text: str
    style: str = PLAIN


def render(result: TuneResult, console: Console, *, trial_rows: int | None = TRIAL_ROWS) -> None:
    """Print the report.

    Args:
        result: what to report.
        console: where to; its width, colour and encoding are respected.
        trial_rows: most rows per table of trials; None = all.
    """
    from rich.text import Text

    ascii_only = console.options.ascii_only
    for line in report_lines(result, console.width, trial_rows=trial_rows):
        console.print(Text(printable(line.text, ascii_only=ascii_only), style=line.style), soft_wrap=True)


def report_lines(result: TuneResult, width: int, *, trial_rows: int | None = TRIAL_ROWS) -> list[Line]:
    """Return the whole report for a terminal of `width` characters. Lines to copy are not wrapped."""
    found = measured(result)
    sections: Mapping[str, list[str]] = {
        "Data": [line for text in data_lines(result.data) for line in wrapped(text, width, indent="  ", hanging="  ")],
        "Memory": memory_lines(result, width),
        "Compared with": baseline_lines(result, width),
        "Configurations measured": measured_lines(result, found, width, trial_rows),
        "Did not fit, failed or skipped": unmeasured_lines(result, found, width, trial_rows),
        "What each knob was worth": knob_lines(result, found, width),
        "Not tried": left_out_lines(result, width),
        "Why the search ended": ending_lines(result, width),
        "Cost": cost_lines(result, width),
    }
    lines = [Line(text=text) for text in subject_lines(result, width)]
    lines += [Line(text=""), *(Line(text=text, style=STRONG) for text in wrapped(headline(result), width))]
    lines += [Line(text=text) for text in standing_lines(result, width)]
    for title, body in sections.items():
        if body:
            lines += [Line(text=""), Line(text=title, style=TITLE), *(Line(text=text) for text in body)]
    if result.warnings:
        lines += [Line(text=""), Line(text="Warnings", style=ALERT)]
        lines += [Line(text=text) for text in warning_lines(result, width)]
    return [*lines, Line(text=""), *copy_lines(result, width)]


def subject_lines(result: TuneResult, width: int) -> list[str]:
    """What was tuned, on what."""
    workload, model = result.spec.workload, result.model
    length = model.get("sample_length", model.get("seq_len") or workload.seq_len)
    bundled = " (bundled config)" if model.get("source") == "preset" else ""
    what = [f"{workload.model}{bundled}", str(model.get("task") or workload.task or "")]
    what += [workload.adaptation.label() if workload.adaptation is not None else ""]
    what += [f"length {length}" if length else "", f"effective batch {result.spec.effective_batch}"]
    device = result.device
    where = [f"{device.name} ({device.torch_name})" if device.name != device.torch_name else device.name]
    where.append(
        f"memory limit {format_bytes(result.memory_limit_bytes)} of {format_bytes(device.total_memory_bytes)}"
    )
    where += [
        f"{name} {result.software[name]}" for name in ("torch", "transformers") if name in result.software
    ]
    return [*wrapped(", ".join(filter(None, what)), width), *wrapped(", ".join(where), width)]


def headline(result: TuneResult) -> str:
    """The answer in one sentence."""
    best = result.best
    tokens = f", {best.tokens_per_second:,.0f} tokens/s" if best.tokens_per_second is not None else ""
    compared = [comparison(name, baseline, result) for name, baseline in result.baselines.items()]
    against = f": {', '.join(compared)}" if compared else ""
    return (
        f"Fastest that fits: {describe(best.config)}, at {format_speed(best.samples_per_second)} samples/s "
        f"(95 % interval {format_interval(best.interval)}){tokens}{against}."
    )


def comparison(name: str, baseline: Baseline, result: TuneResult) -> str:
    """The winner against one baseline: `3.43x the plain defaults`, or why there is nothing to compare."""
    said = BASELINE_NAMES.get(name, name.replace("_", " "))
    ratio = result.speedup.get(name)
    if baseline.estimate is None or ratio is None:
        return _without(said, baseline.note or "was not measured")
    if baseline.config == result.best.config:
        return f"the same as {said}"
    return f"{format_factor(ratio)} {said}{_noise(baseline.estimate, result)}"


def _noise(other: Estimate, result: TuneResult) -> str:
    """What weakens a comparison with the winner. Of two that met in the play-off its rounds tell, which share the machine's drift; of others their intervals."""
    if any(one.config == other.config for one in peers(result)):
        return " (within the noise)"
    met = {r.config for r in result.trials if r.role is Role.PLAYOFF and r.outcome is Outcome.COMPLETED}
    if {other.config, result.best.config} <= met:
        return ""
    if not (other.interval.known and result.best.interval.known):
        return " (from one sample)"
    return " (within the noise)" if other.interval.overlaps(result.best.interval) else ""


def _without(baseline: str, note: str) -> str:
    """Why a baseline has no speed, as a part of a sentence."""
    for singular, plural in (("does not", "do not"), ("was not", "were not")):
        if note.startswith(singular):
            return f"{baseline} {note.replace(singular, plural, 1) if baseline.endswith('s') else note}"
    return f"no comparison with {baseline} ({note})"


def standing_lines(result: TuneResult, width: int) -> list[str]:
    """How firm the answer is: memory to spare, confirmation, ties, warnings."""
    spare = spare_bytes(result)
    limit = f"of the {format_bytes(result.memory_limit_bytes)} limit"
    facts = []
    if spare is not None:
        needed = format_bytes(result.memory_limit_bytes - spare)
        left = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} OVER the limit"
        facts.append(f"It needs {needed} {limit}: {left}.")
    facts.append(
        f"Confirmed in a run at full accumulation{' and longest length' if _longest_shown(result) else ''}."
        if result.confirmed
        else "Not confirmed: its run at full accumulation and longest length failed."
        if failed_confirmations(result.best.config, result.trials)
        else "Not confirmed by a run at full accumulation and longest length."
    )
    equal = peers(result)
    slower = [one for one in result.tied if one not in equal]
    if equal:
        told = _listed(equal)
        tie = f"Tied with {told}: no slower beyond the noise." if result.settled else f"Not separated yet from {told}: the play-off ended too early."
        facts.append(tie + _why_first(result))
    if slower:
        facts.append(f"Slower in the mean, though the play-off ended before that was sure: {_listed(slower)}.")
    facts += after_lines(result)
    checked = checked_sentence(result.soundness, result.best.config.precision)
    if checked is not None:
        facts.append(checked)
    if result.warnings:
        facts.append(f"{len(result.warnings)} warning{'s' if len(result.warnings) > 1 else ''}: see below.")
    return [line for fact in facts for line in wrapped(fact, width)]


def _longest_shown(result: TuneResult) -> bool:
    """Whether trials saw rows of the longest length: not where nobody knows which those are, as of a stream."""
    decided = result.data.get("memory_decided_by")
    if decided is not None:
        return bool(decided.get("shown"))
    return bool(result.data) or not is_live(result) or result.model.get("sample_length") is not None


def _why_first(result: TuneResult) -> str:
    """What decided a tie, as far as the figures that are shown bear it out; empty where they do not."""
    best = result.best
    near = [one for one in result.tied if one.samples_per_second * (1 + result.spec.tolerance) >= best.samples_per_second]
    fastest = all(best.samples_per_second >= one.samples_per_second for one in result.tied)
    in_the_mean = " The winner is the fastest in the mean." if fastest else ""
    if not near:
        return in_the_mean
    keeps = not result.changes(best.config) and any(result.changes(one.config) for one in near)
    alike = [one for one in near if not (keeps and result.changes(one.config))]
    needs = [one.memory.needed_bytes for one in alike]
    least = best.memory.needed_bytes is not None and all(n is not None and best.memory.needed_bytes <= n for n in needs)
    if keeps:
        more = ", and of those that do it needs the least memory" if least and alike else ""
        return f" Of those as fast in the mean the winner leaves the mathematics of training as it is{more}."
    return " The winner needs the least memory of those as fast in the mean." if least else in_the_mean


def _listed(found: Sequence[Estimate]) -> str:
    """The first of them with speed and memory, and how many more."""
    told = []
    for one in found[:3]:
        needed = one.memory.needed_bytes
        memory = f", {format_bytes(needed)}" if needed is not None else ""
        told.append(f"{one.config.label()} ({format_speed(one.samples_per_second)} samples/s{memory})")
    return "; ".join(told) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def spare_bytes(result: TuneResult) -> int | None:
    """Limit less what the winner needs; negative when it is over; None when unknown."""
    needed = result.best.memory.needed_bytes
    return None if needed is None else result.memory_limit_bytes - needed


def memory_rows(result: TuneResult) -> list[tuple[str, int, str]]:
    """Counter, bytes, meaning: the winner's largest over all its runs, against the limit."""
    memory, cpu = result.best.memory, result.device.kind == "cpu"
    spare = spare_bytes(result)
    rows = [
        ("peak allocated", memory.peak_allocated_bytes, "resident, above what the process had" if cpu else "in live tensors"),
        ("peak reserved", memory.peak_reserved_bytes, "address space, above what the process had" if cpu else "held by torch's allocator"),
        ("context", memory.context_bytes or None, "gone before the first tensor"),
        ("needed", memory.needed_bytes, "peak reserved + context" if memory.context_bytes else "what counts against the limit"),
        ("limit", result.memory_limit_bytes, "enforced in every trial"),
        ("spare", spare, "" if spare is None or spare >= 0 else "OVER the limit"),
        ("device used", None if cpu else memory.device_used_bytes, "the driver's view, other processes included"),
        ("host peak", memory.host_peak_bytes, "resident, whole process"),
    ]  # fmt: skip
    return [(name, size, meaning) for name, size, meaning in rows if size is not None]


def memory_lines(result: TuneResult, width: int) -> list[str]:
    """The winner's memory by counter."""
    columns = [Column(title="counter"), Column(title="size", right=True), Column(title="bytes", right=True), Column(title="meaning", folds=True)]  # fmt: skip
    rows = [
        [name, format_bytes(size), f"{size:,}" if width >= WIDE else "", meaning]
        for name, size, meaning in memory_rows(result)
    ]
    retries = result.best.memory.alloc_retries
    note = [f"  the allocator had to free its cache and retry {retries} times"] if retries else []
    return [*text_table(columns, rows, width), *note]


def baseline_lines(result: TuneResult, width: int) -> list[str]:
    """Winner and baselines side by side."""
    best = result.best
    rows = [["winner", best.config.label(), format_speed(best.samples_per_second), format_interval(best.interval), _needed(best.memory.needed_bytes), ""]]  # fmt: skip
    for name, baseline in result.baselines.items():
        label = baseline.config.label() if baseline.config is not None else ""
        said = BASELINE_NAMES.get(name, name.replace("_", " ")).removeprefix("the ")
        estimate = baseline.estimate
        if estimate is None:
            rows.append(
                [
                    said,
                    label or (baseline.note or ""),
                    "-",
                    "",
                    "",
                    (baseline.note or "not measured") if label else "",
                ]
            )
            continue
        against = comparison(name, baseline, result)
        factor = (
            "the same"
            if against.startswith("the same")
            else against.replace(f" {BASELINE_NAMES.get(name, '')}", "")
        )
        rows.append([said, label, format_speed(estimate.samples_per_second), format_interval(estimate.interval), _needed(estimate.memory.needed_bytes), factor])  # fmt: skip
    columns = [
        Column(title=""),
        Column(title="configuration", folds=True),
        Column(title="samples/s", right=True),
        Column(title="95 %", right=True),
        Column(title="memory", right=True),
        Column(title="the winner is", folds=True),
    ]
    if width < WIDE:
        del columns[3]
        rows = [row[:3] + row[4:] for row in rows]
    return text_table(columns, rows, width, gap=2 if width >= WIDE else 1)


def _needed(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def warning_lines(result: TuneResult, width: int) -> list[str]:
    """Each warning with its next step."""
    lines = []
    for warning in result.warnings:
        lines += wrapped(f"! {sentence(warning.message)}", width, indent="  ", hanging="    ")
        if warning.next_step:
            lines += wrapped(f"Next: {warning.next_step}", width, indent="    ", hanging="    ")
    return lines


def copy_lines(result: TuneResult, width: int) -> list[Line]:
    """The lines to copy: the call, how the model is loaded where that matters, and the flags."""
    best = result.best
    title = f"To use it ({best.config.label()}, {format_speed(best.samples_per_second)} samples/s)"
    if result.spec.workload.script is not None:
        how, command, changed = usage(result)
        code = [*joined_flags(command, width), *changed] if command else changed
        note = model_note(result)
        lines = [Line(text=text, style=TITLE) for text in wrapped(f"{title}, {how}", width)]
        lines += [Line(text=""), *(Line(text=text, style=CODE) for text in code)]
        return [*lines, *(Line(text=text) for text in wrapped(f"# {note}" if note else "", width, hanging="# ") if text)]
    lines = [*(Line(text=text, style=TITLE) for text in wrapped(title, width)), Line(text="")]
    note = model_note(result)
    lines += [Line(text=text, style=CODE) for text in model_lines(result)]
    first, *rest = arguments_call(result)
    lines += [Line(text=text, style=CODE) for text in (f"args = {first}", *rest)]
    if note is not None:
        lines += [Line(text=text) for text in wrapped(f"# {note}", width, hanging="# ")]
    try:
        flags = cli_flags(result)
    except UserError as error:
        return [*lines, Line(text=""), Line(text=f"as flags: {error.message}")]
    lines += [Line(text=""), Line(text="or as flags of a script that uses HfArgumentParser:"), Line(text="")]
    return [*lines, *(Line(text=text, style=CODE) for text in joined_flags(flags, width))]


def joined_flags(flags: list[str], width: int) -> list[str]:
    """Flags on as few lines as fit, continued with a backslash as a shell wants it."""
    room = max(NARROWEST, width) - 2
    lines = [flags[0]]
    for flag in flags[1:]:
        if len(lines[-1]) + 1 + len(flag) <= room:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"  {flag}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
