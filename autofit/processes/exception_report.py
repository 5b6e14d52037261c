"""An exception as a child sends it: its chain by names and texts only, so that it can leave the process."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autofit.errors import UserError

_FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")  # torch.utils.data's own words
MAX_LINKS = 8  #: exceptions of one chain that are sent
MAX_MESSAGE = 2000  #: characters of one message
MAX_TRACEBACK = 64_000  #: characters of the traceback; its middle is left out beyond that


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionLink:
    """One exception of a chain.

    Attributes:
        types: qualified names of its class and all base classes, most derived first.
        message: `str(error)`.
        errno: of an OSError, else None.
    """

    types: tuple[str, ...]
    message: str
    errno: int | None = None

    @property
    def headline(self) -> str:
        """Class and message; of an error that a loader's worker has sent over, its own: its traceback's last line."""
        name = self.types[0].rpartition(".")[2]
        if not self.message.strip():
            return name
        if _FROM_WORKER.match(self.message):
            return self.message.strip().splitlines()[-1].strip()
        return f"{name}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionReport:
    """An exception as the child sends it.

    Attributes:
        links: the exception itself, then what it was raised from or while handling.
        traceback: as Python prints it.
        phase: where it happened; None when the child says so elsewhere.
        reserved_fraction: of the memory limit that the child's allocator held at that moment; None when it has no such counter.
    """

    links: tuple[ExceptionLink, ...]
    traceback: str = ""
    phase: str | None = None
    reserved_fraction: float | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExceptionReport:
        """Inverse of `to_json`.

        Raises:
            UserError: not an exception report.
        """
        try:
            links = tuple(
                ExceptionLink(
                    types=tuple(map(str, link["types"])), message=str(link["message"]), errno=link["errno"]
                )
                for link in data["links"]
            )
            return cls(
                links=links,
                traceback=str(data["traceback"]),
                phase=data["phase"],
                reserved_fraction=data.get("reserved_fraction"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"not an exception report: {error!r}") from None


def describe_exception(
    error: BaseException, *, phase: str | None = None, reserved_fraction: float | None = None
) -> ExceptionReport:
    """Describe `error` and its chain by names and texts only, so that it can leave the process. Runs in the child.

    Args:
        phase: where it happened.
        reserved_fraction: of the memory limit that the allocator holds, where it is known.
    """
    links: list[ExceptionLink] = []
    queue, seen = [error], set()
    while queue and len(links) < MAX_LINKS:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        links.append(_link(current))
        queue += [e for e in (current.__cause__, current.__context__) if e is not None]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions
    try:
        text = "".join(traceback.format_exception(error))
    except MemoryError:  # the very case this is for: the frames hold the tensors
        traceback.clear_frames(error.__traceback__)
        text = "the traceback is lost: no memory was left to format it"
    return ExceptionReport(
        links=tuple(links),
        traceback=clip(text, MAX_TRACEBACK),
        phase=phase,
        reserved_fraction=reserved_fraction,
    )


def _link(error: BaseException) -> ExceptionLink:
    try:
        message = str(error)
    except Exception as broken:  # a user's __str__ may do anything, and the report must leave the child
        message = f"<{type(broken).__name__} while reading the message>"
    number = error.errno if isinstance(error, OSError) else None
    types = tuple(f"{t.__module__}.{t.__qualname__}" for t in type(error).__mro__ if t is not object)
    return ExceptionLink(
        types=types, message=clip(message, MAX_MESSAGE), errno=number if isinstance(number, int) else None
    )


def clip(text: str, limit: int) -> str:
    """`text`, its middle left out beyond `limit` characters: head and tail of a message carry what it says."""
    if len(text) <= limit:
        return text
    head, tail = limit // 3, limit - limit // 3 - 60
    return f"{text[:head]}\n... {len(text) - head - tail} characters left out ...\n{text[-tail:]}"
