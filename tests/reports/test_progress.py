"""What a search shows while it runs: on a terminal, in a file, when it ends well, badly, or is interrupted."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from autofit.problem.config import Precision
from autofit.reports.progress import (
    HEADER,
    LineProgress,
    LiveProgress,
    Tally,
    footer_lines,
    live_observer,
    record_line,
    record_rows,
)
from autofit.trials.estimates import estimate_of
from autofit.trials.observer import Timekeeper
from autofit.trials.trial import OUTSIDE, Reason, Role, TrialRecord
from autofit.units import GIB
from tests.builders import make_config, make_record

FAST, SLOW = make_config(16, precision=Precision.BF16), make_config(8)
ROOT = Path(__file__).parents[2]
RUNS = ((100.0, Role.SEARCH), (80.0, Role.CONFIRMATION), (70.0, Role.PLAYOFF), (90.0, Role.PLAYOFF), (50.0, Role.CONFIRMATION))
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def tally(
    trials: int | None = None, timeout_seconds: float | None = None, clock: Callable[[], float] | None = None
) -> Tally:
    return Tally(trials=trials, timeout_seconds=timeout_seconds, clock=clock or Clock())


def oom(number: int, role: Role = Role.SEARCH) -> TrialRecord:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"
    return make_record(
        number, make_config(64), reason=Reason.OUT_OF_MEMORY, message=message, phase="backward", role=role
    )


def to_text(console_width: int = 80, **options: bool) -> tuple[io.StringIO, Console]:
    target = io.StringIO()
    return target, Console(file=target, width=console_width, **options)  # type: ignore[arg-type]


def redrawing() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if type(t).__module__ == "rich.live"]


def test_a_file_gets_one_plain_line_per_trial() -> None:
    target, console = to_text()
    with live_observer(console, trials=20, timeout_seconds=300, clock=Clock()) as observer:
        assert isinstance(observer, LineProgress)
        observer.note("not searched: fp16")
        observer.trial_started(SLOW, Role.DEFAULTS, "baseline")
        observer.trial_ended(make_record(0, SLOW, 40.0, role=Role.DEFAULTS, needed_bytes=9 * GIB))
        observer.trial_ended(oom(1))
    note, first, second = target.getvalue().splitlines()
    assert note == "not searched: fp16"
    assert re.match(r"trial 0: 8x8 fp32 adamw_torch_fused \(defaults\): 40.\d+ samples/s \(95 %: [\d.]+ to [\d.]+\), ", first)
    assert "9.0 GiB, 4.2 s, best so far | 1 of 20 trials, 0.0 s elapsed, 5m 00s left" in first
    assert "did not fit: CUDA out of memory. Tried to allocate 2.00 GiB (in backward) | 2 of 20" in second
    assert "\x1b" not in target.getvalue()


def test_a_message_of_several_lines_stays_one_line() -> None:
    record = make_record(0, SLOW, reason=Reason.ERROR, message="ValueError: a\n\n  b\x1b[31m\tc")
    target, console = to_text()
    live_observer(console).trial_ended(record)
    assert len(target.getvalue().splitlines()) == 1
    assert "\x1b" not in target.getvalue()


def test_a_terminal_without_a_size_gets_lines() -> None:
    target, console = to_text(0, force_terminal=True, force_interactive=True)
    live_observer(console).trial_ended(make_record(0, SLOW, 40.0))
    assert target.getvalue().startswith("trial 0: ")


def test_a_reader_that_goes_away_does_not_end_the_search() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    console = Console(file=os.fdopen(writing, "w", buffering=1))
    with live_observer(console) as observer:
        for number in range(3):
            observer.trial_ended(make_record(number, SLOW, 40.0))
    with pytest.raises(BrokenPipeError):
        console.file.close()


def test_play_off_and_skipped_trials_do_not_use_up_the_budget() -> None:
    count = tally(trials=5)
    count.add(make_record(0, SLOW, 40.0, role=Role.DEFAULTS))
    count.add(make_record(1, FAST, reason=Reason.DOMINATED))
    count.add(make_record(2, SLOW, 40.0, role=Role.PLAYOFF))
    count.add(oom(3))
    assert count.left() == "2 of 5 trials, 1 more to settle, 1 skipped, 0.0 s elapsed"


def test_interrupted_trials_use_up_no_budget() -> None:
    count = tally(trials=5)
    count.add(make_record(0, SLOW, 40.0))
    for role in (Role.SEARCH, Role.PLAYOFF):
        count.add(make_record(1, FAST, reason=Reason.INTERRUPTED, role=role))
    assert count.left() == "1 of 5 trials, 0.0 s elapsed"


def test_time_left_is_counted_down_and_never_negative() -> None:
    clock = Clock()
    count = tally(timeout_seconds=100.0, clock=clock)
    clock.seconds = 30.0
    assert count.left() == "0 trials, 30 s elapsed, 1m 40s left", "the search's own clock starts with its first trial"
    count.begins()
    clock.seconds = 40.0
    count.begins()
    assert count.left() == "0 trials, 40 s elapsed, 1m 30s left"
    clock.seconds = 135.0
    assert count.left().endswith("0.0 s left")


def test_the_best_is_the_highest_mean_of_what_fits() -> None:
    count = tally()
    assert count.best is None
    assert count.add(make_record(0, SLOW, 40.0, jitter=0.0))
    assert count.add(make_record(1, FAST, 100.0, jitter=0.0))
    assert not count.add(make_record(2, FAST, 90.0, jitter=0.0))
    assert count.best == (FAST, pytest.approx(95.0))
    assert not count.add(make_record(3, FAST, reason=Reason.OUT_OF_MEMORY))
    assert count.best == (SLOW, pytest.approx(40.0))


def test_the_best_has_the_speed_that_the_report_will_show() -> None:
    records = [make_record(n, FAST, speed, jitter=0.0, role=role) for n, (speed, role) in enumerate(RUNS)]
    count = tally()
    for record in records:
        count.add(record)
        shown = estimate_of(records[: record.number + 1])
        assert shown is not None
        assert count.best == (FAST, shown.samples_per_second)


def test_a_precision_that_departs_from_fp32_is_no_longer_the_best() -> None:
    count = tally()
    count.add(make_record(0, SLOW, 40.0, jitter=0.0))
    count.add(make_record(1, FAST, 100.0, jitter=0.0))
    count.add(make_record(2, FAST, reason=Reason.DEPARTS_FROM_FP32))
    count.add(make_record(3, FAST.but(per_device_train_batch_size=8), 90.0))
    assert count.best == (SLOW, pytest.approx(40.0))


def test_a_baseline_that_cannot_win_is_never_the_best() -> None:
    count = tally()
    assert not count.add(make_record(0, FAST, 100.0, role=Role.HAND_RECIPE, why=OUTSIDE))
    assert count.add(make_record(1, SLOW, 40.0, jitter=0.0))
    assert count.best == (SLOW, pytest.approx(40.0))


def test_a_study_that_goes_on_knows_what_was_best() -> None:
    target, console = to_text()
    observer = live_observer(console, trials=3, clock=Clock())
    assert isinstance(observer, Timekeeper)
    observer.earlier([make_record(0, FAST, 100.0)])
    observer.trial_ended(make_record(1, SLOW, 40.0))
    assert "best so far" not in target.getvalue()
    assert "2 of 3 trials" in target.getvalue()


def test_rows_stand_under_their_header() -> None:
    (row,) = record_rows(make_record(7, SLOW, 40.0, jitter=0.0, needed_bytes=9 * GIB), 80, best=True)
    for title, value in (("samples/s", "40.00"), ("memory", "9.0 GiB"), ("took", "4.2 s")):
        assert row.index(value) + len(value) == HEADER.index(title) + len(title)
    assert row.index("8x8") == HEADER.index("configuration")
    assert row.endswith("best")


def test_why_a_trial_has_no_speed_is_told_whole_at_any_width() -> None:
    for width in (60, 80, 200):
        rows = record_rows(oom(12, Role.HAND_RECIPE), width)
        assert "did not fit: CUDA out of memory. Tried to allocate 2.00 GiB (in backward)" in " ".join(
            " ".join(rows).split()
        )
        assert all(len(row) <= width for row in rows)
    assert "recipe" in record_line(oom(12, Role.HAND_RECIPE))


def test_the_footer_has_what_runs_with_its_time_the_best_and_the_budget() -> None:
    clock = Clock()
    count = tally(trials=9, clock=clock)
    assert footer_lines(count, None)[0] == "  starting"
    count.add(make_record(0, FAST, 100.0, jitter=0.0))
    assert footer_lines(count, None)[0] == "  between trials"
    clock.seconds = 12.0
    running, best, left = footer_lines(count, (SLOW, Role.PLAYOFF, "play-off round", 4.0))
    assert running == "  running  8x8 fp32 adamw_torch_fused (play-off) 8.0 s: play-off round"
    assert best == "  best     16x4 bf16 adamw_torch_fused, 100.0 samples/s"
    assert left == "  so far   1 of 9 trials, 12 s elapsed"


def test_a_longest_usual_row_keeps_its_columns_in_80_characters() -> None:
    config = make_config(32, precision=Precision.BF16, gradient_checkpointing=True)
    assert config.label() == "32x2 bf16 ckpt adamw_torch_fused"
    (row,) = record_rows(make_record(999, config, 40.0, needed_bytes=9 * GIB), 80, best=True)
    assert row.index("search") == HEADER.index("role")
    assert len(row) < 80


def test_a_running_line_that_is_cut_says_so() -> None:
    target, console = to_text(60, force_terminal=True, force_interactive=True)
    with live_observer(console) as observer:
        observer.trial_started(SLOW, Role.SEARCH, "predicted to be the fastest of all that may fit")
    (running,) = {line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", target.getvalue()) if "running" in line}
    assert running.endswith(" ...")
    assert len(running) < 60


def test_a_terminal_is_redrawn_and_left_as_it_was() -> None:
    target, console = to_text(force_terminal=True, force_interactive=True)
    before = sys.stdout, sys.stderr
    with live_observer(console, trials=2) as observer:
        assert isinstance(observer, LiveProgress)
        assert (sys.stdout, sys.stderr) == before
        observer.trial_started(SLOW, Role.SEARCH, "why not")
        observer.trial_ended(make_record(0, SLOW, 40.0))
    shown = target.getvalue()
    assert shown.count(HIDE) == shown.count(SHOW) == 1
    assert "running  8x8" in shown
    assert HEADER in shown
    deadline = time.monotonic() + 5
    while redrawing() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not redrawing()


def test_watching_costs_next_to_nothing() -> None:
    target, console = to_text(force_terminal=True, force_interactive=True)
    with live_observer(console, trials=2) as observer:
        observer.trial_started(SLOW, Role.SEARCH, "why not")
        target.truncate(0)
        begin, used = time.monotonic(), time.process_time()
        time.sleep(2.5)
        used = time.process_time() - used
        redraws = target.getvalue().count("running")
    assert redraws <= 2 * (time.monotonic() - begin)
    assert used < 0.1


SCRIPT = """
import sys, time
from rich.console import Console
from autofit.reports.progress import live_observer
from autofit.trials.estimates import estimate_of
from autofit.trials.trial import OUTSIDE, Role
from tests.builders import make_config, make_record
with live_observer(Console(stderr=True), trials=3) as observer:
    config = make_config(8)
    observer.trial_started(config, Role.SEARCH, "because")
    observer.trial_ended(make_record(0, config, 40.0))
    observer.trial_started(config, Role.SEARCH, "because")
    print("ready", flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    if sys.argv[1] == "wait":
        time.sleep(60)
"""


def on_terminal(mode: str, **environment: str) -> tuple[int, str]:
    """Exit status and what a terminal as stderr got, stdout being a pipe; mode `wait` is interrupted."""
    master, slave = pty.openpty()
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode],
        stdout=subprocess.PIPE,
        stderr=slave,
        cwd=ROOT,
        env={**kept, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment},
    )
    os.close(slave)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        if mode == "wait":
            process.send_signal(signal.SIGINT)
        shown = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.stdout.read() == b""
    os.close(master)
    return process.wait(timeout=30), shown.decode()


@pytest.mark.parametrize(("mode", "status"), [("end", 0), ("raise", 1), ("wait", -signal.SIGINT)])
def test_the_cursor_comes_back_however_the_search_ends(mode: str, status: int) -> None:
    code, shown = on_terminal(mode)
    assert code == status
    assert shown.count(HIDE) == shown.count(SHOW) == 1
    assert "40." in shown
    if mode == "raise":
        assert shown.index(SHOW) < shown.index("Traceback")
        assert "ValueError: boom" in shown


def test_a_dumb_terminal_gets_plain_lines() -> None:
    _, shown = on_terminal("end", TERM="dumb")
    assert "\x1b" not in shown
    assert "trial 0: 8x8 fp32 adamw_torch_fused (search): 40." in shown


def test_no_color_leaves_weight_but_no_colour() -> None:
    _, coloured = on_terminal("end")
    assert "\x1b[1;32m" in coloured
    _, plain = on_terminal("end", NO_COLOR="1")
    assert set(re.findall(r"\x1b\[[0-9;]*m", plain)) <= {"\x1b[0m", "\x1b[1m", "\x1b[2m"}


@pytest.mark.parametrize("kind", [LineProgress, LiveProgress])
def test_what_is_left_counts_what_predictions_took(kind: type[LineProgress] | type[LiveProgress]) -> None:
    clock = Clock()
    watched = tally(timeout_seconds=60.0, clock=clock)
    observer = kind(to_text()[1], watched)
    assert isinstance(observer, Timekeeper)
    observer.spent(15.0)
    clock.seconds = 20.0
    watched.begins()
    clock.seconds = 30.0
    assert "30 s elapsed, 35 s left" in watched.left()
