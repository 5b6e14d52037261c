"""What starting costs: `--help`, the fork server's imports, and what each trial pays beside building its model.

    python -m benchmarks.startup [--repeats 5]

Prints medians of wall seconds with their range, one line per figure. A trial's start is the time from launch to the child's first word, which comes
after a parallel operation has run in it; a spawned interpreter is measured beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from autofit.processes.launch import ForkserverLauncher, Launcher, SpawnLauncher, child_environment
from autofit.processes.protocol import Event, Kind, decode_event, encode_request


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(
        f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}, {repeats} repeats: median (least to most) in seconds"
    )
    report("autofit --help", [timed(show_help) for _ in range(repeats)])
    environment = child_environment("cpu", os.environ)
    server = ForkserverLauncher(environment)
    server.wait_ready()
    report("fork server's imports, once", [server.preload_seconds or 0.0])
    started(server)  # the first fork also faults in what the imports left on disk
    report("forked trial, to its first word", [started(server) for _ in range(repeats)])
    server.close()
    spawner = SpawnLauncher(environment)
    report("spawned trial, to its first word", [started(spawner) for _ in range(min(3, repeats))])
    spawner.close()


def show_help() -> None:
    """Run `autofit --help` in a process of its own."""
    code = "from autofit.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, "--help"], check=True, stdout=subprocess.DEVNULL)


def started(launcher: Launcher) -> float:
    """Seconds from launch to the child's word that it started."""
    request = encode_request(Kind.DESCRIBE, {"workload": None, "device": "cpu"})
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        child = launcher.launch(request, log)
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(child.answer_fd, 1)
    seconds = time.perf_counter() - begin
    event = decode_event(line)
    child.kill()
    os.close(child.answer_fd)
    if event is None or event["event"] != Event.STARTED:
        raise SystemExit(f"the child said {line!r} first")
    return seconds


def timed(call: Callable[[], None]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def report(name: str, seconds: list[float]) -> None:
    """Print one figure."""
    print(f"{name:<36} {statistics.median(seconds):7.3f} ({min(seconds):.3f} to {max(seconds):.3f})")


if __name__ == "__main__":
    main()
