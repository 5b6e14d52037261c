"""Traces for the tests: random programs of births and deaths, and a small training loop written by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from autofit.memory.events import Facts, Kind, Moment, Trace
from autofit.memory.trace_builder import TraceBuilder

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(4097, MIB),
    st.integers(MIB + 1, 10 * MIB),
    st.integers(10 * MIB + 1, 64 * MIB),
)


@st.composite
def programs(draw: st.DrawFn, *, max_size: int = 60) -> list[int]:
    """A list of events: `k` births allocation `k`, `~k` lets it die; some stay alive."""
    events: list[int] = []
    alive: list[int] = []
    born = 0
    for choice in draw(st.lists(st.integers(0, 5), min_size=1, max_size=max_size)):
        if alive and choice >= 3:
            events.append(~alive.pop(choice * 7 % len(alive)))
        else:
            events.append(born)
            alive.append(born)
            born += 1
    return events


def births(events: list[int]) -> int:
    return sum(event >= 0 for event in events)


def trace_of(events: list[int], sizes: list[int], *, batch: int = 2, seq_len: int | None = 128) -> Trace:
    builder = TraceBuilder()
    for event in events:
        if event >= 0:
            builder.alloc(sizes[event], f"op{event % 3}")
        else:
            builder.free(~event)
    return builder.build(Facts(batch=batch, seq_len=seq_len))


def training_loop(batch: int, *, deaths_reversed: bool = False) -> Trace:
    """Two steps of a model of 8 MiB with Adam: one saved activation of `batch` MiB, two scratch tensors."""
    builder = TraceBuilder()
    weights = builder.alloc(8 * MIB, "parameter", Kind.WEIGHTS)
    for step in range(2):
        builder.mark(Moment.FORWARD, step=step)
        builder.forget_ops()
        scratch = [builder.alloc(2 * batch * MIB, "aten.mm.default") for _ in range(2)]
        builder.op("aten.mm.default", dtype="fp32", flops=10**9 * batch, nbytes=8 * MIB + batch * MIB)
        saved = builder.alloc(batch * MIB, "aten.relu.default")
        for tensor in reversed(scratch) if deaths_reversed else scratch:
            builder.free(tensor)
        builder.mark(Moment.BACKWARD, step=step)
        gradient = builder.alloc(8 * MIB, "aten.mm.default", Kind.GRADIENTS)
        builder.op("aten.t.default", dtype="fp32", flops=0, nbytes=0, kernels=0)
        builder.op("aten.mm.default", dtype="fp32", flops=2 * 10**9 * batch, nbytes=8 * MIB)
        builder.free(saved)
        builder.mark(Moment.UPDATE, step=step)
        if step == 0:
            builder.alloc(16 * MIB, "aten.zeros_like.default", Kind.OPTIMIZER_STATE)
        builder.op("aten._fused_adamw_.default", dtype="fp32", flops=0, nbytes=40 * MIB, kernels=2)
        builder.mark(Moment.ZERO, step=step)
        builder.free(gradient)
    assert weights == 0
    return builder.build(Facts(batch=batch, seq_len=128, n_params=2 * MIB, sdpa={"flash": 2}))
