"""A training step with another optimizer, put together from two traces.

Forward and backward know nothing of the optimizer, and an update nothing of the batch, of checkpointing or of accumulation: it
sees parameters and their gradients. So one trace per optimizer, beside those of one optimizer at every batch and way of
checkpointing, tells all of them. What two traces must agree on for that is checked; where they do not, each is traced by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autofit.memory.events import Mark, Moment, OpCost, Trace
from autofit.memory.trace_builder import TraceBuilder


class NotSeparable(Exception):
    """An update shares storages with the rest of the step, or the two traces are of different models."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """Events from one mark to the next: `trace.events[begin:end]`."""

    mark: Mark
    begin: int
    end: int

    @property
    def key(self) -> tuple[Moment, int]:
        return self.mark.moment, self.mark.step


def with_updates(step: Trace, updates: Trace) -> Trace:
    """`step` with the optimizer of `updates`.

    Args:
        step: a trace at any batch, way of checkpointing and accumulation.
        updates: a trace of the same model and precision.

    Raises:
        NotSeparable: the optimizers are not exchangeable in these traces, and why.
    """
    ours, theirs = _Separated(step), _Separated(updates)
    ours.require_same_ground(theirs)
    facts = replace(step.facts, notes=tuple(sorted({*step.facts.notes, *updates.facts.notes})))
    builder = TraceBuilder()
    own: dict[int, int] = {}
    foreign: dict[int, int] = {}
    for phase in ours.phases:
        builder.mark(phase.mark.moment, step=phase.mark.step, micro_step=phase.mark.micro_step)
        if phase.mark.moment is not Moment.UPDATE:
            _copy(builder, step, phase, own, skip=ours.born_in_updates)
            continue
        foreign |= {
            theirs.clipped[phase.mark.step][ordinal]: own[ours.clipped[phase.mark.step][ordinal]]
            for ordinal in theirs.dropped[phase.mark.step]
        }
        _copy(builder, updates, theirs.updates[phase.mark.step], foreign)
    for allocation in theirs.outlived:
        builder.free(foreign[allocation])
    return replace(builder.build(facts), ops=_works(step, updates))


class _Separated:
    """A trace taken apart into its updates and the rest.

    Attributes:
        phases: all of them, in order.
        updates: the update of each step.
        clipped: allocations born while gradients are clipped, per step.
        dropped: which of those (by their place there) die in the update: the flags of a gradient scaler.
        born_in_updates: allocations.
        outlived: those of them that die after the last birth of all, with the optimizer.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.phases = list(_phases(trace))
        self.updates = {p.mark.step: p for p in self.phases if p.mark.moment is Moment.UPDATE}
        if sorted(self.updates) != list(range(trace.facts.steps)):
            raise NotSeparable(f"{len(self.updates)} updates are marked in {trace.facts.steps} steps")
        self.clipped: dict[int, list[int]] = {step: [] for step in self.updates}
        for phase in self.phases:
            if phase.mark.moment is Moment.CLIP:
                self.clipped[phase.mark.step] += [e for e in trace.events[phase.begin : phase.end] if e >= 0]
        self.born_in_updates = frozenset(
            e for p in self.updates.values() for e in trace.events[p.begin : p.end] if e >= 0
        )
        self.dropped = {step: self._dropped(phase) for step, phase in self.updates.items()}
        self.outlived = self._outlived()

    def _dropped(self, update: _Phase) -> tuple[int, ...]:
        place = {allocation: i for i, allocation in enumerate(self.clipped[update.mark.step])}
        outer = [
            ~e
            for e in self.trace.events[update.begin : update.end]
            if e < 0 and ~e not in self.born_in_updates
        ]
        foreign = next((a for a in outer if a not in place), None)
        if foreign is not None:
            raise NotSeparable(f"an update ends the life of what {self.trace.operator(foreign)} made")
        return tuple(sorted(place[a] for a in outer))

    def _outlived(self) -> tuple[int, ...]:
        last_birth = max((i for i, e in enumerate(self.trace.events) if e >= 0), default=-1)
        found = []
        for phase in self.phases:
            if phase.mark.moment is Moment.UPDATE:
                continue
            for i in range(phase.begin, phase.end):
                event = self.trace.events[i]
                if event < 0 and ~event in self.born_in_updates:
                    if i < last_birth:
                        raise NotSeparable(f"what {self.trace.operator(~event)} made in an update dies outside of one")
                    found.append(~event)
        return tuple(found)

    def _births(self, allocations: list[int]) -> list[tuple[str, int]]:
        return [(self.trace.operator(a), self.trace.sizes[a]) for a in allocations]

    def require_same_ground(self, other: _Separated) -> None:
        """Both updates must stand on the same model and the same clipping.

        Raises:
            NotSeparable: they do not.
        """
        if self.trace.facts.n_params != other.trace.facts.n_params or self._births(self._model()) != other._births(other._model()):
            raise NotSeparable("the models are not the same")
        if list(self.updates) != list(other.updates) or self.dropped != other.dropped:
            raise NotSeparable("the updates do not end the lives of the same storages")
        for step in self.updates:
            if self._births(self.clipped[step]) != other._births(other.clipped[step]):
                raise NotSeparable("gradients are not clipped in the same way")

    def _model(self) -> list[int]:
        ends = [p.begin for p in self.phases if p.mark.moment is not Moment.MODEL]
        return [e for e in self.trace.events[: min(ends)] if e >= 0]


def _phases(trace: Trace) -> Iterator[_Phase]:
    marks = trace.marks
    if not marks or marks[0].index != 0:
        marks = (Mark(index=0, moment=Moment.MODEL), *marks)
    ends = [*(mark.index for mark in marks[1:]), len(trace.events)]
    for mark, end in zip(marks, ends):
        yield _Phase(mark, mark.index, end)


def _copy(
    builder: TraceBuilder,
    trace: Trace,
    phase: _Phase,
    numbers: dict[int, int],
    *,
    skip: frozenset[int] = frozenset(),
) -> None:
    """Write `phase` of `trace`; `numbers` translates its allocations and learns new ones."""
    stairs = dict(trace.stairs)
    for event in trace.events[phase.begin : phase.end]:
        if event >= 0:
            numbers[event] = builder.alloc(
                trace.sizes[event], trace.operator(event), trace.kinds[event], stairs=stairs.get(event)
            )
        elif ~event not in skip:
            builder.free(numbers[~event])


def _works(step: Trace, updates: Trace) -> tuple[OpCost, ...]:
    """Work of both; none where that of the steps was not recorded."""
    if not step.ops:
        return ()
    before = [op for op in step.ops if op.moment not in (Moment.UPDATE, Moment.ZERO)]
    after = [op for op in step.ops if op.moment is Moment.ZERO]
    return (*before, *(op for op in updates.ops if op.moment is Moment.UPDATE), *after)
