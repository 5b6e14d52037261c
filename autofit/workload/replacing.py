"""Attributes of modules and classes that are replaced for a while, and what stands for the built-in `open` meanwhile."""

from __future__ import annotations

import _io
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


class Opener:
    """Stands for the built-in `open`. No function: one in a class would bind, which the built-in does not; it pickles as what it stands for.

    Args:
        function: the built-in.
        led: (file, mode) -> what to open instead.
    """

    def __init__(self, function: Callable[..., Any], led: Callable[[Any, str], Any]) -> None:
        self._function, self._led = function, led
        functools.update_wrapper(self, function)

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """As the built-in."""
        return self._function(self._led(file, mode), mode, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """The built-in, wherever it is unpickled."""
        return _built_in_open, ()


def _built_in_open() -> Any:
    return _io.open


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class or module for a while."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
