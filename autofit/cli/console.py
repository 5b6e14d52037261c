"""The console that the answer is printed on."""

from __future__ import annotations

from rich.console import Console


class AnswerConsole(Console):
    """stdout, whose reader may go away: rich would end the program with the exit code of a bug. It would print nothing where COLUMNS is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.width = self.width or 80

    def on_broken_pipe(self) -> None:
        """Let the command line end as it does for every stream."""
        raise BrokenPipeError
