"""A landscape survives its file; one that is foreign, newer or broken is refused by position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from autofit.devices.device import Device
from autofit.errors import FileFormatError
from autofit.problem.config import TrialConfig
from autofit.trials.landscape import SCHEMA, VERSION, Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.trial import AFTER_SEARCH
from autofit.trials.uneven import BatchSizes
from tests.refusals import refused
from tests.strategies import landscapes

CONFIG = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
MEASURED = Measurement(
    micro_step_seconds=(0.5, 0.6),
    fetch_seconds=(0.1,),
    update_seconds=(0.2,),
    memory=Memory(peak_reserved_bytes=9),
)
DEVICE = Device(kind="cpu", name="cpu", total_memory_bytes=1 << 30)
GOOD = Landscape(points=(Point(config=CONFIG, measurement=MEASURED),), device=DEVICE).to_json()
POINT = GOOD["points"][0]


@given(landscapes())
def test_a_landscape_survives_json(landscape: Landscape) -> None:
    assert Landscape.from_json(json.loads(json.dumps(landscape.to_json(), allow_nan=False))) == landscape


def test_a_landscape_survives_its_file(tmp_path: Path) -> None:
    landscape = Landscape.from_json(GOOD)
    landscape.save(tmp_path / "grid.json")
    assert Landscape.load(tmp_path / "grid.json") == landscape
    assert landscape.effective_batch == 8


def test_only_points_are_needed() -> None:
    found = Landscape.from_json({"schema": SCHEMA, "version": VERSION, "points": [POINT]})
    assert found.points == (Point(config=CONFIG, measurement=MEASURED),)
    assert (found.device.name, found.device.total_memory_bytes) == ("unknown", 0)
    assert (found.spec, found.software, found.modelled) == ({}, {}, False)


def test_a_point_without_a_measurement_was_out_of_memory() -> None:
    assert Point(config=CONFIG).to_json() == {"config": CONFIG.to_json(), "outcome": "oom"}
    assert Point.from_json({"config": CONFIG.to_json(), "outcome": "oom"}) == Point(config=CONFIG)


def test_uneven_batches_of_several_runs_keep_an_epochs_time() -> None:
    rng = np.random.default_rng(0)
    epoch = rng.lognormal(6.0, 0.8, size=4000)

    def run() -> Measurement:
        sizes = rng.choice(epoch, 12)
        told = BatchSizes(measured=tuple(sizes), mean=float(epoch.mean()), mean_square=float((epoch**2).mean()))
        return Measurement(micro_step_seconds=tuple(0.002 + 1e-5 * sizes), update_seconds=(0.01, 0.01, 0.04), sizes=told)

    truth = 0.002 + 1e-5 * float(epoch.mean())
    one = Point(config=CONFIG, measurement=run())
    joined = one.joined(run())
    loaded = Point.from_json(json.loads(json.dumps(one.to_json())))
    for point in (one, joined, joined.joined(run()), loaded, loaded.joined(run())):
        for kept in (point, Point.from_json(json.loads(json.dumps(point.to_json())))):
            assert kept.measurement is not None
            assert kept.measurement.t_micro == pytest.approx(truth, rel=1e-6)
            assert kept.measurement.t_update == pytest.approx(0.02), "the mean, as beside uneven batches"
    assert joined.runs == 2


def test_waits_for_workers_are_kept_without_their_bursts() -> None:
    bursts = Measurement(
        micro_step_seconds=(0.1,) * 8, fetch_seconds=(0.0, 0.0, 0.0, 0.4) * 2, facts={"loader": {"dataloader_num_workers": 4}}
    )
    kept = Point.from_json(Point(config=CONFIG, measurement=bursts).to_json()).measurement
    assert kept is not None
    assert kept.t_fetch == pytest.approx(bursts.t_fetch)


def test_an_empty_landscape_is_refused() -> None:
    with refused("^the landscape has no points$", kind=FileFormatError):
        Landscape(points=(), device=DEVICE)


def test_a_configuration_twice_is_refused() -> None:
    with refused("^the landscape holds a configuration twice$", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": [POINT, POINT]})


def test_extras_that_python_takes_for_equal_are_one_configuration() -> None:
    twice = [{**POINT, "config": CONFIG.but(extra=(("torch_compile", value),)).to_json()} for value in (True, 1)]
    with refused("^the landscape holds a configuration twice$", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": twice})


@pytest.mark.parametrize("name", AFTER_SEARCH)
def test_what_is_tuned_after_the_search_is_no_part_of_a_grid(name: str) -> None:
    point = {**POINT, "config": CONFIG.but(extra=((name, 2),)).to_json()}
    with refused(f"^the landscape holds points with {name}, ", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": [point]})


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ({"total_memory_bytes": "16GiB"}, "device.total_memory_bytes is '16GiB'"),
        ({"free_memory_bytes": "x"}, "device.free_memory_bytes is 'x'"),
        ({"name": 3}, "device.name is 3"),
        ({"holders": [{"pid": 1, "name": "x", "used_bytes": "1"}]}, "device.holders.used_bytes is '1'"),
    ],
)
def test_a_device_of_wrong_kinds_is_refused_by_the_field(device: dict[str, Any], says: str) -> None:
    with refused(f"device, spec or software is not readable: {says}", kind=FileFormatError):
        Landscape.from_json({**GOOD, "device": {**GOOD["device"], **device}})


def test_what_is_null_of_a_device_is_not_known() -> None:
    found = Landscape.from_json({**GOOD, "device": {"name": None, "total_memory_bytes": None, "context_bytes": None}}).device
    assert (found.name, found.total_memory_bytes, found.context_bytes) == ("unknown", 0, 0)


def test_equal_grids_and_only_those_have_one_digest() -> None:
    other = {**POINT, "micro_step_seconds": [0.5, 0.61]}
    same = Landscape.from_json({**GOOD, "spec": {"model": "m"}})
    assert same.digest() == Landscape.from_json(GOOD).digest() != Landscape.from_json({**GOOD, "points": [other]}).digest()


def test_mixed_effective_batches_are_refused() -> None:
    other = {**POINT, "config": CONFIG.but(gradient_accumulation_steps=4).to_json()}
    with refused(r"^the landscape mixes effective batches: \[8, 16\]$", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": [POINT, other]})


@pytest.mark.parametrize("schema", [None, "autofit/result", "", 3, ["autofit/landscape"]])
def test_another_schema_is_refused(schema: Any) -> None:
    with refused("^not a landscape: schema is ", hint="autofit/landscape", kind=FileFormatError):
        Landscape.from_json({**GOOD, "schema": schema})


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, "1", None, 1.0])
def test_a_version_that_is_not_known_is_refused(version: Any) -> None:
    with refused("^landscape version .* is not readable here$", hint="upgrade autofit", kind=FileFormatError):
        Landscape.from_json({**GOOD, "version": version})


@pytest.mark.parametrize("points", [None, {}, "points", 3])
def test_points_that_are_no_list_are_refused(points: Any) -> None:
    with refused("^the landscape has no list of points$", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": points})


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (None, "NoneType"),
        ([], "list"),
        ({}, "config"),
        ({**POINT, "config": {}}, "a configuration lacks per_device_train_batch_size"),
        ({**POINT, "outcome": "won"}, "unknown outcome 'won'"),
        ({k: v for k, v in POINT.items() if k != "outcome"}, "outcome"),
        ({**POINT, "micro_step_seconds": []}, "at least one micro_step_seconds"),
        ({**POINT, "micro_step_seconds": [-1]}, "finite and not negative"),
        ({**POINT, "micro_step_seconds": "fast"}, "could not convert"),
        ({**POINT, "micro_step_seconds": [10**400]}, "too large"),
        ({**POINT, "micro_step_seconds": [1e308]}, "finite"),
        ({**POINT, "micro_step_seconds": [5e-324]}, "must be positive"),
        (
            {**POINT, "peak_reserved_bytes": "9 GiB"},
            "peak_reserved_bytes must be a number of bytes, got '9 GiB'",
        ),
        ({**POINT, "peak_allocated_bytes": -1}, "peak_allocated_bytes must be a number of bytes, got -1"),
        ({**POINT, "peak_allocated_bytes": True}, "peak_allocated_bytes must be a number of bytes, got True"),
        (
            {**POINT, "peak_allocated_bytes": float("nan")},
            "peak_allocated_bytes must be a number of bytes, got nan",
        ),
    ],
)
def test_a_broken_point_is_refused_by_its_position(broken: Any, why: str) -> None:
    with refused(f"^point 1 of the landscape is not readable: .*{why}", kind=FileFormatError):
        Landscape.from_json({**GOOD, "points": [POINT, broken]})


@pytest.mark.parametrize(
    "part",
    [
        {"device": [1]},
        {"device": {"precisions": ["fp8"]}},
        {"device": {"holders": [{"colour": 1}]}},
        {"spec": "bert"},
        {"spec": [1]},
        {"software": 3},
    ],
)
def test_a_broken_description_is_refused(part: dict[str, Any]) -> None:
    with refused("^the landscape's device, spec or software is not readable: ", kind=FileFormatError):
        Landscape.from_json({**GOOD, **part})


def test_a_file_that_is_no_landscape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text("[]")
    with refused("^landscape file .* holds a list, not an object$", kind=FileFormatError):
        Landscape.load(tmp_path / "grid.json")
