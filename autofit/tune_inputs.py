"""What Python callers pass to `tune`, checked and put into the form that a search takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.errors import UserError


@contextlib.contextmanager
def object_file(objects: Mapping[str, Any], args: Any) -> Iterator[str | None]:
    """Path of a private file with the live objects while the block runs; None where there are none."""
    if args is None and all(value is None for value in objects.values()):
        yield None
        return
    from autofit.objects import ObjectFile, sent_arguments

    with ObjectFile({**objects, **sent_arguments(args)}) as file:
        yield file.path


def label_of(model: Any, model_init: Any) -> str:
    """The model's name, or what stands for an object."""
    if model is None and model_init is None:
        raise UserError(
            "no model given", hint="pass a name, a path, an nn.Module, a config, or model_init=..."
        )
    if isinstance(model, str | Path):
        return str(model)
    thing = model if model is not None else model_init
    return f"<{getattr(thing, '__name__', type(thing).__name__)}>"


def names_of(value: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Names from a list, or from one string with commas; None stays None."""
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else list(value)
    cleaned = tuple(dict.fromkeys(str(name).strip() for name in names if str(name).strip()))
    if not cleaned:
        raise UserError("an empty list of choices", hint="leave the option out to search them all")
    return cleaned


def listed(callbacks: Any) -> list[Any] | None:
    """The callbacks as a list; None where there are none."""
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise UserError(f"callbacks must be a list, got {type(callbacks).__name__}", hint="callbacks=[MyCallback()]")
    return list(callbacks) if callbacks else None


def whole_number(value: Any, what: str) -> int | None:
    """A whole number, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{what} must be a whole number, got {value!r}")
    return value
