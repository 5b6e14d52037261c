import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.memory.anatomy import dissect, saved_activations
from autofit.memory.events import Facts, Kind, Moment
from autofit.memory.replay import replay
from autofit.memory.trace_builder import TraceBuilder
from tests.memory.traces import MIB, SIZES, births, programs, trace_of, training_loop


def test_the_peak_of_a_small_batch_is_in_backward() -> None:
    anatomy = dissect(training_loop(1), context_bytes=300 * MIB)
    assert anatomy.kinds == {
        Kind.WEIGHTS: 8 * MIB,
        Kind.GRADIENTS: 8 * MIB,
        Kind.OPTIMIZER_STATE: 16 * MIB,
        Kind.SAVED_ACTIVATIONS: MIB,
    }
    assert (anatomy.moment, anatomy.step, anatomy.operator) == (Moment.BACKWARD, 1, "aten.mm.default")
    assert anatomy.operator_bytes == 8 * MIB


def test_the_peak_of_a_large_batch_is_in_forward() -> None:
    anatomy = dissect(training_loop(32))
    assert anatomy.kinds == {
        Kind.WEIGHTS: 8 * MIB,
        Kind.OPTIMIZER_STATE: 16 * MIB,
        Kind.SAVED_ACTIVATIONS: 32 * MIB,
        Kind.TEMPORARIES: 128 * MIB,
    }
    assert (anatomy.moment, anatomy.step, anatomy.operator) == (Moment.FORWARD, 1, "aten.relu.default")


def test_the_parts_add_up_to_what_the_device_sees() -> None:
    trace = training_loop(3)
    anatomy = dissect(trace, context_bytes=450 * MIB)
    reserved = replay(trace.events, trace.sizes).peak_reserved_bytes
    assert anatomy.total_bytes == reserved + 450 * MIB
    assert sum(size for _, size, _ in anatomy.parts()) == anatomy.total_bytes
    assert sum(share for _, _, share in anatomy.parts()) == pytest.approx(1)
    assert [name for name, _, _ in anatomy.parts()][-1] == "context"


def test_more_reserved_than_the_replay_saw_is_slack() -> None:
    trace = training_loop(3)
    assert dissect(trace, reserved_bytes=900 * MIB).total_bytes == 900 * MIB


def test_only_what_backward_finds_alive_is_saved() -> None:
    builder = TraceBuilder()
    builder.alloc(1, "before")
    builder.mark(Moment.INPUT)
    builder.alloc(1, "ids", Kind.INPUTS)
    builder.mark(Moment.FORWARD)
    kept, dropped = builder.alloc(1, "kept"), builder.alloc(1, "dropped")
    builder.alloc(1, "copy", Kind.AUTOCAST_COPIES)
    builder.free(dropped)
    builder.mark(Moment.BACKWARD)
    builder.alloc(1, "recomputed")
    builder.free(kept)
    builder.mark(Moment.FORWARD, micro_step=1)
    builder.alloc(1, "never used in a backward")
    assert saved_activations(builder.build(Facts(batch=1))) == {kept}


def test_it_is_json() -> None:
    data = json.loads(json.dumps(dissect(training_loop(1), context_bytes=MIB).to_json()))
    assert data["parts"]["weights"]["bytes"] == 8 * MIB
    assert data["peak"]["moment"] == "backward"
    assert sum(part["share"] for part in data["parts"].values()) == pytest.approx(1, abs=1e-4)


def test_an_empty_trace_has_no_anatomy() -> None:
    with pytest.raises(ValueError, match="no allocation"):
        dissect(trace_of([], []))


@given(events=programs(), data=st.data())
def test_any_trace_is_taken_apart_without_rest(events: list[int], data: st.DataObject) -> None:
    n = births(events)
    trace = trace_of(events, data.draw(st.lists(SIZES, min_size=n, max_size=n)))
    anatomy = dissect(trace)
    assert anatomy.slack_bytes >= 0
    assert anatomy.total_bytes == replay(trace.events, trace.sizes).peak_reserved_bytes
