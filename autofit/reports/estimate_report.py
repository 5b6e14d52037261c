"""What `autofit estimate` prints: the parts of the peak as a table with bars, the peaks, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from autofit.devices.target import Target
from autofit.forecasts.estimation import MemoryEstimate, paged, unusual
from autofit.forecasts.forecast import OVER, SPARE
from autofit.forecasts.largest import LargestBatch, LargestBatches
from autofit.results.wording import Column, describe, printable, text_table, wrapped
from autofit.units import format_bytes

WIDEST_BAR, NARROWEST_BAR = 40, 8
EIGHTHS = " ▏▎▍▌▋▊▉█"


def render_estimate(answer: MemoryEstimate, console: Console) -> None:
    """Print one estimate, in the console's width and encoding."""
    width, ascii_only = console.width, console.options.ascii_only
    _print(console, [*wrapped(f"{answer.subject.label()}, on {answer.device}", width), *wrapped(describe(answer.config), width)])
    _print(console, ["", *wrapped(verdict(answer), width)], style="bold")
    _print(console, ["", *anatomy_lines(answer.anatomy["parts"], width, ascii_only=ascii_only)])
    _print(console, ["", *peak_lines(answer, width)])
    if answer.warnings:
        _print(console, ["", *note_lines(answer.warnings, width)])


def verdict(answer: MemoryEstimate) -> str:
    """Whether it fits, and how sure that is, in one sentence."""
    used = f"{format_bytes(answer.device_used_bytes)} of device memory"
    used += "" if answer.confidence == "traced" else " by a closed formula"
    if answer.fits is None or answer.memory_bytes is None or answer.spare_bytes is None:
        return f"Takes {used}."
    size, spare = format_bytes(answer.memory_bytes), format_bytes(abs(answer.spare_bytes))
    sure = _is_sure(answer)
    if answer.fits and answer.usual_error is None:
        return f"Takes at least {used}: whether it fits into {size} is not known."
    if not answer.fits:
        return f"{'Does not' if sure else 'Probably does not'} fit into {size}: {spare} short. Takes {used}."
    if sure:
        return f"Fits into {size} with {spare} to spare. Takes {used}."
    return f"Just fits into {size}, with {spare} to spare: too close to be sure. Takes {used}."


def _is_sure(answer: MemoryEstimate) -> bool:
    """Whether the verdict would stand if the prediction were off by as much as it ever was."""
    assert answer.memory_bytes is not None
    room = answer.memory_bytes - answer.context_bytes
    traced, doubt = answer.confidence == "traced", answer.usual_error or 0.0
    if answer.fits:
        return answer.usual_error is not None and answer.min_capacity_bytes <= (SPARE if traced else 1 - doubt) * room
    return answer.peak_allocated_bytes > (OVER if traced else 1 + doubt) * room


def anatomy_lines(parts: Mapping[str, Mapping[str, Any]], width: int, *, ascii_only: bool) -> list[str]:
    """A row per part; bars are as long as the part is large, the largest fills what room there is."""
    columns = [
        Column(title="at the peak"),
        Column(title="size", right=True),
        Column(title="share", right=True),
    ]
    rows = [
        [name.replace("_", " "), format_bytes(part["bytes"]), _percent(part["share"])]
        for name, part in parts.items()
    ]
    lines = text_table(columns, rows, width)
    room = max(NARROWEST_BAR, min(WIDEST_BAR, width - max(map(len, lines)) - 2))
    largest = max((part["share"] for part in parts.values()), default=1.0) or 1.0
    bars = [bar(part["share"] / largest, room, ascii_only=ascii_only) for part in parts.values()]
    head, body = lines[: len(lines) - len(rows)], lines[len(lines) - len(rows) :]
    edge = max(map(len, lines))
    return [*head, *(f"{line:<{edge}}  {drawn}".rstrip() for line, drawn in zip(body, bars))]


def bar(share: float, room: int, *, ascii_only: bool = False) -> str:
    """A bar of `share` (0 to 1) of `room` characters, to an eighth of one, or to a whole one in ASCII."""
    if ascii_only:
        return "#" * round(share * room)
    whole, eighths = divmod(round(share * room * 8), 8)
    return ("█" * whole + EIGHTHS[eighths]).rstrip()


