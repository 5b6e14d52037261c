"""What parent and child say to each other: one JSON request, then JSON lines on the child's own pipe.

Child to parent, one object a line: `{"event": "started"}` once libraries are loaded and a parallel operation has run (a child that
inherited a broken thread pool hangs before this line), `{"event": "phase", "name": ...}` while it works, and at the end one
`{"event": "answer", "protocol": 1, ...}` with either `payload` or `error`. Nothing is ever read from the child's stdout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from autofit.errors import WorkerError
from autofit.problem.config import TrialConfig
from autofit.trials.runner import TrialRequest

VERSION = 1
SCRATCH = "AUTOFIT_SCRATCH"  #: environment variable: the directory for what a killed child would leave behind


class Kind(StrEnum):
    """What a child is asked for."""

    DESCRIBE = "describe"  #: facts about device, model and software
    TRIAL = "trial"  #: run one configuration
    CHECK = "check"  #: train one batch in several forms, to be compared
    ESTIMATE = "estimate"  #: trace on fake tensors, return memory laws


class Event(StrEnum):
    """What a child says."""

    STARTED = "started"
    PHASE = "phase"
    ANSWER = "answer"


def encode_request(kind: Kind, payload: Mapping[str, Any]) -> bytes:
    """The request as bytes."""
    return json.dumps({"protocol": VERSION, "kind": str(kind), "payload": payload}).encode()


def decode_request(data: bytes) -> tuple[Kind, dict[str, Any]]:
    """Inverse of `encode_request`.

    Raises:
        WorkerError: another protocol version (parent and child are different installations).
    """
    message = json.loads(data)
    if message.get("protocol") != VERSION:
        raise WorkerError(
            f"protocol {message.get('protocol')!r} instead of {VERSION}: two versions of autofit are mixed"
        )
    return Kind(message["kind"]), message["payload"]


def encode_event(event: Event, **content: Any) -> bytes:
    """One line of the child's pipe."""
    body = {"event": str(event), **content}
    if event is Event.ANSWER:
        body["protocol"] = VERSION
    return json.dumps(body).encode() + b"\n"


def decode_event(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None when it is not ours (then the whole answer is unreadable)."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("event") not in list(Event):
        return None
    if message["event"] == Event.ANSWER and message.get("protocol") != VERSION:
        return None
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOrder:
    """A `TrialRequest` with what the child needs beside it: the device as torch names it, and its context's size."""

    request: TrialRequest
    workload: Mapping[str, Any]
    device: str
    context_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON for the pipe."""
        return {**asdict(self), "request": {**asdict(self.request), "config": self.request.config.to_json()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialOrder:
        """Inverse of `to_json`."""
        raw = dict(data["request"])
        raw["config"] = TrialConfig.from_json(raw["config"])
        rest = {f.name: data[f.name] for f in fields(cls) if f.name != "request"}
        return cls(request=TrialRequest(**raw), **rest)
