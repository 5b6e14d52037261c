"""How things are said to a person: numbers, names of outcomes, lines and tables of plain text. Shared by report and progress. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofit.problem.config import Scalar, TrialConfig
from autofit.trials.measurement import Interval
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord

PROSE_WIDTH = 100  #: longer lines are hard to read, however wide the terminal
NARROWEST_CELL = 12
NO_BREAK = "\N{NO-BREAK SPACE}"
UNIT = re.compile(r"(?<=\d) (?=(?:%|[KMGT]iB|m?s|samples/s|tokens/s)(?![\w/]))")
NARROWEST = 60  #: below this the terminal may wrap by itself: nothing is cut off

ROLE_NAMES: Mapping[Role, str] = {
    Role.DEFAULTS: "defaults",
    Role.HAND_RECIPE: "recipe",
    Role.SEARCH: "search",
    Role.PLAYOFF: "play-off",
    Role.CONFIRMATION: "confirm",
    Role.LOADER: "loader",
    Role.EVALUATION: "evaluate",
}
BASELINE_NAMES: Mapping[str, str] = {
    "defaults": "the plain defaults",
    "hand_recipe": "the hand recipe",
    "as_it_is": "the script as it is",
}
REASON_NAMES: Mapping[Reason, str] = {
    Reason.OUT_OF_MEMORY: "did not fit",
    Reason.SUSPECTED_OUT_OF_MEMORY: "probably did not fit",
    Reason.ALLOCATOR_THRASH: "fits only by thrashing",
    Reason.NON_FINITE_LOSS: "loss not finite",
    Reason.ALL_STEPS_SKIPPED: "every step skipped",
    Reason.STEPS_SKIPPED: "too many steps skipped",
    Reason.DEPARTS_FROM_FP32: "not sound",
    Reason.PREDICTED_TOO_BIG: "skipped",
    Reason.DOMINATED: "skipped",
    Reason.KNOB_WITHOUT_EFFECT: "a knob had no effect",
    Reason.TIMEOUT: "timed out",
    Reason.CRASH: "crashed",
    Reason.UNREADABLE_ANSWER: "unreadable answer",
    Reason.ERROR: "error",
    Reason.UNSUPPORTED: "not supported",
    Reason.INTERRUPTED: "interrupted",
}
KNOB_NAMES: Mapping[str, str] = {
    "per_device_train_batch_size": "batch size",
    "gradient_checkpointing": "checkpointing",
    "optim": "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a text table: its title, whether it holds numbers (aligned right), whether its text may be folded."""

    title: str
    right: bool = False
    folds: bool = False


def format_speed(samples_per_second: float) -> str:
    """Return a rate with four digits: `1,234`, `412.3`, `41.23`, `0.4123`."""
    if samples_per_second >= 1000:
        return f"{samples_per_second:,.0f}"
    for limit, digits in ((100, 1), (10, 2), (1, 3)):
        if samples_per_second >= limit:
            return f"{samples_per_second:.{digits}f}"
    return f"{samples_per_second:.4g}"


def format_interval(interval: Interval) -> str:
    """Return `409.8 to 414.9`; equal samples show no spread, and a single one does not say what its spread is."""
    if not interval.known:
        return "unknown from so few samples"
    if interval.low == interval.high:
        return "no spread seen"
    return f"{format_speed(interval.low)} to {format_speed(interval.high)}"


def format_factor(factor: float) -> str:
    """Return a ratio with three digits: `3.43x`, `12.4x`, `0.98x`."""
    return f"{factor:.0f}x" if factor >= 99.95 else f"{factor:.1f}x" if factor >= 9.995 else f"{factor:.2f}x"


def format_percent(share: float) -> str:
    """Return a signed difference in percent: `+2.1 %`, `-13 %`."""
    return f"{share:+.0%}".replace("%", " %") if abs(share) >= 0.0995 else f"{share:+.1%}".replace("%", " %")


def knob_name(knob: str) -> str:
    """A field of TrialConfig, or an extra, as people say it."""
    return KNOB_NAMES.get(knob, knob)


