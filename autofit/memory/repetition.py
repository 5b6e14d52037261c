"""How a training goes on after its trace: the last optimizer step, again and again.

A trace holds two steps, because the second finds the optimizer's states beside its activations. What the allocator holds can
still grow in the steps after (a batch or a gradient may land in another hole each time), so a replay repeats the last step until
free memory lies as it lay before. For that one has to know which storages of a step take the place of those that the step
before left behind: batches, losses and norms, which live on into the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofit.memory.events import Mark, Moment, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """`Trace.events[begin:end]` is one step like all that follow.

    Attributes:
        begin, end: positions in the events.
        carried: (allocation, its successor): the first is left by the step before and dies in this one; the second is born in this
            one and dies in its stead in the next.
    """

    begin: int
    end: int
    carried: tuple[tuple[int, int], ...] = ()


def repetition_of(trace: Trace) -> Repetition | None:
    """The step of `trace` that can be repeated; None where its end is not marked, or where it leaves other storages than it found."""
    last = trace.facts.steps - 1
    begin = next((m.index for m in trace.marks if m.step == last and m.moment is not Moment.MODEL), None)
    end = next((m.index for m in trace.marks if m.moment is Moment.END), None)
    if last < 1 or begin is None or end is None:
        return None
    step = trace.events[begin:end]
    born, died = {e for e in step if e >= 0}, {~e for e in step if e < 0}
    roles = _roles(trace)
    old, new = (sorted((roles[a], a) for a in some) for some in (died - born, born - died))
    if [role for role, _ in old] != [role for role, _ in new]:
        return None
    return Repetition(begin=begin, end=end, carried=tuple((a, b) for (_, a), (_, b) in zip(old, new)))


def _roles(trace: Trace) -> list[tuple[str, int, str]]:
    """Per allocation: phase, micro-step and operator of its birth, which do not tell one step from another."""
    roles: list[tuple[str, int, str]] = []
    mark, upcoming = Mark(index=0, moment=Moment.MODEL), iter((*trace.marks, None))
    following = next(upcoming)
    for index, event in enumerate(trace.events):
        while following is not None and following.index <= index:
            mark, following = following, next(upcoming)
        if event >= 0:
            roles.append((mark.moment, mark.micro_step, trace.operator(event)))
    return roles
