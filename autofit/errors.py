"""Errors that autofit raises.

    AutofitError                a message for the user, an optional hint, and the exit code of the CLI
    ├── UserError          (2)  bad input: one line that says what was wrong, a hint that says what to do
    │   ├── ScriptError    (2)  the user's script does not come to a training; its own traceback or last words are shown
    │   ├── StudyError     (2)  the study file is corrupt, foreign, or made under other conditions
    │   └── FileFormatError(2)  a result or landscape file that cannot be read
    ├── NothingFits        (3)  every configuration of the space is infeasible under the memory limit
    ├── SearchFailed       (1)  every trial failed the same way: the traceback is shown once
    └── WorkerError        (1)  a child process broke its contract (no start, unreadable answer)

The library raises; only the command line prints and exits.
"""

from __future__ import annotations


class AutofitError(Exception):
    """Base class. `str(error)` is the one line shown to the user.

    Args:
        message: what was wrong, one line, naming the value.
        hint: what to do about it, one line; None when the message says it all.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(AutofitError):
    """The input cannot be used: a mistake of the caller, never a bug of ours."""

    exit_code = 2


class ScriptError(UserError):
    """The user's script cannot be tuned; `traceback` is its own, or what it printed last, whole."""

    def __init__(self, message: str, *, traceback: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.traceback = traceback


class StudyError(UserError):
    """The study file cannot be continued: corrupt, not a study, or other conditions."""


class FileFormatError(UserError):
    """A result or landscape file is not readable by this version."""


class NothingFits(AutofitError):
    """No configuration of the space fits under the memory limit.

    Args:
        message: one line, with the limit.
        shortfall_bytes: smallest number of bytes by which a configuration missed; None when unknown.
        hint: what would help.
    """

    exit_code = 3

    def __init__(self, message: str, *, shortfall_bytes: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.shortfall_bytes = shortfall_bytes


class SearchFailed(AutofitError):
    """All trials failed alike; `traceback` is the child's, kept whole."""

    def __init__(self, message: str, *, traceback: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.traceback = traceback


class WorkerError(AutofitError):
    """A child process did not start, or answered something unreadable."""
