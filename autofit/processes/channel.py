"""The child's end of its own pipe."""

from __future__ import annotations

from typing import Any, BinaryIO

from autofit.processes.protocol import Event, encode_event


class Channel:
    """What a child says while it works, one line at a time.

    Attributes:
        phase: the last phase that was entered; sent with an error, so that it is known where it happened.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self.phase: str | None = None

    def enter(self, phase: str, *, send: bool = True) -> None:
        """Note that `phase` begins; `send=False` keeps it for an exception's report only (no system call)."""
        self.phase = phase
        if send:
            self.send(Event.PHASE, name=phase)

    def send(self, event: Event, **content: Any) -> None:
        """Write one line at once."""
        self._pipe.write(encode_event(event, **content))
        self._pipe.flush()
