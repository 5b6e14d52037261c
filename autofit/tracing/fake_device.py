"""Makes fake `cuda` tensors differentiable on a machine without a GPU.

`FakeTensorMode` can create `cuda` tensors anywhere, but autograd asks the CUDA runtime two questions that a machine
without a GPU cannot answer: who guards the current device, and whether it has a context. Both answers are replaced in the C++
objects of the running process. That touches private tables of libtorch, so it is only ever done in a child process,
and only after `self_test` has seen the same patch work in a throw-away process.

Covered: Linux on x86-64, CPU-only and CUDA builds. Real cards are hidden from the process; where it is too late for that the
real device serves, unpatched.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from autofit.memory.request import TraceUnavailable

SELF_TEST_SECONDS = 120.0
_CUDA = 1  # index of DeviceType::CUDA in c10's registry of device guards
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTRY_SLOTS = 32
_HOOKS_GETTER = "_ZN2at6detail12getCUDAHooksEv"
_HOOKS_SLOTS = (
    96  # more than CUDAHooksInterface has; what follows its table in memory is copied but never called
)
_IS_BUILT, _HAS_PRIMARY_CONTEXT = (
    2,
    4,
)  # virtual functions of AcceleratorHooksInterface, after the two destructors

_alive: list[Any] = []  # what C++ now points at must never be collected


class Installed(StrEnum):
    """How this process came to have a differentiable fake device."""

    NATIVE = "native"
    PATCHED = "patched"


def require_platform() -> None:
    """Raise `TraceUnavailable` where the patches are not known to work."""
    import torch

    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{sys.platform} on {platform.machine()}"
        raise TraceUnavailable(f"tracing needs Linux on x86-64, this is {here}")
    if torch.version.hip is not None:
        raise TraceUnavailable("tracing needs a CPU or CUDA build of torch, this is one for ROCm")


def install() -> Installed:
    """Give this process a differentiable fake `cuda` device. Idempotent. Child processes only.

    Raises:
        TraceUnavailable: another platform, or a libtorch without the expected symbols.
    """
    import torch

    require_platform()
    _hide_devices()
    if torch.cuda.is_available():
        return Installed.NATIVE
    if not _alive:
        try:
            _install_guard()
            _install_hooks()
            _prove_backward()
        except (OSError, AttributeError, ValueError) as error:
            raise TraceUnavailable(f"this torch ({torch.__version__}) cannot be patched: {error}") from error
    return Installed.PATCHED


def _hide_devices() -> None:
    """Keep real cards out of this process where CUDA has not looked for them yet.

    A trace needs none, and the fake mode would open a context on one: memory that a running trial is measured against.
    """
    import torch

    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _prove_backward() -> None:
    """One tiny backward. The autograd engine counts devices once, at the first backward of a process: too late for us then."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(2, device="cuda", requires_grad=True)
        try:
            (x * 2).sum().backward()
        except RuntimeError as error:
            raise TraceUnavailable(
                f"autograd cannot use a fake device in this process: {str(error).splitlines()[0]}"
            ) from error


def is_installed() -> bool:
    """Whether this process is patched (and has run a backward)."""
    return bool(_alive)