def _percent(share: float) -> str:
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def peak_lines(answer: MemoryEstimate, width: int) -> list[str]:
    """The peaks and where the peak is."""
    rows = [
        ("peak allocated", answer.peak_allocated_bytes, "in live tensors"),
        ("peak reserved", answer.peak_reserved_bytes, "held by the allocator when memory is no limit"),
        ("device used", answer.device_used_bytes, "reserved and the context: what nvidia-smi shows"),
        ("least capacity", answer.min_capacity_bytes, "in which it survives; the context comes on top"),
    ]
    columns = [Column(title="peaks"), Column(title="size", right=True), Column(title="", folds=True)]
    lines = text_table(columns, [[name, format_bytes(size), meaning] for name, size, meaning in rows], width)
    peak = answer.anatomy.get("peak")
    if peak:
        where = (
            f"{peak['moment']} of micro-step {peak['micro_step'] + 1} in optimizer step {peak['step'] + 1}"
        )
        what = f"{operator_name(peak['operator'])} takes {format_bytes(peak['operator_bytes'])}"
        lines += ["", *wrapped(f"The peak is reached in the {where}, when {what}.", width)]
    return lines


def operator_name(name: str) -> str:
    """`aten.native_layer_norm.default` as people know it: `native_layer_norm`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "aten" else name


def note_lines(notes: Sequence[str], width: int) -> list[str]:
    """Each note once, in lines of their own."""
    return [
        line for note in dict.fromkeys(notes) for line in wrapped(f"note: {note}", width, hanging="      ")
    ]


def render_largest(found: LargestBatches, target: Target, console: Console) -> None:
    """Print the largest batches as a table: a row per precision and checkpointing, a column per optimizer."""
    width, ascii_only = console.width, console.options.ascii_only
    size, rows = format_bytes(target.memory_bytes or 0), found.rows
    _print(console, wrapped(f"Largest per-device batch of {found.subject.label()}, on {target.name} ({size})", width), style="bold")
    _print(console, ["", *largest_lines(rows, width, ascii_only=ascii_only)])
    legend = []
    if any(row.batch_size == 0 for row in rows):
        legend.append("0: not even a batch of 1 fits")
    if any(row.batch_size is None for row in rows):
        legend.append("?: could not be predicted")
    if any(row.batch_size for row in rows):
        among = "" if found.effective_batch is None else f" divisor of the effective batch {found.effective_batch:,}"
        legend.append(f"each is the largest{among} that is predicted to fit, to the byte: one whose estimate leaves {round(100 * (1 - SPARE))} % of the memory free is sure to")
    notes = [f"{row.optim} could not be traced: {row.note}" for row in rows if row.note]
    notes += [note for row in rows if not row.note for note in paged(row.optim)]
    notes += [note for precision in dict.fromkeys(row.precision for row in rows) for note in unusual(precision, target)]
    if legend or notes or target.warnings:
        _print(
            console, ["", *wrapped("; ".join(legend), width), *note_lines([*notes, *target.warnings], width)]
        )


def largest_lines(rows: Sequence[LargestBatch], width: int, *, ascii_only: bool = False) -> list[str]:
    """The table; where its columns do not fit beside each other, a row per answer."""
    optims = list(dict.fromkeys(row.optim for row in rows))
    found = {(row.precision, row.gradient_checkpointing, row.optim): _batch(row) for row in rows}
    pairs = list(dict.fromkeys((row.precision, row.gradient_checkpointing) for row in rows))
    columns = [
        Column(title="precision"),
        Column(title="ckpt"),
        *(Column(title=name, right=True) for name in optims),
    ]
    if sum(len(column.title) + 2 for column in columns) <= width:
        cells = [
            [str(p), "on" if on else "off", *(found.get((p, on, name), "") for name in optims)]
            for p, on in pairs
        ]
        return text_table(columns, cells, width)
    columns = [
        Column(title="precision"),
        Column(title="checkpointing"),
        Column(title="optimizer"),
        Column(title="batch", right=True),
    ]
    cells = [
        [str(r.precision), "on" if r.gradient_checkpointing else "off", r.optim, _batch(r)] for r in rows
    ]
    return text_table(columns, cells, width)


def _batch(row: LargestBatch) -> str:
    return "?" if row.batch_size is None else f"{row.batch_size:,}"


def _print(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    ascii_only = console.options.ascii_only
    for line in lines:
        console.print(Text(printable(line, ascii_only=ascii_only), style=style), soft_wrap=True)
