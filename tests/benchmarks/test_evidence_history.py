"""Allocator histories: torch's own format, and the comparison with a trace."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.memory.events import Facts, Kind, Moment, Trace
from autofit.memory.trace_builder import TraceBuilder
from benchmarks.evidence.history import History, compare, from_snapshot, match, real_phases, traced_phases

MIB = 1 << 20
BASE = 0x7F00_0000_0000


def entry(action: str, place: int, size: int, time_us: int) -> dict[str, Any]:
    """One entry of `_snapshot()["device_traces"][0]`, with the fields that the comparison does not read."""
    return {
        "action": action,
        "addr": BASE + place,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": [],
        "pool_id": (0, 0),
    }


STEP_US = 1000


def step(start: int, place: int, batch: int) -> list[dict[str, Any]]:
    """Forward saves one tensor, backward makes a gradient, the update frees it."""
    saved, gradient = place, place + 64 * MIB
    return [
        entry("alloc", saved, batch * MIB, start + 10),
        entry("alloc", gradient, 8 * MIB, start + 110),
        entry("free_requested", saved, batch * MIB, start + 120),
        entry("free_completed", saved, batch * MIB, start + 120),
        entry("free_requested", gradient, 8 * MIB, start + 210),
        entry("free_completed", gradient, 8 * MIB, start + 210),
    ]


def marks(start: int) -> list[tuple[int, str]]:
    return [(start, "forward"), (start + 100, "backward"), (start + 200, "update"), (start + 300, "fetch")]


@pytest.fixture
def real() -> History:
    entries = [
        entry("segment_alloc", 0, 8 * MIB, 1),
        entry("alloc", 0, 8 * MIB, 1),
        entry("segment_alloc", 8 * MIB, 12 * MIB, STEP_US + 5),
        *step(STEP_US, 8 * MIB, 12)[:1],
        entry("segment_alloc", 8 * MIB + 64 * MIB, 8 * MIB, STEP_US + 105),
        *step(STEP_US, 8 * MIB, 12)[1:],
        *step(2 * STEP_US, 8 * MIB, 12),
        {
            "action": "oom",
            "size": 1 << 40,
            "stream": 0,
            "time_us": 3 * STEP_US,
            "device_free": 5,
            "frames": [],
        },
        entry("free_completed", 1 << 40, 512, 3 * STEP_US + 1),
        entry("snapshot", 0, 0, 3 * STEP_US + 2),
    ]
    return from_snapshot(entries, [(0, "model"), (500, "trainer"), *marks(STEP_US), *marks(2 * STEP_US)])


def traced(batch: int = 12) -> Trace:
    builder = TraceBuilder()
    builder.alloc(8 * MIB, "parameter", Kind.WEIGHTS)
    for number in range(2):
        builder.mark(Moment.INPUT, step=number)
        builder.mark(Moment.FORWARD, step=number)
        saved = builder.alloc(batch * MIB, "aten.relu.default")
        builder.mark(Moment.BACKWARD, step=number)
        gradient = builder.alloc(8 * MIB, "aten.mm.default", Kind.GRADIENTS)
        builder.free(saved)
        builder.mark(Moment.UPDATE, step=number)
        builder.free(gradient)
    return builder.build(Facts(batch=batch))


def test_births_deaths_and_segments_are_read_from_torchs_format(real: History) -> None:
    assert real.sizes == (8 * MIB, 12 * MIB, 8 * MIB, 12 * MIB, 8 * MIB)
    assert real.events == (0, 1, 2, ~1, ~2, 3, 4, ~3, ~4)
    assert real.segments == ((1 - 1, 8 * MIB), (1, 12 * MIB), (2, 8 * MIB))
    assert (real.unmatched, real.out_of_memory) == (1, 1)


def test_a_history_survives_its_file(real: History) -> None:
    assert History.from_json(real.to_json()) == real


def test_phases_of_both_sides_have_the_same_names(real: History) -> None:
    assert traced_phases(traced()) == {
        ("forward", 0): [1],
        ("backward", 0): [2],
        ("update", 0): [],
        ("forward", 1): [3],
        ("backward", 1): [4],
        ("update", 1): [],
    }
    assert real_phases(real) == traced_phases(traced())


def test_a_trace_that_is_right_matches_in_births_lifetimes_and_peaks(real: History) -> None:
    found = compare(real, traced())
    assert found["births"] == {"ours": 4, "real": 4, "matched": 4}
    assert found["same_lifetimes"] == 4
    assert found["largest_gap_bytes"] == 0
    assert found["peak_allocated_bytes"] == {"ours": 28 * MIB, "real": 28 * MIB}
    assert found["peak_reserved_bytes"]["real"] == 28 * MIB
    assert found["allocator"]["real_reserved_bytes"] == 28 * MIB
    assert not found["only_ours"]
    assert not found["only_real"]


def test_a_wrong_size_is_named_on_both_sides(real: History) -> None:
    found = compare(real, traced(batch=13))
    assert found["births"]["matched"] == 2
    assert found["only_ours"] == [{"where": "forward: aten.relu.default", "bytes": 13 * MIB, "times": 2}]
    assert found["only_real"] == [{"where": "forward", "bytes": 12 * MIB, "times": 2}]


def test_without_times_nothing_is_matched_and_nothing_breaks(real: History) -> None:
    blind = from_snapshot([{k: v for k, v in entry("alloc", 0, 512, 0).items() if k != "time_us"}], marks(0))
    found = compare(blind, traced())
    assert blind.marks == ()
    assert found["births"]["matched"] == 0
    assert found["peak_allocated_bytes"]["real"] == 512


def test_equal_elements_are_matched_around_what_only_one_side_has() -> None:
    assert match([1, 2, 3, 4], [1, 9, 2, 4]) == [(0, 0), (1, 2), (3, 3)]
    assert match([], [1]) == []
