"""Facts about a device survive JSON, and the default limit leaves a margin in bytes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from autofit.devices.device import Device, MemoryHolder
from autofit.problem.config import Precision
from autofit.units import GIB, MIB
from tests.strategies import devices


@given(devices())
def test_a_device_survives_json(device: Device) -> None:
    assert Device.from_json(json.loads(json.dumps(device.to_json()))) == device


def test_a_device_is_named_as_torch_names_it() -> None:
    assert Device(kind="cpu", name="cpu", total_memory_bytes=1).torch_name == "cpu"
    assert Device(kind="cuda", index=2, name="T4", total_memory_bytes=1).torch_name == "cuda:2"


@given(devices())
def test_the_default_limit_is_positive_and_leaves_the_margin(device: Device) -> None:
    limit = device.default_limit_bytes()
    assert limit >= 1
    free = device.total_memory_bytes if device.free_memory_bytes is None else device.free_memory_bytes
    assert limit == 1 or limit + device.margin_bytes() <= min(free, device.total_memory_bytes)


def test_the_margin_is_in_bytes_of_the_device() -> None:
    def margin(kind: str, total: int) -> int:
        return Device(kind=kind, name="x", total_memory_bytes=total).margin_bytes()

    assert margin("cuda", 8 * GIB) == 256 * MIB
    assert margin("cuda", 80 * GIB) == 80 * GIB // 50
    assert margin("cpu", 4 * GIB) == GIB
    assert margin("cpu", 64 * GIB) == 8 * GIB


def test_what_others_hold_is_not_ours_to_use() -> None:
    card = Device(kind="cuda", name="T4", total_memory_bytes=16 * GIB, free_memory_bytes=10 * GIB)
    assert card.default_limit_bytes() == 10 * GIB - card.margin_bytes()


def test_a_sparse_description_is_filled_in() -> None:
    assert Device.from_json({"total_memory_bytes": 5}) == Device(
        kind="cuda", name="unknown", total_memory_bytes=5, precisions=(Precision.FP32,)
    )
    assert Device.from_json({"name": "Some CPU", "total_memory_bytes": 5, "watts": 3}).kind == "cpu"
    holder = {"pid": 3, "name": "jupyter"}
    found = Device.from_json({"name": "A100", "total_memory_bytes": 5, "holders": [holder]})
    assert found.holders == (MemoryHolder(pid=3, name="jupyter"),)


@given(st.integers(1, 1 << 45))
def test_a_card_never_offers_more_than_it_has(total: int) -> None:
    card = Device(kind="cuda", name="x", total_memory_bytes=total, free_memory_bytes=2 * total)
    assert card.default_limit_bytes() <= total
