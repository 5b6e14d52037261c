"""The fork server: a process that has imported torch and transformers, done nothing else, and forks one child per request.

Why not `multiprocessing`'s: its children import the user's `__main__` (a script without a main guard would start itself again), it
does not put a child into its own process group, and it cannot say which signal ended it. Rules kept here:

- imports only: one parallel torch operation before the fork leaves every child with a dead thread pool;
- no CUDA call: where peft is installed, transformers' Trainer imports it, and it imports bitsandbytes, which asks the card for its compute capability;
  that question is answered here (see `without_cuda`);
- it lives as long as the parent's end of the control socket is open, and its children live as long as it does.

Wire: a `SOCK_SEQPACKET` Unix socket. Parent: `{"id": n}` with three descriptors (request, answer, log), `{"import": [names]}`,
`{"remove": [directories]}` (when the parent dies without having said `{"bye": true}`), `{"bye": true}`.
Server: `{"ready": seconds}` once, `{"id": n, "pid": p}`, `{"id": n, "exit": status}` (negative = signal).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import time
import traceback

from autofit.processes import leftovers
from autofit.processes.lifeline import die_with_parent

PRELOAD = ("torch", "transformers", "transformers.trainer", "accelerate", "numpy", "autofit.children.worker", "autofit.workload.trial")
MESSAGE_BYTES = 1 << 16
CAPABILITY_FOR_IMPORTS = (8, 0)


def main(control_fd: int) -> None:
    """Serve until the parent is gone; never returns normally in a child. Whatever an import raises goes to the parent with its traceback."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = time.monotonic()
    try:
        with _leaving_if_parent_dies(control), without_cuda():
            for name in PRELOAD:
                importlib.import_module(name)
    except Exception:
        control.send(json.dumps({"failed": traceback.format_exc()[-8000:]}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": time.monotonic() - start}).encode())
    _serve(control)


@contextlib.contextmanager
def without_cuda():  # type: ignore[no-untyped-def]
    """Answer imports that ask for the card's compute capability, which would start CUDA here and make it unusable in every fork.

    bitsandbytes asks, and uses the answer for nothing but a property that it does not read itself (checked against 0.50).
    """
    cuda = importlib.import_module("torch").cuda
    original = cuda.get_device_capability
    cuda.get_device_capability = lambda device=None: CAPABILITY_FOR_IMPORTS
    try:
        yield
    finally:
        cuda.get_device_capability = original


@contextlib.contextmanager
def _leaving_if_parent_dies(control: socket.socket):  # type: ignore[no-untyped-def]
    """While imports keep this process busy for seconds, look twice a second whether the parent is still there.

    A timer signal, not a thread: threads and fork do not mix.
    """

    poll = select.poll()
    poll.register(control, select.POLLHUP)  # seen even while messages wait to be read

    def look(_signal: int, _frame: object) -> None:
        if any(event & select.POLLHUP for _, event in poll.poll(0)):
            _remove(_unread(control))
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _serve(control: socket.socket) -> None:
    left_behind: list[str] = []
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    try:
        while True:
            ready = select.select([control.fileno(), wake_read], [], [])[0]
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _reap(control, children)
            if control.fileno() in ready and not _handle(control, children, (wake_read, wake_write), left_behind):
                break
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    _remove(left_behind)  # the parent is gone; where this server breaks, it is there and says so


def _unread(control: socket.socket) -> list[str]:
    """Directories in messages that were not taken in before the parent went."""
    found: list[str] = []
    while data := control.recv(MESSAGE_BYTES):
        message = json.loads(data)
        found = [] if "bye" in message else found + message.get("remove", [])
    return found


def _remove(directories: list[str]) -> None:
    for directory in directories:
        leftovers.sweep(directory, everything=True)
        shutil.rmtree(directory, ignore_errors=True)


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = children.pop(pid, None)
        if number is not None:
            control.send(json.dumps({"id": number, "exit": os.waitstatus_to_exitcode(status)}).encode())


def _handle(
    control: socket.socket, children: dict[int, int], wake: tuple[int, int], left_behind: list[str]
) -> bool:
    """Answer one message; False when the parent has gone."""
    data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
    if not data:
        return False
    message = json.loads(data)
    if "remove" in message:
        left_behind += message["remove"]
        return True
    if "bye" in message:
        left_behind.clear()
        return True
    if "import" in message:
        for name in message["import"]:
            with contextlib.suppress(Exception):  # it only saves time: who needs the module meets the error where it can be told
                importlib.import_module(name)
        gc.freeze()
        return True
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_child(control, wake, fds, server_pid)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # as the child does: whichever comes first, a kill of the group finds it
    for fd in fds:
        os.close(fd)
    children[pid] = message["id"]
    control.send(json.dumps({"id": message["id"], "pid": pid}).encode())
    return True


def _become_child(control: socket.socket, wake: tuple[int, int], fds: list[int], server_pid: int) -> None:
    """In the forked child: own process group, own descriptors, default signals; run the worker; never return."""
    status = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for fd in (control.fileno(), *wake):
            os.close(fd)
        from autofit.children.worker import run

        run(*fds)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