def _library(name: str) -> ctypes.CDLL:
    import torch

    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _callback(value: int) -> int:
    """Address of a C function of two words that returns `value`."""
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(
        lambda _self, _argument: value
    )
    _alive.append(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _install_guard() -> None:
    """Put torch's own no-op guard into the slot of CUDA.

    The official hook replaces a guard only if it reports no device, and a CPU-only build has no guard at all. So first an object
    whose every virtual function returns 0 (no device) goes in: that needs no knowledge of the table's layout.
    """
    import torch

    registry = (ctypes.c_void_p * _REGISTRY_SLOTS).in_dll(_library("libc10.so"), _REGISTRY)
    placeholder = 0
    if not registry[_CUDA]:
        table = (ctypes.c_void_p * 64)(*([_callback(0)] * 64))
        guard = (ctypes.c_void_p * 2)(ctypes.addressof(table), 0)
        _alive.extend([table, guard])
        placeholder = ctypes.addressof(guard)
        registry[_CUDA] = placeholder
    torch._C._ensureCUDADeviceGuardSet()
    if placeholder and registry[_CUDA] == placeholder:
        raise ValueError("the no-op device guard was not installed")


def _install_hooks() -> None:
    """Answer "CUDA is built" and "there is no context yet" in a copy of the hooks' virtual table.

    The order of the virtual functions is private: this is the part that the self-test is there for.
    """
    getter = getattr(_library("libtorch_cpu.so"), _HOOKS_GETTER)
    getter.restype = ctypes.c_void_p
    instance = ctypes.cast(getter(), ctypes.POINTER(ctypes.c_void_p))
    old = ctypes.cast(instance[0] or 0, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * (_HOOKS_SLOTS + 2))(*[old[i] for i in range(-2, _HOOKS_SLOTS)])
    table[2 + _IS_BUILT] = _callback(1)
    table[2 + _HAS_PRIMARY_CONTEXT] = _callback(0)
    _alive.append(table)
    instance[0] = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)


def try_out() -> None:
    """Install, then train a tiny network with every patch in place; raise or crash if anything is off."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autofit.tracing import kernels, patches

    install()
    kernels.register_missing_kernels()
    layer_bytes = 64 * 64 * 4
    with FakeTensorMode(allow_non_fake_inputs=True), patches.applied((8, 0)) as routes:
        with torch.device("cuda"):
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.LayerNorm(64))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = model(torch.ones(4, 64, device="cuda"))
            x = x.to(torch.bfloat16).view(1, 4, 2, 32).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        y.float().sum().backward()
        optimizer.step()
        weight = next(model.parameters())
        facts = {
            "backward reached the weights": weight.grad is not None and weight.grad.device.type == "cuda",
            "a storage knows its size": weight.untyped_storage().nbytes() == layer_bytes,
            "autocast ran": y.dtype == torch.bfloat16,
            "attention was routed": dict(routes) == {"flash": 1},
            "the optimizer has its state": len(optimizer.state) == 4,
        }
    failed = [name for name, held in facts.items() if not held]
    if failed:
        raise TraceUnavailable(f"self-test of the fake device failed: not true that {', '.join(failed)}")


def _cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "autofit" / "fake-device.json"


def _identity() -> str:
    """What the outcome of the self-test depends on: torch, its build, python, and the patches themselves."""
    import torch

    sources = [Path(__file__), Path(__file__).with_name("patches.py"), Path(__file__).with_name("kernels.py")]
    stamp = "-".join(str(path.stat().st_mtime_ns) for path in sources)
    return f"{torch.__version__} {torch.__file__} {platform.python_version()} {stamp}"


@functools.cache
def self_test() -> str | None:
    """Run `try_out` in a throw-away process, once per torch version; the verdict is kept in the user's cache.

    Returns:
        None when the patches work here, else the reason why not.
    """
    path, identity = _cache_file(), _identity()
    try:
        known = json.loads(path.read_text())
        if known.get("identity") == identity:
            return None if known["reason"] is None else str(known["reason"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # no verdict yet, or an unreadable one: test again
    reason = run_try_out() and run_try_out()  # a failure must repeat itself before it is believed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"identity": identity, "reason": reason}))
        partial.replace(path)
    except OSError:
        pass  # a read-only home costs a repeated test, nothing else
    return reason


def run_try_out() -> str | None:
    """`try_out` in a process of its own. Returns None, or what went wrong in one line."""
    # Without the libraries' own clean-up: the engine's thread for a device that does not exist can abort it.
    code = f"import os; from {__name__} import try_out; try_out(); os._exit(0)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=SELF_TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "self-test of the fake device did not end in time"
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    if done.returncode < 0:
        return f"self-test of the fake device died of signal {-done.returncode}: {last[0]}"
    return last[0].removeprefix("autofit.memory.request.TraceUnavailable: ")
