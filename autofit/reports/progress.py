"""What a search shows while it runs, on stderr: a line per trial, and on a terminal, below them, what is running now.

Finished trials scroll up as a table that stays when the search ends; only the last three lines are redrawn, when a trial begins or ends
and once a second between, in under a millisecond each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.results.wording import ROLE_NAMES, cut, format_interval, format_speed, printable, says, wrapped
from autofit.trials.estimates import Estimate, estimate_of
from autofit.trials.observer import Observer
from autofit.trials.soundness import departed
from autofit.trials.trial import OUTSIDE, SEARCH_ROLES, Outcome, Role, TrialRecord
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

REFRESH_PER_SECOND = 1
HEADER = f"{'#':>3}  {'configuration':<32} {'role':<8} {'samples/s':>9} {'memory':>9} {'took':>6}"  #: with `  best`, 79 characters


class Progress(Observer, Protocol):
    """An observer that is entered before the search and left after it, however it ends."""

    def __enter__(self) -> Self:
        """Start showing."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing; the terminal is as it was."""
        ...


def live_observer(
    console: Console,
    *,
    trials: int | None = None,
    timeout_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return what shows a search on `console`: redrawn lines on a terminal that can, else one plain line per trial.

    Args:
        console: usually of stderr.
        trials, timeout_seconds: the budgets; None = none.
        clock: monotonic seconds.
    """
    tally = Tally(trials=trials, timeout_seconds=timeout_seconds, clock=clock)
    if console.is_terminal and console.is_interactive and not console.is_dumb_terminal and console.width > 0:
        return LiveProgress(console, tally)
    return LineProgress(console, tally)


def on_stderr(spec: SearchSpec) -> Progress:
    """Return what shows the search that `spec` asks for on stderr."""
    from rich.console import Console

    return live_observer(Console(stderr=True), trials=spec.trials, timeout_seconds=spec.timeout_seconds)


class Tally:
    """What has happened so far.

    Args:
        trials, timeout_seconds: the budgets; None = none.
        clock: monotonic seconds.
    """

    def __init__(self, *, trials: int | None, timeout_seconds: float | None, clock: Callable[[], float]) -> None:
        self._trials, self._timeout, self._clock = trials, timeout_seconds, clock
        self._begin = clock()
        self._first: float | None = None
        self.spent_before = 0.0  #: of the budget of time, before the first trial
        self._runs: dict[TrialConfig, list[TrialRecord]] = {}  #: of configurations that may win
        self._known: dict[TrialConfig, Estimate | None] = {}
        self._unsound: frozenset[Precision] = frozenset()
        self.ran = self.skipped = self.settling = 0

    def now(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self._begin

    def begins(self) -> None:
        """A trial begins: the first starts the budget of time, as it does in the search."""
        self._first = self.now() if self._first is None else self._first

    def add(self, record: TrialRecord) -> bool:
        """Count a record; return whether its configuration is now, and was not before, the best."""
        before = self.best
        if record.outcome is Outcome.SKIPPED:
            self.skipped += 1
        elif record.interrupted:  # the budget does not count it
            pass
        elif record.role in SEARCH_ROLES:
            self.ran += 1
        else:
            self.settling += 1
        self._unsound |= departed([record])
        if record.role is not Role.EVALUATION and record.why != OUTSIDE:
            runs = self._runs.setdefault(record.config, [])
            runs.append(record)
            self._known[record.config] = estimate_of(runs)
        after = self.best
        return after is not None and after[0] == record.config and (before is None or before[0] != after[0])

    @property
    def best(self) -> tuple[TrialConfig, float] | None:
        """The fastest configuration that fits and may win, at the speed that a report would show now; None before any."""
        speeds = {c: e.samples_per_second for c, e in self._known.items() if e is not None and c.precision not in self._unsound}
        return max(speeds.items(), key=lambda item: item[1]) if speeds else None

    def left(self) -> str:
        """`7 of 20 trials, 2 more to settle, 3 skipped, 1m 12s elapsed, 4m 03s left`."""
        count = f"{self.ran} of {self._trials}" if self._trials is not None else str(self.ran)
        parts = [f"{count} trial{'' if count == '1' else 's'}"]
        if self.settling:
            parts.append(f"{self.settling} more to settle")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        parts.append(f"{_clock_time(self.now())} elapsed")
        if self._timeout is not None:
            spent = self.spent_before + (0.0 if self._first is None else self.now() - self._first)
            parts.append(f"{_clock_time(max(0.0, self._timeout - spent))} left")
        return ", ".join(parts)


class LineProgress:
    """One plain line per trial, without control codes. A reader that goes away does not end the search."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console, self._tally, self._muted = console, tally, False

    def __enter__(self) -> Self:
        """Nothing to start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to restore."""

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """Say nothing: the line comes with the outcome."""
        self._tally.begins()

    def trial_ended(self, record: TrialRecord) -> None:
        """Write the trial's line."""
        best = self._tally.add(record)
        self._write(f"{record_line(record)}{', best so far' if best else ''} | {self._tally.left()}")

    def spent(self, seconds: float) -> None:
        """Count what went before the first trial."""
        self._tally.spent_before = seconds

    def earlier(self, records: Sequence[TrialRecord]) -> None:
        """Count what the study holds already."""
        for record in records:
            self._tally.add(record)

    def note(self, message: str) -> None:
        """Write the message as a line."""
        self._write(message)

    def _write(self, line: str) -> None:
        if self._muted:
            return
        text = printable(" ".join(line.split()), ascii_only=self._console.options.ascii_only)
        try:
            self._console.file.write(f"{text}\n")
            self._console.file.flush()
        except OSError:  # stderr was closed by whoever read it: progress is not worth a search
            self._muted = True


class LiveProgress:
    """A table that grows upwards, and below it what runs, the best so far and the budget, redrawn once a second."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console, self._tally = console, tally
        self._live: Live | None = None
        self._running: tuple[TrialConfig, Role, str | None, float] | None = None
        self._headed = False

    def __enter__(self) -> Self:
        """Take over the last lines of the terminal."""
        from rich.live import Live

        self._live = Live(
            console=self._console,
            get_renderable=self._footer,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back: redrawn lines gone, cursor shown."""
        self._running = None
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def trial_started(self, config: TrialConfig, role: Role, why: str | None) -> None:
        """Show what runs now."""
        self._tally.begins()
        self._running = (config, role, why, self._tally.now())
        self._redraw()

    def trial_ended(self, record: TrialRecord) -> None:
        """Add the trial's row."""
        best = self._tally.add(record)
        if record.outcome is not Outcome.SKIPPED:
            self._running = None
        if not self._headed:
            self._print([HEADER], "bold")
            self._headed = True
        style = "bold green" if best else "" if record.outcome is Outcome.COMPLETED else "dim"
        self._print(record_rows(record, self._console.width, best=best), style)
        self._redraw()

    def spent(self, seconds: float) -> None:
        """Count what went before the first trial."""
        self._tally.spent_before = seconds

    def earlier(self, records: Sequence[TrialRecord]) -> None:
        """Count what the study holds already."""
        for record in records:
            self._tally.add(record)

    def note(self, message: str) -> None:
        """Show the message above the redrawn lines."""
        self._print(wrapped(message, self._console.width), "")

    def _print(self, lines: Sequence[str], style: str) -> None:
        from rich.text import Text

        ascii_only = self._console.options.ascii_only
        text = Text("\n".join(printable(line, ascii_only=ascii_only) for line in lines), style=style)
        with contextlib.suppress(OSError):  # the terminal is gone: the search is not
            self._console.print(text, soft_wrap=True)

    def _redraw(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.refresh()

    def _footer(self) -> Text:
        from rich.text import Text

        lines = footer_lines(self._tally, self._running)
        ascii_only = self._console.options.ascii_only
        kept = [cut(printable(line, ascii_only=ascii_only), self._console.width - 1) for line in lines]
        return Text("\n".join(kept), no_wrap=True, overflow="crop")


def footer_lines(tally: Tally, running: tuple[TrialConfig, Role, str | None, float] | None) -> list[str]:
    """The lines that are redrawn: what runs, the best so far, the budget."""
    lines = []
    if running is not None:
        config, role, why, begin = running
        because = f": {why}" if why else ""
        lines.append(f"  running  {config.label()} ({ROLE_NAMES[role]}) {_clock_time(tally.now() - begin)}{because}")
    else:
        lines.append("  between trials" if tally.ran else "  starting")
    if tally.best is not None:
        best, speed = tally.best
        lines.append(f"  best     {best.label()}, {format_speed(speed)} samples/s")
    return [*lines, f"  so far   {tally.left()}"]


def record_rows(record: TrialRecord, width: int, *, best: bool = False) -> list[str]:
    """A trial as a row under `HEADER`, and what became of it where it has no measurement, folded under it."""
    head = f"{record.number:>3}  {record.config.label():<32} {ROLE_NAMES[record.role]:<8}"
    if record.measurement is None or record.samples_per_second is None:
        assert record.failure is not None
        return _beside(head, says(record.failure), width)
    needed = record.measurement.memory.needed_bytes
    memory = format_bytes(needed) if needed is not None else ""
    row = f"{head} {format_speed(record.samples_per_second):>9} {memory:>9} {_clock_time(record.seconds):>6}"
    return [f"{row}  best" if best else row]


def record_line(record: TrialRecord) -> str:
    """A trial as one line of prose."""
    head = f"trial {record.number}: {record.config.label()} ({ROLE_NAMES[record.role]}): "
    if record.measurement is None or record.samples_per_second is None:
        assert record.failure is not None
        return head + says(record.failure)
    interval = record.interval
    spread = f" (95 %: {format_interval(interval)})" if interval is not None else ""
    needed = record.measurement.memory.needed_bytes
    memory = f", {format_bytes(needed)}" if needed is not None else ""
    return f"{head}{format_speed(record.samples_per_second)} samples/s{spread}{memory}, {_clock_time(record.seconds)}"


def _beside(head: str, text: str, width: int) -> list[str]:
    """`text` after `head`; where it is longer than the line, folded under it."""
    if len(head) + 1 + len(text) <= width:
        return [f"{head} {text}"]
    return [head.rstrip(), *wrapped(text, width, indent=" " * 6)]


def _clock_time(seconds: float) -> str:
    """Seconds as on a clock, without fractions beyond ten: `0.4 s`, `12 s`, `3m 20s`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(round(seconds))
