import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.errors import FileFormatError
from autofit.memory.events import Facts, Stairs, Trace
from autofit.memory.law import MemoryLaw, NotAffine, SequenceLaw, compare_structure
from autofit.memory.replay import replay
from autofit.memory.trace_builder import TraceBuilder
from tests.memory.traces import MIB, births, programs, trace_of, training_loop


def law_of_loop(**more: Any) -> MemoryLaw:
    return MemoryLaw.fit(training_loop(2), training_loop(4), **more)


@st.composite
def laws(draw: st.DrawFn) -> MemoryLaw:
    """A random program whose sizes are a + b x batch."""
    events = draw(programs(max_size=40))
    n = births(events)
    fixed = draw(st.lists(st.integers(1, 24 * MIB), min_size=n, max_size=n))
    rises = draw(st.lists(st.sampled_from([0, 0, 512, 300_000, MIB, 3 * MIB]), min_size=n, max_size=n))

    def trace(batch: int) -> Trace:
        return trace_of(events, [a + b * batch for a, b in zip(fixed, rises)], batch=batch)

    return MemoryLaw.fit(trace(2), trace(4), checks=[trace(3), trace(7), trace(64)])


def test_two_traces_give_every_batch() -> None:
    law = law_of_loop(checks=[training_loop(b) for b in (3, 7, 16, 64)])
    for batch in (2, 3, 5, 16, 37):
        assert law.trace(batch).sizes == training_loop(batch).sizes
        seen = replay(training_loop(batch).events, training_loop(batch).sizes)
        assert law.replay(batch) == seen


def test_the_prediction_follows_a_peak_that_moves() -> None:
    law = law_of_loop()
    # In backward: weights, state, gradient and the activation, 8 + 16 + 8 + b. In forward: 8 + 16 + 5 b.
    assert law.predict(1).peak_allocated_bytes == (32 + 1) * MIB
    assert law.predict(32).peak_allocated_bytes == (24 + 5 * 32) * MIB


def test_the_order_of_deaths_between_births_does_not_matter() -> None:
    forward, backward = training_loop(2), training_loop(4, deaths_reversed=True)
    assert forward.events != backward.events
    assert MemoryLaw.fit(forward, backward).trace(4).sizes == backward.sizes


def test_a_batch_of_one_comes_from_its_own_trace() -> None:
    single = trace_of([0, ~0], [64 * MIB], batch=1)
    law = law_of_loop(single=single)
    assert law.trace(1) == single
    assert law.exact(1)
    assert not law_of_loop().exact(1)
    assert law.predict(1).peak_allocated_bytes == 64 * MIB
    assert law.predict(2).peak_allocated_bytes == 64 * MIB  # never less than for a smaller batch


def test_traces_of_other_structure_make_no_law() -> None:
    with pytest.raises(NotAffine, match="allocations against"):
        MemoryLaw.fit(training_loop(2), trace_of([0], [1], batch=4))
    with pytest.raises(NotAffine, match="die at other times"):
        MemoryLaw.fit(trace_of([0, 1, ~0], [1, 1]), trace_of([0, ~0, 1], [1, 1], batch=4))
    with pytest.raises(NotAffine, match="allocation 0 is"):
        compare_structure(training_loop(2), replace(training_loop(2), names=training_loop(2).names[::-1]))


def test_batches_in_the_wrong_order_make_no_law() -> None:
    with pytest.raises(NotAffine, match="rising order"):
        MemoryLaw.fit(training_loop(4), training_loop(2))


def test_a_size_that_falls_makes_no_law() -> None:
    with pytest.raises(NotAffine, match="asks for 10 bytes at batch 2 and 5 at 4"):
        MemoryLaw.fit(trace_of([0], [10]), trace_of([0], [5], batch=4))


def test_a_size_off_the_line_fails_its_check() -> None:
    with pytest.raises(NotAffine, match="asks for 90 bytes at batch 3, not 30"):
        MemoryLaw.fit(
            trace_of([0], [20]), trace_of([0], [40], batch=4), checks=[trace_of([0], [90], batch=3)]
        )


@settings(max_examples=60, deadline=None)
@given(law=laws(), expandable=st.booleans())
def test_predicted_bytes_never_fall_as_the_batch_grows(law: MemoryLaw, expandable: bool) -> None:
    told = [law.predict(batch, expandable=expandable) for batch in (*range(1, 40), 64, 65, 128)]
    for counter in ("peak_allocated_bytes", "peak_reserved_bytes", "min_capacity_bytes"):
        values = [getattr(peaks, counter) for peaks in told]
        assert values == sorted(values)


@settings(deadline=None)
@given(law=laws(), batch=st.integers(1, 200), expandable=st.booleans())
def test_the_three_peaks_keep_their_order(law: MemoryLaw, batch: int, expandable: bool) -> None:
    told = law.predict(batch, expandable=expandable)
    assert told.peak_allocated_bytes <= told.min_capacity_bytes <= told.peak_reserved_bytes


