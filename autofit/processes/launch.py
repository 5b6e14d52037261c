"""Starting children: from the fork server (milliseconds), or spawned afresh (seconds) where forking does not work.

Both give a `Child` with its own process group, its own answer pipe and its output in a log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from autofit.errors import WorkerError
from autofit.processes.child_environment import child_environment as child_environment

PRELOAD_TIMEOUT_SECONDS = 180.0
NAMES_PER_MESSAGE = 100
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from autofit.children.{module} import main; main({call})"
)


class Child(Protocol):
    """A running child."""

    @property
    def answer_fd(self) -> int:
        """Read end of its answer pipe."""
        ...

    def exit_status(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Never blocks."""
        ...

    def kill(self) -> None:
        """End its whole process group, data-loader workers included; idempotent."""
        ...

    def wakeup_fd(self) -> int | None:
        """A descriptor that becomes readable when the child ends; None when `exit_status` must be polled."""
        ...


class Launcher(Protocol):
    """Starts children."""

    def launch(self, request: bytes, log: BinaryIO) -> Child:
        """Start one child on `request`, its output going to `log`."""
        ...

    def close(self) -> None:
        """End the server and all children; idempotent."""
        ...


@dataclass
class _SpawnedChild:
    process: subprocess.Popen[bytes]
    answer_fd: int

    def exit_status(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        _kill_group(self.process.pid)
        self.process.wait()

    def wakeup_fd(self) -> int | None:
        return None


class SpawnLauncher:
    """A fresh interpreter per child: slower by the imports, with nothing inherited."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._children: list[_SpawnedChild] = []

    def launch(self, request: bytes, log: BinaryIO) -> Child:
        """Start one child."""
        with _request_pipe(request) as request_fd, _answer_pipe() as (answer_read, answer_write):
            numbers = [str(fd) for fd in (request_fd, answer_write, log.fileno())] + [str(os.getpid())]
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    BOOTSTRAP.format(module="worker", call=""),
                    json.dumps(sys.path),
                    *numbers,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[request_fd, answer_write, log.fileno()],
                start_new_session=True,
            )
        child = _SpawnedChild(process, answer_read)
        self._children.append(child)
        return child

    def close(self) -> None:
        """End all children."""
        for child in self._children:
            child.kill()
        self._children.clear()


@dataclass
class _ForkedChild:
    server: ForkserverLauncher
    number: int
    pid: int
    answer_fd: int
    status: int | None = None

    def exit_status(self) -> int | None:
        self.server.read_messages(0.0)
        return self.status

    def kill(self) -> None:
        if self.exit_status() is None:
            _kill_group(self.pid)
            deadline = time.monotonic() + 10
            while self.status is None and time.monotonic() < deadline:
                self.server.read_messages(0.1)
        else:
            _kill_group(self.pid)  # the child has ended; its data-loader workers may not have

    def wakeup_fd(self) -> int | None:
        return self.server.fileno()


@dataclass
class ForkserverLauncher:
    """Client of `autofit.children.forkserver`. Starts the server at once, so that its imports run while the caller goes on.

    Args:
        environment: of the server and so of all children.
    """

    environment: Mapping[str, str]
    preload_seconds: float | None = None
    _children: dict[int, _ForkedChild] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._closed = False
        call = "int(sys.argv[2])"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                BOOTSTRAP.format(module="forkserver", call=call),
                json.dumps(sys.path),
                str(theirs.fileno()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(self.environment),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def fileno(self) -> int:
        """The control socket."""
        return self._control.fileno()

    def wait_ready(self, timeout: float = PRELOAD_TIMEOUT_SECONDS) -> None:
        """Wait for the imports.

        Raises:
            WorkerError: the imports failed or took too long; the message holds the traceback's last line.
        """
        deadline = time.monotonic() + timeout
        while self.preload_seconds is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerError(f"the fork server did not finish its imports in {timeout:.0f} s")
            self.read_messages(min(left, 1.0))

    def preload(self, modules: list[str]) -> None:
        """Have the server import more modules (the model's own), so that children need not.

        In messages of a few names each: a script that imports all of transformers has thousands, and a message has a longest length.
        """
        for first in range(0, len(modules), NAMES_PER_MESSAGE):
            self._control.send(json.dumps({"import": modules[first : first + NAMES_PER_MESSAGE]}).encode())

    def remove_if_orphaned(self, directories: list[str]) -> None:
        """Have the server remove these should this process be killed."""
        self._control.send(json.dumps({"remove": directories}).encode())

    def launch(self, request: bytes, log: BinaryIO) -> Child:
        """Start one child."""
        self.wait_ready()
        number, self._next = self._next, self._next + 1
        with _request_pipe(request) as request_fd, _answer_pipe() as (answer_read, answer_write):
            message = json.dumps({"id": number}).encode()
            socket.send_fds(self._control, [message], [request_fd, answer_write, log.fileno()])
        child = _ForkedChild(self, number, 0, answer_read)
        self._children[number] = child
        deadline = time.monotonic() + PRELOAD_TIMEOUT_SECONDS  # it may still be busy with `preload`
        while child.pid == 0:
            if time.monotonic() > deadline:
                raise WorkerError(f"the fork server did not start a child in {PRELOAD_TIMEOUT_SECONDS:.0f} s")
            self.read_messages(1.0)
        return child

    def read_messages(self, timeout: float) -> None:
        """Take in what the server has to say, waiting at most `timeout` seconds for the first message.

        Raises:
            WorkerError: the server has ended.
        """
        while not self._closed:
            readable, _, _ = select.select([self._control], [], [], timeout)
            if not readable:
                return
            try:
                data = self._control.recv(1 << 16)
            except ConnectionResetError:  # it ended without reading all that was sent to it: said once, and its last words come after
                data = self._control.recv(1 << 16)
            if not data:
                raise WorkerError(f"the fork server ended with status {self._process.wait()}")
            self._take(json.loads(data))
            timeout = 0.0

    def _take(self, message: dict[str, object]) -> None:
        if "ready" in message:
            self.preload_seconds = float(str(message["ready"]))
        elif "failed" in message:
            raise _import_error(str(message["failed"]).strip())
        else:
            child = self._children[int(str(message["id"]))]
            if "pid" in message:
                child.pid = int(str(message["pid"]))
            else:
                child.status = int(str(message["exit"]))
                del self._children[child.number]

    def close(self) -> None:
        """End the server; it ends its children."""
        if self._closed:
            return
        self._closed = True
        for child in self._children.values():
            _kill_group(child.pid)
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"bye": True}).encode())
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _import_error(text: str) -> WorkerError:
    """The error for imports that failed: the last line of their traceback and where that was; all of it as a note."""
    lines = text.splitlines()
    where = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), None)
    place = "" if where is None else f" ({where})"
    error = WorkerError(f"the libraries cannot be imported: {lines[-1]}{place}", hint="run: autofit doctor")
    error.add_note(text)
    return error


def _kill_group(pid: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _request_pipe(request: bytes):  # type: ignore[no-untyped-def]
    """A descriptor that reads `request` to its end, whatever its size (an unlinked temporary file, not a pipe that can fill up)."""
    import tempfile

    with tempfile.TemporaryFile() as handle:
        handle.write(request)
        handle.seek(0)
        yield handle.fileno()


@contextlib.contextmanager
def _answer_pipe():  # type: ignore[no-untyped-def]
    """(read, write); the write end is closed in this process on exit, both on an error."""
    read, write = os.pipe()
    try:
        yield read, write
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
