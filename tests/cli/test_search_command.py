"""`autofit search` and its neighbours as a person meets them: streams, exit codes, signals, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autofit
from autofit.errors import UserError
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.result import TuneResult
from autofit.search.tuning import run_search
from autofit.study.study import RECORD
from autofit.testing import simulated_landscape
from autofit.trials.landscape import Landscape
from autofit.trials.trial import Outcome, Role
from autofit.units import GIB, format_bytes
from tests.cli.runs import Run, autofit_here
from tests.cli.runs import autofit as run_autofit
from tests.process_table import gone_within
from tests.searching import needed_bytes
from tests.studies import whole_lines

COMMAND = [sys.executable, "-c", "from autofit.cli import main; main()"]
REAL = (
    "search",
    "--model",
    "bert-tiny",
    "--effective-batch",
    "16",
    "--seq-len",
    "32",
    "--device",
    "cpu",
    "--memory",
    "2GiB",
)
FEW = ("--optim", "adamw_torch_fused", "--precision", "fp32", "--sampler", "grid", "--tolerance", "0.5")
TRIAL_LINE = re.compile(r"^trial (\d+): (\d+)x(\d+) ", re.MULTILINE)
ENDS_SOON = 20.0  #: seconds that a search may take to end after a signal, on a busy machine


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A landscape file."""
    path = tmp_path / "grid.json"
    simulated_landscape(36, jitter=0.02).save(path)
    return path


class Started:
    """A command that runs in its own session, its output in files, its children marked."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.marker = f"autofit-test-{os.getpid()}-{time.monotonic_ns()}"
        self._out, self._err = cwd / f"{self.marker}.out", cwd / f"{self.marker}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                cwd=cwd,
                env={**os.environ, "AUTOFIT_TEST_MARKER": self.marker},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def trials(self) -> int:
        """How many trials have their line."""
        return len(TRIAL_LINE.findall(self.stderr))

    def wait_for_trials(self, count: int, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while self.trials() < count and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.trials() >= count, self.stderr

    def signal_group(self, number: int) -> None:
        """As a terminal does with Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self, timeout: float = 240) -> Run:
        return Run(self.process.wait(timeout), self._out.read_text(), self.stderr)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Started]]:
    """Start commands that do not outlive the test."""
    begun: list[Started] = []

    def make(*arguments: object) -> Started:
        begun.append(Started(*arguments, cwd=tmp_path))
        return begun[-1]

    yield make  # type: ignore[misc]
    for each in begun:
        with contextlib.suppress(ProcessLookupError):
            each.process.kill()
        each.process.wait()
        assert gone_within(each.marker, 5) == []


def records_in(journal: Path) -> dict[int, dict[str, object]]:
    """Finished records in the whole lines of a study file, by trial number as they were written."""
    found = {}
    for entry in whole_lines(journal.read_bytes()):
        attributes = entry.get("user_attr") or entry.get("user_attrs") or {}
        if RECORD in attributes:
            found[attributes[RECORD]["number"]] = attributes[RECORD]
    return found


# -- streams and exit codes -------------------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_per_trial_on_stderr_and_the_answer_on_stdout(grid: Path) -> None:
    done = run_autofit("search", "--replay", grid, "--no-predict", cwd=grid.parent)
    assert done.status == 0, done.stderr
    result = autofit.load(grid.parent / "best.json")
    assert [int(number) for number, _, _ in TRIAL_LINE.findall(done.stderr)] == [
        r.number for r in result.trials
    ]
    assert "\x1b" not in done.stdout + done.stderr, "no control codes"
    assert done.stderr.rstrip().endswith("written: best.json")
    assert result.best.config.label() in done.stdout
    assert "trial 0" not in done.stdout
    assert "gradient_accumulation_steps" in done.stdout


