"""What the driver says is optional: no driver, no card, or a question that it refuses are facts, never errors."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autofit.devices import nvml
from autofit.devices.device import MemoryHolder


class NVMLError(Exception):
    """As pynvml's."""


class Driver(SimpleNamespace):
    """Stands for the module `pynvml`: two cards, and questions that it can be told to refuse."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *refuses: str) -> None:
        super().__init__(refuses=refuses, sessions=0)

    def answer(self, name: str, value: Any) -> Any:
        if name in self.refuses:
            raise NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        self.answer("init", None)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(self.answer("handle", f"card {index}"))

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return str(self.answer("handle", f"card {name}"))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self.answer("memory", SimpleNamespace(used={"card 0": 100, "card 1": 200}.get(handle, 300)))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        own, other = (
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
            SimpleNamespace(pid=1, usedGpuMemory=None),
        )
        gone = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=7)
        return self.answer("processes", [own, other, gone])

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> Any:
        return self.answer("clock", 1000 * clock)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        return self.answer("temperature", 55)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self.answer("throttle", 4)

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self.answer("version", "570.1")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a driver in pynvml's place."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(driver: Driver | None) -> Driver | None:
        monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
        return driver

    return put


@pytest.mark.parametrize(
    "driver", [None, Driver("init"), Driver("handle")], ids=["no package", "no driver", "no card"]
)
def test_without_a_card_there_are_no_facts(install: Any, driver: Driver | None) -> None:
    install(driver)
    assert nvml.used_bytes() is None
    assert nvml.holders() == ()
    assert nvml.conditions() == {}
    assert driver is None or driver.sessions == 0


def test_the_drivers_answers_are_passed_on(install: Any) -> None:
    driver = install(Driver())
    assert nvml.used_bytes() == 100
    assert nvml.used_bytes(1) == 200
    assert nvml.conditions() == {
        "sm_clock_mhz": 1000,
        "memory_clock_mhz": 2000,
        "temperature_c": 55,
        "throttle_reasons": 4,
        "driver": "570.1",
    }
    assert driver.sessions == 0, "every session is closed"


def test_others_on_the_card_are_named_and_this_process_is_not(install: Any) -> None:
    install(Driver())
    first, second = nvml.holders()
    assert first.pid == 1
    assert first.used_bytes is None
    assert first.name not in ("", "unknown")
    assert second == MemoryHolder(pid=2**22 + 1, name="unknown", used_bytes=7)


def test_a_question_that_the_card_refuses_leaves_the_others(install: Any) -> None:
    driver = install(Driver("memory", "processes", "clock", "version"))
    assert nvml.used_bytes() is None
    assert nvml.holders() == ()
    assert nvml.conditions() == {"temperature_c": 55, "throttle_reasons": 4}
    assert driver.sessions == 0


@pytest.mark.parametrize(
    ("visible", "index", "used"),
    [("1", 0, 200), ("1,0", 1, 100), ("GPU-8a3f", 0, 300), ("", 1, 200), (" 1 , 0 ", 0, 200), ("1", 1, 200)],
)
def test_cards_are_counted_among_the_visible_ones(
    install: Any, monkeypatch: pytest.MonkeyPatch, visible: str, index: int, used: int
) -> None:
    install(Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.used_bytes(index) == used
