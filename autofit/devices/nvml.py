"""What the NVIDIA driver says of a card, read without initialising CUDA. Every answer is optional: no driver, no facts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from autofit.devices.device import MemoryHolder


@contextlib.contextmanager
def _card(index: int) -> Iterator[tuple[Any, Any] | None]:
    """(pynvml, handle) of the card that is `index` among the visible ones; None without driver or card."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        try:
            card = pynvml, _handle(pynvml, index)
        except pynvml.NVMLError:
            card = None
        # The caller's own questions too: a card may refuse some of them.
        with contextlib.suppress(pynvml.NVMLError):
            yield card
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, index: int) -> Any:
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    name = visible[index] if index < len(visible) else str(index)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def used_bytes(index: int = 0) -> int | None:
    """Used memory of the whole card, all processes."""
    with _card(index) as card:
        return None if card is None else int(card[0].nvmlDeviceGetMemoryInfo(card[1]).used)
    return None


def holders(index: int = 0) -> tuple[MemoryHolder, ...]:
    """Other processes that hold memory on the card (a driver in a container may hide them)."""
    with _card(index) as card:
        if card is None:
            return ()
        pynvml, handle = card
        found = []
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid != os.getpid():
                found.append(
                    MemoryHolder(
                        pid=process.pid, name=_process_name(process.pid), used_bytes=process.usedGpuMemory
                    )
                )
        return tuple(found)
    return ()


def conditions(index: int = 0) -> dict[str, Any]:
    """Clocks (MHz), temperature (degrees C), throttle reasons (bit mask) and driver version, as far as the driver tells."""
    with _card(index) as card:
        if card is None:
            return {}
        pynvml, handle = card
        readings = {
            "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "driver": lambda: pynvml.nvmlSystemGetDriverVersion(),
        }
        found = {}
        for name, read in readings.items():
            with contextlib.suppress(pynvml.NVMLError):
                found[name] = read()
        return found
    return {}


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return "unknown"
