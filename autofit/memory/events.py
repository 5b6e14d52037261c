"""What a trace is: every birth and death of a device storage in a few training steps, as plain columns.

The tracer writes a trace with `trace_builder.TraceBuilder`; the allocator replays it, the law and the anatomy read it. Allocations
are numbered 0, 1, 2, ... in the order of their birth, so an allocation's number is its row in every column, and the
order of events is a single list: `k` is the birth of allocation `k`, `~k` (that is `-k - 1`) its death. Sizes are the
bytes asked for, before any rounding. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autofit.errors import FileFormatError

VERSION = 2


class Moment(StrEnum):
    """What the training loop is doing; after `END` nothing, and what still dies dies with the loop."""

    MODEL = "model"
    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    UPDATE = "update"
    ZERO = "zero"
    END = "end"


class Kind(StrEnum):
    """What a storage holds.

    The tracer names what it knows and leaves the rest `TEMPORARIES`; which of those are `SAVED_ACTIVATIONS` follows
    from lifetimes (alive when a forward ends and its backward begins), see `anatomy`.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    SAVED_ACTIVATIONS = "saved_activations"
    TEMPORARIES = "temporaries"
    AUTOCAST_COPIES = "autocast_copies"
    INPUTS = "inputs"
    WORKSPACE = "workspace"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase begins.

    Attributes:
        index: position in `Trace.events`; the mark stands before that event.
        moment: what begins.
        step: optimizer step, from 0.
        micro_step: micro-step within the optimizer step, from 0.
    """

    index: int
    moment: Moment
    step: int = 0
    micro_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Work of one operator call.

    Attributes:
        moment: phase of the call.
        operator: its name (`aten.mm.default`).
        dtype: class of its arithmetic: `fp64`, `fp32`, `fp16`, `bf16`, `int8`, or `other`.
        flops: floating-point operations of its matrix products and convolutions; 0 for all else.
        nbytes: bytes read and written.
        kernels: kernels launched; 0 for views.
    """

    moment: Moment
    operator: str
    dtype: str
    flops: int
    nbytes: int
    kernels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was traced.

    Attributes:
        batch: samples per micro-step.
        seq_len: tokens per sample; None where the model has no such length.
        accumulation: micro-steps per optimizer step in the trace (1 or 2: more change nothing).
        steps: optimizer steps in the trace.
        n_params: parameters, trainable or not.
        sdpa: calls of scaled dot-product attention by kernel (`flash`, `efficient`, `math`).
        notes: what makes the trace uncertain, a line each.
    """

    batch: int
    seq_len: int | None = None
    accumulation: int = 1
    steps: int = 2
    n_params: int = 0
    sdpa: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stairs:
    """A size that follows a line through the batch in steps.

    Attributes:
        grain: bytes of one step: the size is the next multiple of it above the line,
        most: but not above this,
        later: until the line is so far up that a step for each of these many bytes of it is more.
        least: a line up to here means that nothing is taken.
    """

    grain: int
    most: int
    later: int
    least: int

    def at(self, line: int) -> int:
        """Bytes where the line is at `line`."""
        if line <= self.least:
            return 0
        return max(min(-(-line // self.grain) * self.grain, self.most), -(-line // self.later) * self.grain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Storages of a few training steps.

    Attributes:
        events: `k` = birth of allocation `k`, `~k` = its death, in order.
        sizes: bytes asked for, per allocation.
        operators: row of `names`, per allocation: the operator that made it.
        kinds: `Kind`, per allocation.
        names: operator names.
        marks: phase boundaries, by index.
        ops: work of the last micro-step and the last update (not of the steps before).
        facts: what was traced.
        stairs: (allocation, `Stairs`) where `sizes` holds a line, and `taken` what is asked for.
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    operators: tuple[int, ...]
    kinds: tuple[Kind, ...]
    names: tuple[str, ...]
    marks: tuple[Mark, ...]
    facts: Facts
    ops: tuple[OpCost, ...] = ()
    stairs: tuple[tuple[int, Stairs], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.operators) == len(self.kinds):
            raise ValueError("sizes, operators and kinds differ in length")
        born, dead = 0, bytearray(len(self.sizes))
        for event in self.events:
            if event >= 0:
                if event != born or born >= len(dead):
                    raise ValueError(f"allocation {event} is out of order")
                born += 1
            else:
                if ~event >= born or dead[~event]:
                    raise ValueError(f"allocation {~event} dies before its birth or twice")
                dead[~event] = 1
        if born != len(dead):
            raise ValueError(f"{len(dead)} allocations are described but {born} are born")

    def taken(self, lines: Sequence[int]) -> tuple[int, ...]:
        """Bytes asked for, per allocation, where `lines` stands for `sizes`."""
        if not self.stairs:
            return tuple(lines)
        found = list(lines)
        for allocation, stairs in self.stairs:
            found[allocation] = stairs.at(found[allocation])
        return tuple(found)

    def operator(self, allocation: int) -> str:
        """Name of the operator that made `allocation`."""
        return self.names[self.operators[allocation]]

    def mark_at(self, index: int) -> Mark:
        """The phase in which event `index` happens; before the first mark that is `Moment.MODEL`."""
        found = Mark(index=0, moment=Moment.MODEL)
        for mark in self.marks:
            if mark.index > index:
                break
            found = mark
        return found

    def to_json(self) -> dict[str, Any]:
        """All columns, as JSON."""
        kinds, marks, ops, moments = list(Kind), self.marks, self.ops, list(Moment)
        op_names = sorted({(o.operator, o.dtype) for o in ops})
        row = {name: i for i, name in enumerate(op_names)}
        return {
            "version": VERSION,
            "events": list(self.events),
            "sizes": list(self.sizes),
            "operators": list(self.operators),
            "kind_names": [str(k) for k in kinds],
            "kinds": [kinds.index(k) for k in self.kinds],
            "names": list(self.names),
            "marks": [[m.index, str(m.moment), m.step, m.micro_step] for m in marks],
            "moment_names": [str(m) for m in moments],
            "op_names": [list(name) for name in op_names],
            "ops": [
                [moments.index(o.moment), row[o.operator, o.dtype], o.flops, o.nbytes, o.kernels] for o in ops
            ],
            "facts": facts_to_json(self.facts),
            "stairs": [[k, s.grain, s.most, s.later, s.least] for k, s in self.stairs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Inverse of `to_json`.

        Raises:
            FileFormatError: another version, a missing column, or columns that contradict each other.
        """
        if data.get("version") != VERSION:
            raise FileFormatError(f"trace version {data.get('version')!r} is not {VERSION}")
        try:
            kinds = [Kind(name) for name in data["kind_names"]]
            moments = [Moment(name) for name in data["moment_names"]]
            return cls(
                events=tuple(data["events"]),
                sizes=tuple(data["sizes"]),
                operators=tuple(data["operators"]),
                kinds=tuple(kinds[k] for k in data["kinds"]),
                names=tuple(data["names"]),
                marks=tuple(
                    Mark(index=i, moment=Moment(m), step=s, micro_step=u) for i, m, s, u in data["marks"]
                ),
                ops=tuple(_op(moments[m], data["op_names"][n], f, b, k) for m, n, f, b, k in data["ops"]),
                facts=facts_from_json(data["facts"]),
                stairs=tuple(
                    (k, Stairs(grain=grain, most=most, later=later, least=least))
                    for k, grain, most, later, least in data["stairs"]
                ),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a trace: {error!r}") from None


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """All fields of `facts`, as JSON."""
    return {
        "batch": facts.batch,
        "seq_len": facts.seq_len,
        "accumulation": facts.accumulation,
        "steps": facts.steps,
        "n_params": facts.n_params,
        "sdpa": dict(facts.sdpa),
        "notes": list(facts.notes),
    }


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """Inverse of `facts_to_json`."""
    return Facts(**{**data, "notes": tuple(data["notes"])})


def _op(moment: Moment, name: list[str], flops: int, nbytes: int, kernels: int) -> OpCost:
    operator, dtype = name
    return OpCost(moment=moment, operator=operator, dtype=dtype, flops=flops, nbytes=nbytes, kernels=kernels)
