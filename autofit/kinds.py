"""Whether what was read from a file is of the kinds that its dataclasses declare, and its numbers are numbers.

Dataclasses do not look at what they are given, and a file edited by hand would fail far from its cause, as a traceback in a report. Only the
kinds of annotations that the files' classes use are known here; anything else passes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

LARGEST = 1e18  #: beyond it no bytes, seconds or speeds are, and sums of them overflow
WIDEST_INT = 2**64  #: seeds and digests are no quantities


def check_numbers(data: Any, where: str = "") -> None:
    """Check every number in JSON data, however deep: finite, and of a size that can be computed with.

    Args:
        data: objects, lists and values.
        where: its place, for the message.

    Raises:
        ValueError: the first number that is not, by its path.
    """
    if isinstance(data, Mapping):
        for name, value in data.items():
            check_numbers(value, f"{where}.{name}" if where else str(name))
    elif isinstance(data, list):
        for place, value in enumerate(data):
            check_numbers(value, f"{where}[{place}]")
    elif isinstance(data, int) and abs(data) > WIDEST_INT:
        raise ValueError(f"{where} is a number of {len(bin(abs(data))) - 2} bits")
    elif isinstance(data, float) and not abs(data) <= LARGEST:
        raise ValueError(f"{where} is {data!r}")


def check_kinds(value: Any, where: str = "") -> None:
    """Check every field of a dataclass instance, and of those inside it, against its annotation.

    Args:
        value: the instance.
        where: its place, for the message.

    Raises:
        TypeError: the first field of another kind, by its path.
    """
    hints = _hints(type(value))  # type: ignore[arg-type]
    for one in fields(value):
        path, found = f"{where}{one.name}", getattr(value, one.name)
        if not _is(found, hints[one.name]):
            raise TypeError(f"{path} is {found!r}"[:200])
        for part in _parts(found):
            check_kinds(part, f"{path}.")


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _parts(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)


def _is(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return isinstance(value, tuple) and all(_is(item, parts[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_is, value, parts))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_is(k, parts[0]) and _is(v, parts[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is Any or not isinstance(hint, type):
        return True
    return isinstance(value, hint)