def knob_value(knob: str, value: Scalar) -> str:
    """A knob's value as people say it; None is an extra that is not set."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def describe(config: TrialConfig) -> str:
    """The configuration in words: `batch 16 x 4 accumulation steps, bf16, checkpointing off, adamw_torch_fused`."""
    steps = config.gradient_accumulation_steps
    parts = [
        f"batch {config.per_device_train_batch_size} x {steps} accumulation step{'s' if steps != 1 else ''}",
        str(config.precision),
        f"checkpointing {knob_value('gradient_checkpointing', config.gradient_checkpointing)}",
        config.optim,
        *(f"{name}={value}" for name, value in config.extra),
    ]
    return ", ".join(parts)


def says(failure: Failure, *more: str) -> str:
    """What became of a trial without measurement: `did not fit: CUDA out of memory ... (in backward; MORE)`."""
    message = " ".join(failure.message.split())
    name = REASON_NAMES[failure.reason]
    text = name if not message or message == name else f"{name}: {message}"
    phase = f"in {failure.phase}" if failure.phase and failure.phase not in message else ""
    aside = "; ".join(filter(None, (phase, *more)))
    return f"{text} ({aside})" if aside else text


def standing(record: TrialRecord) -> int:
    """Order of outcomes in tables: completed, infeasible, failed, skipped."""
    return (Outcome.COMPLETED, Outcome.INFEASIBLE, Outcome.FAILED, Outcome.SKIPPED).index(record.outcome)


def printable(text: str, *, ascii_only: bool = False) -> str:
    """Return `text` without control characters; with `ascii_only`, other signs become `?` so that printing cannot fail."""
    kept = "".join(c if c.isprintable() or c == "\n" else " " for c in text.expandtabs(4))
    return kept.encode("ascii" if ascii_only else "utf-8", "replace").decode()


def cut(line: str, room: int) -> str:
    """Return `line`, or as much of it as there is room for, with dots that say so."""
    return line if len(line) <= room else f"{line[: max(1, room - 4)].rstrip()} ..."


def wrapped(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return `text` in lines of at most `width`, words kept whole where they fit."""
    room = max(NARROWEST, min(width, PROSE_WIDTH))
    later = indent if hanging is None else hanging
    lines = textwrap.wrap(_whole(text), room, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def _whole(text: str) -> str:
    """`text` with numbers tied to their units, so that no line ends between them."""
    return UNIT.sub(NO_BREAK, text)


def text_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, gap: int = 2
) -> list[str]:
    """Return a header and the rows as lines, indented by two; where room is short, what folds narrows, widest first, and words break last.

    Columns that are empty in every row are left out. Nothing is cut: a cell that is too long goes on in the next line.

    Args:
        columns: one per cell.
        rows: cells as text.
        width: characters of a line.
        gap: spaces between columns.
    """
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    if not used:
        return []
    sizes = {i: max(len(columns[i].title), *(len(row[i]) for row in rows)) for i in used}
    room = max(NARROWEST, width) - 2 - gap * (len(used) - 1)
    words = {i: max((len(word) for row in rows for word in _whole(row[i]).split(" ")), default=0) for i in used}
    for least in (words, dict.fromkeys(used, 0)):
        while sum(sizes.values()) > room:
            wide = [i for i in used if columns[i].folds and sizes[i] > max(NARROWEST_CELL, least[i])]
            if not wide:
                break
            sizes[max(wide, key=lambda i: sizes[i])] -= 1
    lines = []
    for row in [[c.title for c in columns], *rows]:
        folded = {i: textwrap.wrap(_whole(row[i]), sizes[i], break_on_hyphens=False) for i in used}
        cells = [[line.replace(NO_BREAK, " ") for line in folded[i]] or [""] for i in used]
        for depth in range(max(map(len, cells))):
            texts = [cell[depth] if depth < len(cell) else "" for cell in cells]
            padded = [
                t.rjust(sizes[i]) if columns[i].right else t.ljust(sizes[i])
                for i, t in zip(used, texts, strict=True)
            ]
            lines.append(("  " + (" " * gap).join(padded)).rstrip())
    return lines
