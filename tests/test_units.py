"""Sizes and durations are understood as people write them, refused with a hint, and shown so that they can be read back."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autofit.units import (
    GIB,
    KIB,
    MAX_BYTES,
    MAX_SECONDS,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    parse_duration,
    parse_size,
)
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * GIB),
        ("16 gib", 16 * GIB),
        ("16GB", 16 * 10**9),
        ("16g", 16 * 10**9),
        (" 1.5GiB ", GIB + 512 * MIB),
        (".5MiB", 512 * KIB),
        ("2.KiB", 2 * KIB),
        ("1TiB", TIB),
        ("3tb", 3 * 10**12),
        ("512m", 512 * 10**6),
        ("4k", 4000),
        ("17179869184", 16 * GIB),
        ("100B", 100),
        (MIB, MIB),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_a_size_is_read_in_every_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "  ", "GiB", "16XB", "16 GiB free", "-16GiB", "1e9", "1,5GiB", "0x10", "inf", "nan", "١٦"]
)
def test_what_is_not_a_size_is_refused_by_name(text: str) -> None:
    with refused(
        f"^--memory is not a size: {re.escape(repr(text))}$", hint="16GiB, 16GB or a number of bytes"
    ):
        parse_size(text, what="--memory")


@pytest.mark.parametrize("size", ["0", "0GiB", "0.5", 0, -1 + 1, 2 * MAX_BYTES, "9" * 400, "2000000TiB"])
def test_a_size_out_of_range_is_refused(size: str | int) -> None:
    with refused("^size is out of range", hint="16GiB"):
        parse_size(size)


@pytest.mark.parametrize("size", ["16", 16, "1048575"])
def test_a_number_that_no_memory_has_lacks_its_unit(size: str | int) -> None:
    with refused(f"^--memory lacks a unit: '{size}'$", hint="16GiB"):
        parse_size(size, what="--memory")


@pytest.mark.parametrize("thing", [True, None, 1.5, [16], b"16GiB"])
def test_a_size_of_another_kind_is_refused(thing: Any) -> None:
    with refused("^memory must be a size, got", hint="16GiB"):
        parse_size(thing, what="memory")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("90", 90.0),
        ("10m", 600.0),
        ("10min", 600.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("1H 30M 5S", 5405.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("250ms", 0.25),
        (45, 45.0),
        (0.00001, 0.00001),
        (MAX_SECONDS, MAX_SECONDS),
    ],
)
def test_a_duration_is_read_in_every_unit(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["ten minutes", "10x", "-5s", "1h30", "1h 30", "5s5", "1e3", "nan", "m", "10m!"]
)
def test_what_is_not_a_duration_is_refused_by_name(text: str) -> None:
    with refused(f"^--timeout is not a duration: {re.escape(repr(text))}$", hint="90s, 10m, 1h or 1h30m"):
        parse_duration(text, what="--timeout")


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_duration_is_refused(text: str) -> None:
    with refused("^--timeout is empty$", hint="90s"):
        parse_duration(text, what="--timeout")


@pytest.mark.parametrize("value", ["0", "0s", 0, 0.0, -3, math.nan, math.inf, -math.inf, "400d", "9" * 400])
def test_a_duration_out_of_range_is_refused(value: str | float) -> None:
    with refused("^duration is out of range", hint="90s"):
        parse_duration(value)


@pytest.mark.parametrize("thing", [False, None, ["10m"], b"10m"])
def test_a_duration_of_another_kind_is_refused(thing: Any) -> None:
    with refused("^duration must be a duration, got", hint="90s"):
        parse_duration(thing)


@given(st.text(max_size=12))
def test_any_text_is_a_size_and_a_duration_or_refused_in_one_line(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            value = parse(text)
        except Exception as error:
            with refused("^(size|duration) "):
                raise error
        else:
            assert value > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (512 * MIB, "512.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (int(11.3 * GIB), "11.3 GiB"),
        (-2 * GIB, "-2.0 GiB"),
        (3 * TIB, "3.0 TiB"),
        (5000 * TIB, "5000.0 TiB"),
    ],
)
def test_a_size_is_shown_with_one_digit(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.00082, "820 us"),
        (0.0009996, "1.0 ms"),
        (0.0314, "31.4 ms"),
        (0.99999, "1.00 s"),
        (2.1, "2.10 s"),
        (59.999, "1m 00s"),
        (60.0, "1m 00s"),
        (200.0, "3m 20s"),
        (3599.7, "1h 00m"),
        (3900.0, "1h 05m"),
        (90000.0, "25h 00m"),
    ],
)
def test_a_duration_is_shown_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(1, 1 << 49))
@example(GIB - 1)
def test_a_size_as_shown_reads_back_to_within_its_rounding(size: int) -> None:
    text = format_bytes(size)
    assert not text.startswith("1024")
    assert parse_size(text) == pytest.approx(size, rel=0.051)


@given(st.floats(1e-5, 1e6))
@example(59.9999)
@example(3599.9)
def test_a_duration_as_shown_reads_back_to_within_its_rounding(seconds: float) -> None:
    text = format_seconds(seconds)
    if text.endswith(" us"):
        assert float(text[:-3]) < 1000
        return
    assert parse_duration(text) == pytest.approx(seconds, rel=0.05)
