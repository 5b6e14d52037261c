import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import FileFormatError
from autofit.memory.events import Facts, Kind, Mark, Moment, Trace
from autofit.memory.trace_builder import TraceBuilder
from tests.memory.traces import births, programs, trace_of, training_loop


def test_a_trace_survives_json() -> None:
    trace = training_loop(2)
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


@given(events=programs(), data=st.data())
def test_any_trace_survives_json(events: list[int], data: st.DataObject) -> None:
    n = births(events)
    trace = trace_of(events, data.draw(st.lists(st.integers(0, 1 << 40), min_size=n, max_size=n)))
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_the_builder_numbers_allocations_in_order_and_shares_names() -> None:
    builder = TraceBuilder()
    assert [builder.alloc(1, "a"), builder.alloc(2, "b"), builder.alloc(3, "a")] == [0, 1, 2]
    builder.free(1)
    trace = builder.build(Facts(batch=1))
    assert trace.events == (0, 1, 2, ~1)
    assert trace.names == ("a", "b")
    assert [trace.operator(k) for k in range(3)] == ["a", "b", "a"]


def test_a_kind_can_be_named_after_the_birth() -> None:
    builder = TraceBuilder()
    gradient = builder.alloc(4, "aten.mm.default")
    builder.classify(gradient, Kind.GRADIENTS)
    assert builder.build(Facts(batch=1)).kinds == (Kind.GRADIENTS,)


def test_an_event_belongs_to_the_last_mark_before_it() -> None:
    builder = TraceBuilder()
    builder.alloc(1, "parameter", Kind.WEIGHTS)
    builder.mark(Moment.FORWARD, step=0, micro_step=1)
    builder.alloc(1, "x")
    builder.mark(Moment.BACKWARD, step=0, micro_step=1)
    trace = builder.build(Facts(batch=1))
    assert trace.mark_at(0).moment == Moment.MODEL
    assert trace.mark_at(1) == Mark(index=1, moment=Moment.FORWARD, step=0, micro_step=1)
    assert trace.mark_at(2).moment == Moment.BACKWARD


def test_only_the_work_after_forgetting_is_kept() -> None:
    assert [op.operator for op in training_loop(2).ops] == [
        "aten.mm.default",
        "aten.t.default",
        "aten.mm.default",
        "aten._fused_adamw_.default",
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((0, ~0, ~0), "dies before its birth or twice"),
        ((~0, 0), "dies before its birth or twice"),
        ((1, 0), "out of order"),
        ((), "1 allocations are described but 0 are born"),
    ],
)
def test_contradictory_columns_are_refused(events: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace(
            events=events,
            sizes=(1,) * max(1, len(set(events) & {0, 1})),
            operators=(0,) * max(1, len(set(events) & {0, 1})),
            kinds=(Kind.OTHER,) * max(1, len(set(events) & {0, 1})),
            names=("x",),
            marks=(),
            facts=Facts(batch=1),
        )


@pytest.mark.parametrize("change", [{"version": 99}, {"sizes": [1]}, {"kinds": None}, {"facts": {"x": 1}}])
def test_a_document_that_is_no_trace_is_refused(change: dict[str, object]) -> None:
    data = {**training_loop(2).to_json(), **change}
    with pytest.raises(FileFormatError):
        Trace.from_json(data)


def test_the_pure_half_imports_neither_torch_nor_transformers() -> None:
    modules = ("allocator", "anatomy", "cache", "envelope", "events", "formula", "law", "replay", "roofline")
    code = "import sys\n" + "".join(f"import autofit.memory.{name}\n" for name in modules)
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
