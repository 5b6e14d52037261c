"""Stage *tests*: `pytest -m gpu`, each test's outcome kept as soon as it is known. Tests that passed are not run again."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.evidence.bench import Bench, findings, missing, run_child
from benchmarks.evidence.box import Box
from benchmarks.evidence.inside.pytest_log import LOG_VARIABLE, PARENT_VARIABLE
from benchmarks.evidence.store import DONE, FAILED, SKIPPED, Sheet

NEEDED = ("pytest", "hypothesis")
WHOLE = "pytest -m gpu"
FOLLOWED_SECONDS = 5.0  #: between two looks at what pytest has written


def planned(bench: Bench) -> list[str]:
    """Keys of this stage: the run to its end; single tests are known only to pytest."""
    return [WHOLE]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Run the tests that have not passed."""
    if sheet.settled(WHOLE) or not box.holds(5.0):
        return
    absent = missing(*NEEDED)
    if absent:
        sheet.skip(WHOLE, f"{', '.join(absent)} is not installed")
        return
    log = bench.folder.file("inside", "tests.jsonl")
    _take_over(sheet, log)  # of a call that was killed
    log.unlink(missing_ok=True)
    environment = bench.environment() | {LOG_VARIABLE: str(log), PARENT_VARIABLE: str(os.getpid())}
    status: int | None = None
    output = ""
    try:
        with repeated(partial(_take_over, sheet, log), FOLLOWED_SECONDS):
            status, output = run_child(command(sheet), environment, box.left)
    finally:
        _take_over(sheet, log)
    if status is None:  # cut off at the end of the box: those that had passed are kept, and the whole run is left
        return
    conclude(bench, sheet, status, output)


@contextlib.contextmanager
def repeated(act: Callable[[], None], seconds: float) -> Iterator[None]:
    """Do something every few seconds beside the block, so that who reads after a kill finds what was known."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def conclude(bench: Bench, sheet: Sheet, status: int, output: str) -> None:
    """Say what became of the whole run: it counts unless pytest itself did not work."""
    failed = [key for key, row in sheet.rows.items() if row["state"] == FAILED and key != WHOLE]
    ended = status in (0, 5) or (status == 1 and bool(failed))  # 5: every test had passed before; 1 with no test: pytest itself
    state = DONE if ended else FAILED
    sheet.put(
        WHOLE,
        state,
        exit_status=status,
        failed=failed,
        error=None if state == DONE else output,
        output=output[-2000:],
    )
    bench.say(f"tests: exit status {status}, {len(failed)} failed")


def command(sheet: Sheet) -> list[str]:
    """The pytest command; without pytest-timeout or pytest-xdist the project's own options would be refused."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.evidence.inside.pytest_log",
    ]
    if missing("pytest_timeout", "xdist"):
        words += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
    if missing("optuna"):
        words += ["-o", "filterwarnings="]  # one of the project's names a class of Optuna's
    for name, row in sheet.rows.items():
        if row["state"] == DONE and name != WHOLE:
            words += ["--deselect", name]
    return [*words, "tests/gpu"]


def _take_over(sheet: Sheet, log: Path) -> None:
    states = {"passed": DONE, "failed": FAILED, "skipped": SKIPPED}
    for found in findings(log):
        if sheet.rows.get(found["test"], {}).get("seconds") == found["seconds"]:
            continue
        more = {"error": found["text"]} if found["outcome"] == "failed" else {"reason": found["text"]}
        sheet.put(found["test"], states[found["outcome"]], seconds=found["seconds"], **more)
