"""Writes a trace while it happens. Nothing here imports torch."""

from __future__ import annotations

from autofit.memory.events import Facts, Kind, Mark, Moment, OpCost, Stairs, Trace


class TraceBuilder:
    """Collects a trace while it happens.

    Attributes:
        moment: the phase that `op` records under, set by `mark`.
    """

    def __init__(self) -> None:
        self.moment = Moment.MODEL
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._operators: list[int] = []
        self._kinds: list[Kind] = []
        self._rows: dict[str, int] = {}
        self._marks: list[Mark] = []
        self._ops: list[OpCost] = []
        self._stairs: list[tuple[int, Stairs]] = []

    def alloc(self, nbytes: int, operator: str, kind: Kind = Kind.TEMPORARIES, *, stairs: Stairs | None = None) -> int:
        """Record a birth; returns the allocation's number. `stairs`: see `Trace.stairs`."""
        number = len(self._sizes)
        if stairs is not None:
            self._stairs.append((number, stairs))
        self._events.append(number)
        self._sizes.append(nbytes)
        self._operators.append(self._rows.setdefault(operator, len(self._rows)))
        self._kinds.append(kind)
        return number

    def free(self, allocation: int) -> None:
        """Record a death."""
        self._events.append(~allocation)

    def classify(self, allocation: int, kind: Kind) -> None:
        """Name what `allocation` holds, when that is known only after its birth (a gradient, a state)."""
        self._kinds[allocation] = kind

    def mark(self, moment: Moment, *, step: int = 0, micro_step: int = 0) -> None:
        """A phase begins here."""
        self.moment = moment
        self._marks.append(Mark(index=len(self._events), moment=moment, step=step, micro_step=micro_step))

    def op(self, operator: str, *, dtype: str, flops: int, nbytes: int, kernels: int = 1) -> None:
        """Record the work of one operator call in the present phase."""
        self._ops.append(
            OpCost(
                moment=self.moment,
                operator=operator,
                dtype=dtype,
                flops=flops,
                nbytes=nbytes,
                kernels=kernels,
            )
        )

    def forget_ops(self) -> None:
        """Drop the work recorded so far: the steps before the last one are not wanted."""
        self._ops.clear()

    def build(self, facts: Facts) -> Trace:
        """The trace so far."""
        return Trace(
            events=tuple(self._events),
            sizes=tuple(self._sizes),
            operators=tuple(self._operators),
            kinds=tuple(self._kinds),
            names=tuple(self._rows),
            marks=tuple(self._marks),
            ops=tuple(self._ops),
            facts=facts,
            stairs=tuple(self._stairs),
        )
