"""How a refusal must look: the right exception, its message and hint each one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from autofit.errors import AutofitError, UserError


@contextlib.contextmanager
def refused(
    message: str, *, hint: str | None = None, kind: type[AutofitError] = UserError
) -> Iterator[pytest.ExceptionInfo[AutofitError]]:
    """Expect a refusal.

    Args:
        message: a pattern that the message must contain.
        hint: a pattern that the hint must contain; None = there need not be one.
        kind: the exception, exactly.
    """
    with pytest.raises(AutofitError) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, repr(error)
    assert re.search(message, error.message), error.message
    assert error.message.strip()
    assert len(error.message.splitlines()) == 1, error.message
    assert hint is None or (error.hint is not None and re.search(hint, error.hint)), error.hint
    assert error.hint is None or len(error.hint.splitlines()) == 1, error.hint