def test_what_is_printed_is_what_show_prints(grid: Path) -> None:
    done = run_autofit("search", "--replay", grid, "--no-predict", "--output", "answer.json", cwd=grid.parent)
    shown = run_autofit("show", "answer.json", cwd=grid.parent)
    assert shown.status == 0
    assert shown.stdout == done.stdout
    assert shown.stderr == ""
    assert run_autofit("show", "answer.json", cwd=grid.parent, COLUMNS="0").stdout == done.stdout, "a terminal without a size"


def test_on_a_terminal_progress_is_redrawn_and_the_answer_stays_clean(grid: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("pseudo-terminals differ")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "search", "--replay", str(grid), "--no-predict"],
        cwd=grid.parent,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    seen: list[bytes] = []
    reader = threading.Thread(target=_read_terminal, args=(ours, seen))
    reader.start()
    stdout, _ = process.communicate(timeout=120)
    reader.join(30)
    os.close(ours)
    shown = b"".join(seen).decode()
    assert process.returncode == 0, shown
    assert "configuration" in shown
    assert "running" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is given back"
    assert "\x1b" not in stdout


def _read_terminal(descriptor: int, into: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while select.select([descriptor], [], [], 60)[0]:
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            into.append(data)


def test_nothing_fits_is_exit_code_3_with_the_bytes_that_are_missing(grid: Path) -> None:
    (grid.parent / "best.json").write_text("mine")
    missing = min(needed_bytes(Landscape.load(grid)).values()) - GIB
    done = run_autofit("search", "--replay", grid, "--no-predict", "--memory", "1GiB", cwd=grid.parent)
    assert done.status == 3
    assert done.stdout == ""
    error, hint = done.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: no configuration fits into 1.0 GiB")
    assert f"{format_bytes(missing)} are missing" in error
    assert hint.startswith("hint: ")
    assert "Traceback" not in done.stderr
    assert (grid.parent / "best.json").read_text() == "mine"


def test_a_reader_that_goes_away_is_no_crash(grid: Path) -> None:
    line = f"{sys.executable} -c 'from autofit.cli import main; main()' search --replay {grid} --no-predict | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=grid.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert (grid.parent / "best.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", ["show best.json", "export best.json", "search --help"])
def test_an_answer_that_finds_no_room_is_one_line(arguments: str, grid: Path) -> None:
    spec = SearchSpec(workload=Workload(model="recorded"), effective_batch=36)
    run_search(spec, landscape=Landscape.load(grid), predict=False).save(grid.parent / "best.json")
    command = [*COMMAND, *arguments.split()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=grid.parent, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: No space left on device", "hint: free some, or write to another disk"]


def test_an_answer_that_cannot_be_written_is_shown(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UserError("cannot write 'best.json': No space left on device")

    monkeypatch.setattr("autofit.results.result.write_json", fail)
    done = autofit_here("search", "--replay", grid, "--no-predict", cwd=grid.parent, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "To use it" in done.stdout
    assert done.stderr.endswith("error: cannot write 'best.json': No space left on device\n")


def test_the_same_study_is_answered_from_its_records(grid: Path) -> None:
    arguments = ("search", "--replay", grid, "--no-predict", "--study", "study.log")
    first = run_autofit(*arguments, cwd=grid.parent)
    best = autofit.load(grid.parent / "best.json")
    again = run_autofit(*arguments, cwd=grid.parent)
    assert again.status == 0
    assert not TRIAL_LINE.search(again.stderr)
    assert autofit.load(grid.parent / "best.json").trials == best.trials
    assert TRIAL_LINE.search(first.stderr)


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid"])
def test_a_budget_of_trials_is_kept(grid: Path, sampler: str) -> None:
    done = run_autofit(
        "search", "--replay", grid, "--no-predict", "--sampler", sampler, "--trials", "4", cwd=grid.parent
    )
    assert done.status == 0
    trials = autofit.load(grid.parent / "best.json").trials
    assert (
        sum(
            r.role not in (Role.PLAYOFF, Role.CONFIRMATION) and r.outcome is not Outcome.SKIPPED
            for r in trials
        )
        <= 4
    )


def test_a_study_of_another_grid_is_refused(grid: Path) -> None:
    first = run_autofit("search", "--replay", grid, "--no-predict", "--study", "study.log", cwd=grid.parent)
    assert first.status == 0
    simulated_landscape(36, jitter=0.02, seed=5).save(grid)
    again = run_autofit("search", "--replay", grid, "--no-predict", "--study", "study.log", cwd=grid.parent)
    assert again.status == 2
    assert "landscape" in again.stderr


@pytest.mark.parametrize("option", ["--replay", "--dataset", "--study"])
def test_the_output_is_no_file_that_is_read(option: str, grid: Path) -> None:
    before = grid.read_bytes()
    more = () if option == "--replay" else ("--model", "bert-tiny", "--effective-batch", "36")
    done = run_autofit("search", option, grid, *more, "--output", grid, cwd=grid.parent)
    assert done.status == 2
    assert done.stderr.startswith(f"error: {option} and --output name the same file")
    assert grid.read_bytes() == before


@pytest.mark.parametrize(("option", "value"), [("--model", "gpt2"), ("--seq-len", "77"), ("--task", "causal-lm"), ("--device", "cpu")])
def test_a_grid_answers_for_what_it_was_recorded_of(option: str, value: str, grid: Path) -> None:
    found = Landscape.load(grid)
    replace(found, spec={**found.spec, "model": "bert-tiny", "task": "sequence-classification", "seq_len": 16}).save(grid)
    done = run_autofit("search", "--replay", grid, option, value, cwd=grid.parent)
    assert done.status == 2
    assert option in done.stderr.splitlines()[0]


def test_an_effective_batch_of_nothing_is_refused_beside_a_grid(grid: Path) -> None:
    done = run_autofit("search", "--replay", grid, "--effective-batch", "0", cwd=grid.parent)
    assert done.status == 2


def test_a_grid_answers_up_to_the_limit_that_it_was_recorded_under(grid: Path) -> None:
    found = Landscape.load(grid)
    replace(found, spec={**found.spec, "memory_limit_bytes": None, "enforced_limit_bytes": 8 * GIB}).save(grid)
    done = run_autofit("search", "--replay", grid, "--no-predict", "--memory", "12GiB", cwd=grid.parent)
    assert done.status == 2
    assert "above 8.0 GiB, under which the landscape was recorded" in done.stderr
    assert run_autofit("search", "--replay", grid, "--no-predict", cwd=grid.parent).status == 0
    assert autofit.load(grid.parent / "best.json").memory_limit_bytes == 8 * GIB


def test_a_study_that_could_not_be_read_again_is_refused(grid: Path) -> None:
    done = run_autofit("search", "--replay", grid, "--no-predict", "--study", "/dev/null", cwd=grid.parent)
    assert done.status == 2
    assert "is no regular file" in done.stderr


def test_a_grid_may_hold_arguments_and_tasks_that_are_not_known_here(grid: Path) -> None:
    found = Landscape.load(grid)
    points = [replace(p, config=p.config.but(extra=(("some_switch", True), ("attn_implementation", "eager")))) for p in found.points]
    replace(found, points=tuple(points), spec={"task": "graph-regression"}).save(grid)
    done = run_autofit("search", "--replay", grid, "--no-predict", cwd=grid.parent)
    assert done.status == 0, done.stderr
    assert "some_switch" in done.stdout


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["search", "--help"], ["estimate", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom autofit.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    status = end.code\n"
        "heavy = {'torch', 'transformers', 'optuna', 'datasets', 'accelerate', 'numpy', 'rich', 'cloudpickle'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"
    assert done.stdout.strip()


def test_help_lists_every_command_with_a_line(tmp_path: Path) -> None:
    done = run_autofit("--help", cwd=tmp_path)
    for command in ("search", "estimate", "show", "export", "confirm", "doctor", "landscape"):
        assert re.search(rf"^\s+{command}\s+\w.+\.$", done.stdout, re.MULTILINE), command


# -- signals ----------------------------------------------------------------------------------------------------------


def best_in(directory: Path) -> TuneResult:
    return autofit.load(directory / "best.json")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_in_a_trial_returns_the_best_so_far(
    start: type[Started], tmp_path: Path, number: int
) -> None:
    search = start(*REAL, *FEW, "--study", "study.log")  # type: ignore[call-arg]
    search.wait_for_trials(2)
    time.sleep(0.3)
    search.signal_group(number)
    done = search.end(ENDS_SOON)
    assert done.status == 0, done.stderr
    assert "Traceback" not in done.stderr
    result = best_in(tmp_path)
    assert result.stopped == "interrupted"
    assert result.best.config.label() in done.stdout
    assert "interrupted" in done.stdout
    assert sum(r.outcome is Outcome.COMPLETED for r in result.trials) >= 2
    assert gone_within(search.marker, 5) == []


@pytest.mark.slow
def test_a_signal_before_the_first_answer_ends_with_130_and_leaves_no_file(
    start: type[Started], tmp_path: Path
) -> None:
    search = start(*REAL, *FEW)  # type: ignore[call-arg]
    time.sleep(1.5)
    search.signal_group(signal.SIGINT)
    done = search.end(ENDS_SOON)
    assert done.status == 130
    assert "Traceback" not in done.stderr
    assert "error: interrupted" in done.stderr
    assert not (tmp_path / "best.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.1, 0.4])
def test_a_second_ctrl_c_ends_at_once_without_noise(
    start: type[Started], tmp_path: Path, pause: float
) -> None:
    search = start(*REAL, *FEW)  # type: ignore[call-arg]
    search.wait_for_trials(1)
    search.signal_group(signal.SIGINT)
    time.sleep(pause)
    with contextlib.suppress(ProcessLookupError):
        search.signal_group(signal.SIGINT)
    done = search.end(ENDS_SOON)
    # Killed by the signal itself when the interpreter has already put its handlers away: a shell says 130 for that too.
    assert done.status in (0, 130, -signal.SIGINT), done
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert gone_within(search.marker, 5) == []
    if (tmp_path / "best.json").exists():
        assert best_in(tmp_path).stopped == "interrupted"
    else:
        assert done.status == 130
        assert "error: interrupted" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_killed_at_any_moment_loses_no_trial_and_leaves_no_child(
    start: type[Started], tmp_path: Path
) -> None:
    """Ten times `kill -9`: while libraries are imported, in trials, and between them."""
    rng = random.Random(16)
    command = (*REAL, *FEW, "--checkpointing", "off", "--study", "study.log")
    finished: set[tuple[str, str, str]] = set()
    for attempt in range(10):
        search = start(*command)  # type: ignore[call-arg]
        if attempt % 3 == 0:
            time.sleep(rng.uniform(0.2, 4.0))
        else:
            search.wait_for_trials(1)
            time.sleep(rng.uniform(0.0, 0.8))
        search.process.kill()
        search.process.wait()
        assert gone_within(search.marker, 5) == [], "a child outlived its parent"
        finished |= set(TRIAL_LINE.findall(search.stderr))
        if (tmp_path / "study.log").exists():
            stored = len(records_in(tmp_path / "study.log"))
            assert stored >= len(finished), "a finished trial is not in the study"
    assert finished
    done = start(*command).end()  # type: ignore[call-arg]
    assert done.status == 0, done.stderr
    result = best_in(tmp_path)
    answered = {
        (str(r.number), str(r.config.per_device_train_batch_size), str(r.config.gradient_accumulation_steps))
        for r in result.trials
    }
    assert finished <= answered
    assert result.confirmed
    ran = [
        r.config
        for r in result.trials
        if r.role not in (Role.PLAYOFF, Role.CONFIRMATION) and r.outcome is Outcome.COMPLETED
    ]
    assert len(ran) == len(set(ran)), "no trial ran twice"


# -- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_landscape_is_recorded_gone_on_with_and_replayed(tmp_path: Path) -> None:
    workload = REAL[1:]
    narrow = (*workload, "--optim", "adamw_torch_fused", "--precision", "fp32", "--window", "200ms")
    first = run_autofit("landscape", *narrow, "--batch-size", "8,16", "--checkpointing", "off", cwd=tmp_path)
    assert first.status == 0, first.stderr
    assert first.stdout == "grid.json: 2 configurations, 2 fit\n"
    assert len(re.findall(r"^\[\d/2\]", first.stderr, re.MULTILINE)) == 2
    begun = Landscape.load(tmp_path / "grid.json")
    more = run_autofit("landscape", *narrow, "--batch-size", "4,8,16", "--checkpointing", "off", cwd=tmp_path)
    assert more.status == 0, more.stderr
    recorded = Landscape.load(tmp_path / "grid.json")
    assert {p.config.per_device_train_batch_size for p in recorded.points} == {4, 8, 16}
    assert recorded.points[:2] == begun.points, "what was there is kept"
    replayed = run_autofit("search", "--replay", "grid.json", cwd=tmp_path)
    assert replayed.status == 0, replayed.stderr
    result = best_in(tmp_path)
    assert result.best.config in {p.config for p in recorded.points}
    assert "replayed" in {w.code for w in result.warnings}
    refused = run_autofit("confirm", "best.json", cwd=tmp_path)
    assert refused.status == 2
    assert "replayed" in refused.stderr
    other = run_autofit("landscape", *narrow, "--seq-len", "16", cwd=tmp_path)
    assert other.status == 2
    assert "another" in other.stderr
    assert Landscape.load(tmp_path / "grid.json") == recorded


@pytest.mark.slow
def test_an_answer_is_confirmed_by_a_longer_run(tmp_path: Path) -> None:
    narrow = ("--batch-size", "8", "--checkpointing", "off", *FEW)
    searched = run_autofit(*REAL, *narrow, cwd=tmp_path)
    assert searched.status == 0, searched.stderr
    before = (tmp_path / "best.json").read_bytes()
    done = run_autofit("confirm", "best.json", "--steps", "5", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "survived 5 optimizer steps" in done.stdout
    assert re.search(r"^speed: [\d.]+ samples/s", done.stdout, re.MULTILINE)
    assert re.search(r"^memory: .* of 2.0 GiB$", done.stdout, re.MULTILINE)
    assert (tmp_path / "best.json").read_bytes() == before
    data = json.loads(before)
    data["memory_limit_bytes"] = 2 << 20
    (tmp_path / "tight.json").write_text(json.dumps(data))
    tight = run_autofit("confirm", "tight.json", "--steps", "2", cwd=tmp_path)
    assert tight.status == 3, tight.stderr
    assert "did not survive" in tight.stderr
    assert "Traceback" not in tight.stderr


@pytest.mark.slow
def test_doctor_says_what_can_be_searched_and_why_not_the_rest(tmp_path: Path) -> None:
    done = run_autofit("doctor", "--device", "cpu", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert done.stderr == ""
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines() if not line.startswith(" "))
    assert facts["device"].endswith("(cpu)")
    assert "free" in facts["memory"]
    assert "torch" in facts["software"]
    assert re.search(r"^precision\s+fp32\s+yes", done.stdout, re.MULTILINE)
    assert re.search(r"^precision\s+fp16\s+no: .*CPU", done.stdout, re.MULTILINE)
    assert re.search(r"^optimizer\s+adamw_torch_fused\s+yes", done.stdout, re.MULTILINE)
    assert "bert-base-uncased" in facts["presets"]
