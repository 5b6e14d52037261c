"""Lengths of rows: the distribution, the longest batch, and an order whose every beginning stands for the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.trials.lengths import Lengths, LengthSummary, spread_order

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=200)


def test_the_summary_of_known_lengths() -> None:
    summary = Lengths.of([5, 1, 3, 9, 2]).summary()
    assert (summary.shortest, summary.median, summary.mean, summary.longest) == (1, 3.0, 4.0, 9)
    assert summary.p95 == pytest.approx(8.2)
    assert summary.longest_rows == (3, 0, 2, 4, 1)
    assert summary.complete
    assert summary.longest_target is None
    assert LengthSummary.from_json(summary.to_json()) == summary


def test_a_part_of_the_rows_is_told_from_all() -> None:
    part = Lengths.of([7, 9], rows=[10, 30], total=50)
    assert not part.complete
    assert part.summary().rows == 50
    assert part.summary().scanned == 2
    assert part.longest_batch(2) == (30, 10)
    assert part.batch_sizes(np.array([[10, 30]])) is None, "other rows are not known"


@given(LENGTHS, st.integers(1, 64))
def test_the_longest_batch_holds_the_longest_rows(lengths: list[int], size: int) -> None:
    batch = Lengths.of(lengths).longest_batch(size)
    assert len(batch) == size
    assert [lengths[i] for i in batch[: len(lengths)]] == sorted(lengths, reverse=True)[:size]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=50), st.integers(2, 9))
def test_no_batch_is_larger_than_the_longest_one(rows: list[tuple[int, int]], size: int) -> None:
    lengths = Lengths.of([a for a, _ in rows], targets=[b for _, b in rows])
    largest = lengths.batch_sizes(np.array([lengths.longest_batch(size)]))
    drawn = np.random.default_rng(0).integers(len(rows), size=(50, size))
    sizes = lengths.batch_sizes(drawn)
    assert largest is not None
    assert sizes is not None
    assert sizes.max() <= largest[0]


def test_inputs_and_targets_are_padded_apart() -> None:
    lengths = Lengths.of([9, 2, 3], targets=[1, 8, 2])
    assert set(lengths.longest_batch(2)) == {0, 1}, "the longest input and the longest target"
    assert lengths.longest_batch(1) == (0,) or lengths.longest_batch(1) == (1,)
    sizes = lengths.batch_sizes(np.array([[0, 1], [2, 2]]))
    assert sizes is not None
    assert list(sizes) == [2 * (9 + 8), 2 * (3 + 2)]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=50), st.integers(1, 4))
def test_the_longest_input_and_the_longest_target_are_in_one_of_the_longest_batches(rows: list[tuple[int, int]], size: int) -> None:
    inputs, targets = [a for a, _ in rows], [b for _, b in rows]
    batches = Lengths.of(inputs, targets=targets).longest_batches(size)
    assert {len(batch) for batch in batches} == {size}
    for longest in (inputs, targets):
        assert max(longest) in {longest[row] for batch in batches for row in batch} or not any(targets)
    assert len(batches) == 1 or size == 1


def test_even_rows_are_even() -> None:
    assert not Lengths.of([4, 4, 4]).uneven
    assert Lengths.of([4, 4, 5]).uneven
    assert Lengths.of([4, 4], targets=[1, 2]).uneven


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=300))
def test_an_order_is_a_permutation(sizes: list[float]) -> None:
    assert sorted(spread_order(sizes).tolist()) == list(range(len(sizes)))


@pytest.mark.parametrize("count", [64, 75, 1000])
@pytest.mark.parametrize("first", [8, 16, 32])
def test_every_even_beginning_stands_for_the_whole(count: int, first: int) -> None:
    ranks = np.random.default_rng(1).permutation(count).astype(float)
    order = spread_order(ranks)
    mean = ranks[order[:first]].mean()
    assert mean == pytest.approx(ranks.mean(), rel=1e-9), "pairs mirror each other"
    assert ranks[order[:first]].std() == pytest.approx(ranks.std(), rel=0.15)


def test_a_heavy_tail_is_met_better_than_by_chance() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(3.2, 1.0, size=600)
    spread = abs(sizes[spread_order(sizes)[:16]].mean() / sizes.mean() - 1)
    chance = np.sqrt(np.mean([(rng.choice(sizes, 16).mean() / sizes.mean() - 1) ** 2 for _ in range(200)]))
    assert spread < chance / 2
