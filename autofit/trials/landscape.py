"""Landscapes: recorded (or modelled) grids of configurations with raw samples, replayable as a device.

File: `{"schema": "autofit/landscape", "version": 1, "spec", "device", "software", "points"}`, each point
`{"config", "outcome": "completed"|"oom", "micro_step_seconds", "fetch_seconds", "update_seconds",
"peak_allocated_bytes", "peak_reserved_bytes", "runs"}`, and `"uneven": true` where batches differed in size: then each micro-step is what an
epoch's mean batch would have taken in it, and means count. Model and device may be unknown here: everything but `points` is optional.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autofit.devices.device import Device
from autofit.errors import FileFormatError, UserError
from autofit.files import read_json_object, write_json
from autofit.kinds import check_kinds, check_numbers
from autofit.problem.config import TrialConfig
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.trial import AFTER_SEARCH
from autofit.trials.uneven import BatchSizes
from autofit.units import MAX_BYTES

SCHEMA, VERSION = "autofit/landscape", 1
ENFORCED = "enforced_limit_bytes"  #: in `Landscape.spec`: what trials could use when no limit was asked for


ADJUSTED = BatchSizes(measured=())  #: of samples that are brought to an epoch's mean batch already: their mean counts


def recorded(measurement: Measurement) -> Measurement:
    """A measurement whose samples mean the same beside those of other runs: uneven batches as an epoch's mean batch would have taken, waits for
    loader workers averaged over their bursts."""
    if not measurement.uneven and not measurement.loader_workers:
        return measurement
    return replace(
        measurement,
        micro_step_seconds=measurement.typical_micro_seconds,
        fetch_seconds=measurement.fetch_blocks,
        sizes=ADJUSTED if measurement.uneven else None,
        facts=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One recorded configuration.

    Attributes:
        config: what was run.
        measurement: samples of all its runs, one list after another; None when it was out of memory.
        runs: how many runs the samples are from.
    """

    config: TrialConfig
    measurement: Measurement | None = None
    runs: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.runs, bool) or not isinstance(self.runs, int) or self.runs < 1:
            raise UserError(f"runs must be a positive whole number, got {self.runs!r}")

    def joined(self, other: Measurement) -> Point:
        """The point with the samples of one more run; each memory counter is the largest of all runs."""
        if self.measurement is None:
            raise ValueError("an out-of-memory point has no samples")
        one, other = recorded(self.measurement), recorded(other)
        measurement = replace(
            one,
            micro_step_seconds=one.micro_step_seconds + other.micro_step_seconds,
            fetch_seconds=one.fetch_seconds + other.fetch_seconds,
            update_seconds=one.update_seconds + other.update_seconds,
            memory=_largest(one.memory, other.memory),
        )
        return replace(self, measurement=measurement, runs=self.runs + 1)

    def to_json(self) -> dict[str, Any]:
        """The point as the file holds it."""
        if self.measurement is None:
            return {"config": self.config.to_json(), "outcome": "oom"}
        m = recorded(self.measurement)
        return {
            **({"uneven": True} if m.uneven else {}),
            "config": self.config.to_json(),
            "outcome": "completed",
            "micro_step_seconds": list(m.micro_step_seconds),
            "fetch_seconds": list(m.fetch_seconds),
            "update_seconds": list(m.update_seconds),
            "peak_allocated_bytes": m.memory.peak_allocated_bytes,
            "peak_reserved_bytes": m.memory.peak_reserved_bytes,
            "runs": self.runs,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """Inverse of `to_json`."""
        config = TrialConfig.from_json(data["config"])
        if data["outcome"] == "oom":
            return cls(config=config)
        if data["outcome"] != "completed":
            raise UserError(f"unknown outcome {data['outcome']!r}")
        return cls(
            config=config,
            runs=data.get("runs", 1),
            measurement=Measurement(
                micro_step_seconds=tuple(data["micro_step_seconds"]),
                fetch_seconds=tuple(data.get("fetch_seconds") or ()),
                update_seconds=tuple(data.get("update_seconds") or ()),
                sizes=ADJUSTED if data.get("uneven") is True else None,
                memory=Memory(
                    peak_allocated_bytes=_counter(data, "peak_allocated_bytes"),
                    peak_reserved_bytes=_counter(data, "peak_reserved_bytes"),
                ),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """A grid: at least one point, no configuration twice, all at one effective batch.

    Attributes:
        points: the grid.
        device: where it was recorded; `total_memory_bytes` 0 when unknown.
        spec: what was asked, as JSON (model, task, seq_len, effective_batch, ...), possibly of a model unknown here.
        software: versions.
        modelled: whether the numbers come from traces and rooflines, not from a device.
    """

    points: tuple[Point, ...]
    device: Device
    spec: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    modelled: bool = False

    def __post_init__(self) -> None:
        if not self.points:
            raise FileFormatError("the landscape has no points")
        batches = {p.config.effective_batch() for p in self.points}
        if len(batches) > 1:
            raise FileFormatError(f"the landscape mixes effective batches: {sorted(batches)}")
        if len({p.config for p in self.points}) != len(self.points):
            raise FileFormatError("the landscape holds a configuration twice")
        after = next((name for p in self.points for name, _ in p.config.extra if name in AFTER_SEARCH), None)
        if after is not None:
            raise FileFormatError(f"the landscape holds points with {after}, which is tuned after the search and is no part of a grid")

    @property
    def effective_batch(self) -> int:
        """Of every point (one device)."""
        return self.points[0].config.effective_batch()

    def digest(self) -> str:
        """A name for the recorded points and their device: equal for equal grids only."""
        text = json.dumps([self.device.to_json(), sorted((p.to_json() for p in self.points), key=str)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The landscape as the file holds it."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "modelled": self.modelled,
            "spec": dict(self.spec),
            "device": self.device.to_json(),
            "software": dict(self.software),
            "points": [p.to_json() for p in self.points],
        }

    def save(self, path: str | Path) -> None:
        """Write the file in one step (a reader never sees half of it)."""
        write_json(path, self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Landscape:
        """Inverse of `to_json`.

        Raises:
            FileFormatError: another schema, a newer version, a point that cannot be read (by position).
        """
        if data.get("schema") != SCHEMA:
            raise FileFormatError(
                f"not a landscape: schema is {data.get('schema')!r}", hint=f"a landscape says {SCHEMA!r}"
            )
        version = data.get("version")
        if not isinstance(version, int) or version > VERSION or version < 1:
            raise FileFormatError(
                f"landscape version {version!r} is not readable here", hint="upgrade autofit"
            )
        try:
            check_numbers({name: value for name, value in data.items() if name != "points"})
        except ValueError as error:
            raise FileFormatError(f"the landscape is not readable: {error}") from None
        raw_points = data.get("points")
        if not isinstance(raw_points, list):
            raise FileFormatError("the landscape has no list of points")
        points = []
        for position, raw in enumerate(raw_points):
            try:
                points.append(Point.from_json(raw))
            except (UserError, KeyError, TypeError, ValueError, OverflowError) as error:
                raise FileFormatError(f"point {position} of the landscape is not readable: {error}") from None
        try:
            found = cls(
                points=tuple(points),
                device=Device.from_json({"total_memory_bytes": 0, **_known(data.get("device") or {})}),
                spec=dict(data.get("spec") or {}),
                software=dict(data.get("software") or {}),
                modelled=bool(data.get("modelled", False)),
            )
            check_kinds(found)
        except (TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(
                f"the landscape's device, spec or software is not readable: {error}"
            ) from None
        return found

    @classmethod
    def load(cls, path: str | Path) -> Landscape:
        """Read a landscape file."""
        return cls.from_json(read_json_object(path, what="landscape"))


def _largest(one: Memory, other: Memory) -> Memory:
    """Counter by counter the larger of two readings; unknown only where both are."""
    most: dict[str, Any] = {}
    for counter in fields(Memory):
        known = [value for value in (getattr(one, counter.name), getattr(other, counter.name)) if value is not None]
        most[counter.name] = max(known, default=None)
    return replace(one, **most)


def _known(device: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a device: null is nothing."""
    return {name: value for name, value in device.items() if value is not None}


def _counter(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_BYTES:
        raise UserError(f"{name} must be a number of bytes, got {value!r}")
    return int(value)
