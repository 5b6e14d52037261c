"""Predictions for a whole space: for known cards and models, plainest classes first, within patience, and never claimed where they fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autofit.devices.cards import find
from autofit.devices.device import Device
from autofit.errors import UserError, WorkerError
from autofit.forecasts.prediction import class_representatives, predictor_for
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import Space
from autofit.units import GIB, MIB
from tests.lawful import SETTING, Child, grid

FACTS: Mapping[str, Any] = {"digest": "by hand", "seq_len": 128}
SPACE = Space(configs=grid())
T4 = Device(
    kind="cuda",
    name="Tesla T4",
    total_memory_bytes=15 * GIB,
    context_bytes=140 * MIB,
    compute_capability="7.5",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path))


def _predict(
    ask: Any,
    said: list[str],
    *,
    device: Device = T4,
    facts: Mapping[str, Any] = FACTS,
    space: Space = SPACE,
    **more: Any,
) -> Any:
    return predictor_for(
        device=device, workload=SETTING.workload, facts=facts, space=space, ask=ask, say=said.append, **more
    )


def test_every_configuration_of_the_space_is_forecast_with_the_devices_own_context() -> None:
    said: list[str] = []
    forecast = _predict(Child(), said)(2 * GIB)
    assert said == []
    for config in SPACE.configs:
        told = forecast.needed(config)
        assert told is not None
        assert told.low_bytes > T4.context_bytes
    assert forecast.roof is find("T4")


def test_one_configuration_per_class_is_traced_those_of_many_batches_and_the_plainest_first() -> None:
    chosen = class_representatives(SETTING, SPACE)
    assert len(chosen) == len({SETTING.request(c).class_key() for c in SPACE.configs}) == 16
    assert chosen[0].optim == "adamw_torch_fused"
    assert not chosen[0].gradient_checkpointing
    assert chosen[0].gradient_accumulation_steps > 1
    places = [
        (c.gradient_accumulation_steps == 1, c.optim != "adamw_torch_fused", c.gradient_checkpointing) for c in chosen
    ]
    assert places == sorted(places)


def test_a_replayed_allocator_gives_nothing_back() -> None:
    predict, without = _predict(Child(), []), _predict(Child(), [], releases=False)
    highs = []
    for config in SPACE.configs:
        alone = without(2 * GIB).needed(config)
        assert alone is not None
        live, replayed = predict(alone.bytes), without(alone.bytes)  # where it just fits as it is
        assert (live.releases, replayed.releases) == (True, False)
        one, other = live.needed(config), replayed.needed(config)
        assert one is not None
        assert other is not None
        highs.append((one.high_bytes, other.high_bytes))
    assert all(a <= b for a, b in highs)
    assert any(a < b for a, b in highs)


def test_the_devices_own_capability_decides_and_a_recorded_card_is_looked_up() -> None:
    child = Child()
    _predict(child, [])
    assert {
        request["compute_capability"] for payload in child.payloads for request in payload["requests"]
    } == {"7.5"}
    recorded = Child()
    _predict(
        recorded, [], device=Device(kind="cuda", name="NVIDIA A100-SXM4-80GB", total_memory_bytes=80 * GIB)
    )
    assert {
        request["compute_capability"] for payload in recorded.payloads for request in payload["requests"]
    } == {"8.0"}


@pytest.mark.parametrize(
    "device",
    [
        Device(kind="cpu", name="cpu", total_memory_bytes=GIB),
        Device(kind="cuda", name="somebody's own chip", total_memory_bytes=GIB),
        Device(kind="cuda", name="AMD Instinct MI300X", total_memory_bytes=GIB),
    ],
    ids=lambda device: device.name,
)
def test_a_device_that_the_trace_does_not_know_is_not_predicted(device: Device) -> None:
    child = Child()
    assert _predict(child, [], device=device) is None
    assert child.payloads == []


def test_a_model_without_a_digest_is_not_predicted() -> None:
    assert _predict(Child(), [], facts={"model": "unknown"}) is None


def test_what_cannot_be_traced_is_said_once_and_has_no_forecast() -> None:
    said: list[str] = []
    forecast = _predict(Child(refuse="adafactor"), said)(2 * GIB)
    assert said == ["memory of some configurations is not predicted: adafactor has no fake kernel"]
    for config in SPACE.configs:
        assert (forecast.needed(config) is None) == (config.optim == "adafactor")


def test_where_nothing_can_be_traced_nothing_is_claimed() -> None:
    said: list[str] = []
    adafactor = Space(configs=tuple(c for c in grid() if c.optim == "adafactor"))
    assert _predict(Child(refuse="adafactor"), said, space=adafactor) is None
    assert len(said) == 1


@pytest.mark.parametrize(
    "error", [UserError("no such model"), WorkerError("the child broke")], ids=lambda e: type(e).__name__
)
def test_a_child_that_fails_costs_the_predictions_and_not_the_search(error: Exception) -> None:
    def broken(_payload: dict[str, Any]) -> dict[str, Any]:
        raise error

    said: list[str] = []
    assert _predict(broken, said) is None
    assert said == [f"memory is not predicted: {error}; it is learned from the trials"]


def test_patience_ends_the_tracing_keeps_what_was_traced_and_says_how_much_is_missing() -> None:
    said: list[str] = []
    child = Child()
    forecast = _predict(child, said, patience_seconds=-1.0)
    assert forecast is None
    assert child.payloads == []
    assert said == ["memory of 16 of 16 classes is not predicted: tracing took more than -1 s"]


def test_a_second_search_asks_no_child() -> None:
    _predict(Child(), [])
    again = Child()
    assert _predict(again, []) is not None
    assert again.payloads == []


def test_a_configuration_outside_the_space_has_no_forecast() -> None:
    forecast = _predict(Child(), [])(2 * GIB)
    assert forecast.needed(TrialConfig(per_device_train_batch_size=2, precision=Precision.FP16)) is None
