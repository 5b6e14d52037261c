"""Numbers, names and tables as a person reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.problem.config import Precision
from autofit.results.wording import (
    NARROWEST,
    REASON_NAMES,
    ROLE_NAMES,
    Column,
    describe,
    format_factor,
    format_interval,
    format_percent,
    format_speed,
    knob_value,
    printable,
    says,
    standing,
    text_table,
    wrapped,
)
from autofit.trials.measurement import Interval
from autofit.trials.trial import Failure, Outcome, Reason, Role
from tests.builders import make_config, make_record


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (12345.6, "12,346"),
        (999.96, "1000.0"),
        (412.34, "412.3"),
        (41.234, "41.23"),
        (4.1234, "4.123"),
        (0.41234, "0.4123"),
    ],
)
def test_a_speed_has_four_digits(speed: float, text: str) -> None:
    assert format_speed(speed) == text


def test_ratios_and_differences_are_short() -> None:
    assert [format_factor(f) for f in (0.981, 3.429, 12.36, 123.4)] == ["0.98x", "3.43x", "12.4x", "123x"]
    assert [format_percent(p) for p in (0.0213, -0.134, 0.0)] == ["+2.1 %", "-13 %", "+0.0 %"]
    assert format_interval(Interval(low=1.5, high=20.25)) == "1.500 to 20.25"
    assert format_interval(Interval(low=3.0, high=3.0)) == "no spread seen"


def test_every_reason_and_role_has_a_name() -> None:
    assert set(REASON_NAMES) == set(Reason)
    assert set(ROLE_NAMES) == set(Role)


def test_a_configuration_is_described_in_words_with_its_extras() -> None:
    config = make_config(
        64, precision=Precision.BF16, gradient_checkpointing=True, extra=(("torch_compile", True),)
    )
    assert (
        describe(config)
        == "batch 64 x 1 accumulation step, bf16, checkpointing on, adamw_torch_fused, torch_compile=True"
    )
    assert [knob_value("x", v) for v in (True, False, None, 8)] == ["on", "off", "unset", "8"]


def test_a_failure_says_what_why_and_where_on_one_line() -> None:
    failure = Failure(
        reason=Reason.OUT_OF_MEMORY, message="CUDA out of memory.\n  Tried 2 GiB", phase="backward"
    )
    assert says(failure) == "did not fit: CUDA out of memory. Tried 2 GiB (in backward)"
    assert (
        says(failure, "predicted 1 GiB", "")
        == "did not fit: CUDA out of memory. Tried 2 GiB (in backward; predicted 1 GiB)"
    )
    assert says(Failure(reason=Reason.TIMEOUT, message="")) == "timed out"


def test_completed_stands_before_infeasible_before_failed_before_skipped() -> None:
    config = make_config(8)
    records = [
        make_record(0, config, 1.0),
        make_record(1, config, reason=Reason.OUT_OF_MEMORY),
        make_record(2, config, reason=Reason.ERROR),
        make_record(3, config, reason=Reason.DOMINATED),
    ]
    assert [standing(r) for r in records] == [0, 1, 2, 3]
    assert [r.outcome for r in records] == [*list(Outcome)[:2], Outcome.FAILED, Outcome.SKIPPED]


@given(text=st.text(), ascii_only=st.booleans())
def test_what_is_printed_can_be_encoded_and_controls_no_terminal(text: str, ascii_only: bool) -> None:
    shown = printable(text, ascii_only=ascii_only)
    shown.encode("ascii" if ascii_only else "utf-8")
    assert "\x1b" not in shown
    assert "\r" not in shown


CELLS = st.text(alphabet="abc -_=", max_size=60).map(lambda s: " ".join(s.split()))


@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), width=st.integers(20, 200))
def test_a_table_loses_no_word_and_keeps_to_its_width(rows: list[tuple[str, str, str]], width: int) -> None:
    columns = [
        Column(title="one", folds=True),
        Column(title="two", folds=True),
        Column(title="three", folds=True, right=True),
    ]
    lines = text_table(columns, rows, width)
    assert sorted("".join(lines[1:]).replace(" ", "")) == sorted("".join(map("".join, rows)).replace(" ", ""))
    assert all(len(line) <= max(NARROWEST, width) for line in lines)


def test_words_break_only_where_no_other_cell_can_fold() -> None:
    columns = [Column(title="a", folds=True), Column(title="b", folds=True)]
    words = ["attn_implementation=flash_attention_2", "slower than the winner by three percent"]
    lines = text_table(columns, [words], 60)
    assert lines[1].split()[0] == words[0]
    assert all(len(line) <= 60 for line in lines)
    broken = text_table(columns, [["-" * 50, "=" * 50]], 60)
    assert "".join(broken[1:]).count("-") == 50
    assert all(len(line) <= 60 for line in broken)


def test_numbers_are_aligned_right_and_empty_columns_left_out() -> None:
    columns = [Column(title="name"), Column(title="n", right=True), Column(title="nothing")]
    assert text_table(columns, [["a", "1", ""], ["bb", "100", ""]], 80) == [
        "  name    n",
        "  a       1",
        "  bb    100",
    ]


def test_no_line_ends_between_a_number_and_its_unit() -> None:
    text = "It is off by 6.25 % with 18.5 GiB to spare, at 221.9 samples/s, 7,099 tokens/s, in 1.2 s or 3 steps of it."
    for width in range(60, 100):
        lines = wrapped(text, width)
        assert " ".join(lines) == text
        assert not any(line.split()[0] in {"%", "GiB", "samples/s,", "tokens/s,", "s"} for line in lines)


def test_long_text_is_wrapped_with_a_hanging_indent() -> None:
    lines = wrapped("word " * 30, 70, indent="  ", hanging="    ")
    assert len(lines) == 3
    assert lines[0].startswith("  word")
    assert lines[1].startswith("    word")
