from hypothesis import given
from hypothesis import strategies as st

from autofit.memory.envelope import Envelope


@given(noise=st.lists(st.integers(0, 5000), min_size=300, max_size=300), slope=st.integers(0, 300))
def test_what_is_told_never_falls(noise: list[int], slope: int) -> None:
    def raw(batch: int) -> int:
        return slope * batch + noise[batch % 300]

    envelope = Envelope(raw=raw)
    told = [envelope.at(batch) for batch in range(1, 140)]
    assert told == sorted(told)


@given(noise=st.lists(st.integers(0, 900), min_size=300, max_size=300))
def test_bounds_save_calls_and_change_nothing(noise: list[int]) -> None:
    def raw(batch: int) -> int:
        return 100 * batch + noise[batch % 300]

    plain = Envelope(raw=raw)
    bounded = Envelope(raw=raw, floor=lambda b: 100 * b, ceiling=lambda b: 100 * b + 900)
    batches = [1, 2, 3, 7, 8, 24, 33, 64, 100]
    assert [bounded.at(b) for b in batches] == [plain.at(b) for b in batches]
    assert len(bounded.known) <= len(plain.known)


def test_a_smooth_law_is_told_as_it_is() -> None:
    envelope = Envelope(raw=lambda batch: 1000 + 64 * batch)
    assert [envelope.at(b) for b in range(1, 200)] == [1000 + 64 * b for b in range(1, 200)]


def test_few_batches_are_asked_for() -> None:
    asked: list[int] = []

    def raw(batch: int) -> int:
        asked.append(batch)
        return 10 * batch

    Envelope(raw=raw).at(1024)
    assert asked == [1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1]


def test_a_smaller_batch_that_needs_more_lifts_the_larger_one() -> None:
    envelope = Envelope(raw=lambda batch: 500 if batch == 4 else 100 + batch)
    assert envelope.at(3) == 103
    assert [envelope.at(b) for b in (4, 5, 8, 16)] == [500, 500, 500, 500]


def test_between_the_eighths_a_batch_is_told_as_it_is_where_its_neighbours_allow() -> None:
    odd = Envelope(raw=lambda batch: 100 * batch + 60 * (batch % 2))
    assert [odd.at(b) for b in (40, 41, 42, 43, 44)] == [4000, 4160, 4200, 4360, 4400]
    jump = Envelope(raw=lambda batch: 100 * batch + 900 * (batch % 2))
    assert [jump.at(b) for b in (40, 41, 42, 43, 44)] == [4000, 4400, 4400, 4400, 4400]
    small = Envelope(raw=lambda batch: 100 * batch + 150 * (batch % 2))
    assert [small.at(b) for b in (40, 41, 42, 43, 44)] == [4000, 4250, 4250, 4400, 4400]


def test_between_the_eighths_few_more_are_asked_for() -> None:
    asked: list[int] = []

    def raw(batch: int) -> int:
        asked.append(batch)
        return 10 * batch

    envelope = Envelope(raw=raw)
    envelope.at(576)
    envelope.at(640)
    asked.clear()
    assert envelope.at(621) == 6210
    assert len(asked) == 5  # four halves of the 64 between the eighths, and one of four neighbours