@settings(deadline=None)
@given(law=laws(), gib=st.floats(0.01, 8))
def test_the_largest_batch_fits_and_the_next_does_not(law: MemoryLaw, gib: float) -> None:
    capacity, limit = int(gib * 1024) * MIB, 300
    best = law.max_batch(capacity, limit=limit)
    assert best == 0 or law.predict(best).min_capacity_bytes <= capacity
    assert best == limit or law.predict(best + 1).min_capacity_bytes > capacity
    assert law.fits(best + 1, capacity) == (law.predict(best + 1).min_capacity_bytes <= capacity)


@settings(deadline=None)
@given(law=laws())
def test_a_law_survives_json_and_remembers_its_answers(law: MemoryLaw) -> None:
    told = law.predict(12)
    again = MemoryLaw.from_json(json.loads(json.dumps(law.to_json())))
    assert again == law
    assert again.predict(12) == told
    assert not again._replays  # answered from what it remembers


def test_a_law_with_a_single_trace_survives_json() -> None:
    law = law_of_loop(single=training_loop(1))
    assert MemoryLaw.from_json(json.loads(json.dumps(law.to_json()))) == law


@pytest.mark.parametrize("change", [{"version": 0}, {"rises": [1]}, {"span": 0}, {"base": {}}, {"known": 3}])
def test_a_document_that_is_no_law_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FileFormatError):
        MemoryLaw.from_json({**law_of_loop().to_json(), **change})


def at_length(length: int, batch: int, wobble: int = 0) -> Trace:
    sizes = [7 * MIB, 12 * batch * length, 2 * batch * length * length + wobble]
    trace = trace_of([0, 1, 2, ~1], sizes, batch=batch)
    return replace(trace, facts=Facts(batch=batch, seq_len=length))


def length_laws(lengths: tuple[int, ...], wobble_at: int = 0) -> dict[int, MemoryLaw]:
    return {
        n: MemoryLaw.fit(*(at_length(n, b, 77 * (n == wobble_at)) for b in (2, 4)), single=at_length(n, 1))
        for n in lengths
    }


def test_three_lengths_give_every_length() -> None:
    law = SequenceLaw.fit(length_laws((128, 256, 512)))
    for length in (128, 384, 1024, 4096):
        for batch in (1, 2, 9):
            assert law.at(length).sizes(batch) == at_length(length, batch).sizes
    assert law.at(1024).base.facts.seq_len == 1024


def test_a_fourth_length_off_the_parabola_is_noticed() -> None:
    assert SequenceLaw.fit(length_laws((128, 256, 384, 512)))
    with pytest.raises(NotAffine, match="not quadratic"):
        SequenceLaw.fit(length_laws((128, 256, 384, 512), wobble_at=256))


def test_two_lengths_are_not_enough() -> None:
    with pytest.raises(NotAffine, match="three lengths"):
        SequenceLaw.fit(length_laws((128, 256)))


def test_what_rises_in_steps_is_told_between_and_beyond_the_traces() -> None:
    stairs = Stairs(grain=10, most=50, later=160, least=20)

    def traced(batch: int, found: Stairs) -> Trace:
        builder = TraceBuilder()
        builder.alloc(MIB * batch, "aten.mm.default")
        builder.free(builder.alloc(7 * batch, "aten.sum.dim_IntList workspace", stairs=found))
        return builder.build(Facts(batch=batch))

    law = MemoryLaw.fit(traced(2, stairs), traced(4, stairs), single=traced(1, stairs), checks=[traced(5, stairs)])
    told = {batch: law.sizes(batch)[1] for batch in (1, 2, 3, 5, 7, 100, 200)}
    assert told == {1: 0, 2: 0, 3: 30, 5: 40, 7: 50, 100: 50, 200: 90}
    assert law.trace(100).sizes == law.sizes(100) == law.trace(100).taken(law.trace(100).sizes)
    assert MemoryLaw.from_json(json.loads(json.dumps(law.to_json()))) == law
    with pytest.raises(NotAffine, match="share memory"):
        compare_structure(traced(2, stairs), traced(4, replace(stairs, most=60)))


def test_a_sum_whose_width_is_the_batch_does_not_cost_the_law() -> None:
    common = Stairs(grain=10, most=50, later=160, least=20)

    def traced(batch: int) -> Trace:
        builder = TraceBuilder()
        builder.alloc(MIB * batch, "aten.mm.default")
        builder.free(builder.alloc(7 * batch, "aten.sum.dim_IntList workspace", stairs=common))
        own = Stairs(grain=4 * batch, most=4000 * batch, later=64 * batch, least=63 * batch)
        builder.free(builder.alloc(batch, "aten.sum.dim_IntList workspace", stairs=own))
        return builder.build(Facts(batch=batch))

    law = MemoryLaw.fit(traced(2), traced(4), checks=[traced(3), traced(6)])
    assert law.sizes(7) == (7 * MIB, 50, 0)
