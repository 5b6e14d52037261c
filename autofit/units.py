"""Sizes and durations: parsed at the edge, bytes and seconds inside, formatted at the edge."""

from __future__ import annotations

import re

from autofit.errors import UserError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": KIB,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": 10**9, "gb": 10**9, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": TIB,
}  # fmt: skip
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
MAX_BYTES = 1 << 60
MAX_SECONDS = 366 * 86400.0


def parse_size(text: str | int, *, what: str = "size") -> int:
    """Return `text` in bytes: `16GiB`, `16GB`, `1.5g`, `17179869184` or an int.

    Args:
        text: a number with an optional unit; decimal units are powers of 1000, `...iB` powers of 1024.
        what: the option's name, for the message.

    Raises:
        UserError: not a size, not positive, beyond an exbibyte, or a number of bytes below a mebibyte.
    """
    hint = "write it as 16GiB, 16GB or a number of bytes"
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise UserError(f"{what} must be a size, got {text!r}", hint=hint)
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise UserError(f"{what} is not a size: {str(text)!r}", hint=hint)
    size = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    if not 1 <= size <= MAX_BYTES:
        raise UserError(f"{what} is out of range: {str(text)!r}", hint=hint)
    if not match[2] and size < MIB:  # nobody means 16 bytes
        raise UserError(f"{what} lacks a unit: {str(text)!r}", hint=hint)
    return int(size)


def parse_duration(text: str | float, *, what: str = "duration") -> float:
    """Return `text` in seconds: `90s`, `10m`, `1h`, `1h30m`, `45` or a number.

    Raises:
        UserError: not a duration, not positive, or longer than a year.
    """
    hint = "write it as 90s, 10m, 1h or 1h30m"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UserError(f"{what} must be a duration, got {text!r}", hint=hint)
    total = _parsed_duration(text, what, hint) if isinstance(text, str) else text
    if not 0 < total <= MAX_SECONDS:
        raise UserError(f"{what} is out of range: {str(text)!r}", hint=hint)
    return float(total)


def _parsed_duration(text: str, what: str, hint: str) -> float:
    rest, total, parts = text.strip(), 0.0, 0
    while rest:
        match = _NUMBER.match(rest)
        if match is None or match[2].lower() not in _DURATION_UNITS or (parts and not match[2]):
            raise UserError(f"{what} is not a duration: {text!r}", hint=hint)
        total += float(match[1]) * _DURATION_UNITS[match[2].lower()]
        rest, parts = rest[match.end() :], parts + 1
    if parts == 0:
        raise UserError(f"{what} is empty", hint=hint)
    return total


def format_bytes(size: float) -> str:
    """Return `size` bytes for a reader: `11.3 GiB`, `512.0 MiB`, `-2.0 GiB`, `17 B`."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if round(size * 1024 / scale, 1) >= 1024:  # never "1024.0 MiB"
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return `seconds` for a reader: `820 us`, `31.4 ms`, `2.10 s`, `3m 20s`, `1h 05m`."""
    if round(seconds * 1e6) < 1000:  # compared as shown: never "1000 us" or "60.00 s"
        return f"{seconds * 1e6:.0f} us"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 2) < 60:
        return f"{seconds:.2f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m {rest:02d}s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours}h {rest:02d}m"
