"""Which traces tell of many classes of configurations: each optimizer once, and one optimizer in every other way.

`updates.with_updates` puts the rest together. Three precisions, both ways of checkpointing, with and without accumulation and four
optimizers are 48 classes and 96 traces at two batches; 30 are enough. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autofit.errors import AutofitError
from autofit.memory.events import Trace
from autofit.memory.request import TraceRequest
from autofit.memory.updates import NotSeparable, with_updates

Outcome = Trace | AutofitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One trace that must be made.

    Attributes:
        request: what to trace, at its own batch.
        smooth, costs: as for `run.trace`.
    """

    request: TraceRequest
    smooth: bool
    costs: bool


Run = Callable[[Sequence[Task]], Sequence[Outcome]]


def traces_of(
    classes: Mapping[str, TraceRequest], batches: Sequence[int], run: Run
) -> Iterator[tuple[str, list[Outcome]]]:
    """Each class with its traces (or what took their place), one per batch and in their order.

    Args:
        classes: by `TraceRequest.class_key`; those named first are traced first.
        batches: those from 2 on are for a law.
        run: makes traces; an `AutofitError` in the place of one that cannot be made.
    """
    pending, alone = dict(classes), set[str]()
    while pending:
        plan = _Plan(batches=batches)
        for key, request in pending.items():
            plan.add(key, request, alone=key in alone)
        made = run(plan.tasks)
        for key in list(pending):
            found = plan.result(key, made)
            if found is None:
                # Its lender failed, which may be the lender's own fault; what does not come apart is traced whole.
                if key in plan.loans and plan.lent(key, made):
                    alone.add(key)
                continue
            del pending[key]
            yield key, found


@dataclass(slots=True, kw_only=True)
class _Plan:
    """One round of tasks.

    Attributes:
        batches: of every class that is traced whole.
        tasks: all of them.
        whole: class -> its tasks.
        loans: class -> the class whose steps it takes, and the task that traces its own updates.
    """

    batches: Sequence[int]
    tasks: list[Task] = field(default_factory=list)
    whole: dict[str, list[int]] = field(default_factory=dict)
    loans: dict[str, tuple[str, int]] = field(default_factory=dict)
    _lenders: dict[str, str] = field(default_factory=dict)
    _updates: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, request: TraceRequest, *, alone: bool) -> None:
        """Plan the traces of one class."""
        lender = None if alone else self._lenders.setdefault(request.step_key(), key)
        if lender is None or lender == key:
            self.whole[key] = [
                self._task(replace(request, batch=b), smooth=b > 1, costs=b > 1) for b in self.batches
            ]
            return
        own = request.update_key()
        if own not in self._updates:
            light = replace(request.with_plainest_step(), batch=max(2, min(self.batches)))
            self._updates[own] = self._task(light, smooth=False, costs=True)
        self.loans[key] = lender, self._updates[own]

    def _task(self, request: TraceRequest, *, smooth: bool, costs: bool) -> int:
        self.tasks.append(Task(request=request, smooth=smooth, costs=costs))
        return len(self.tasks) - 1

    def lent(self, key: str, made: Sequence[Outcome]) -> bool:
        """Whether the class that lends its steps to `key` was traced."""
        lender, _ = self.loans[key]
        return all(isinstance(made[i], Trace) for i in self.whole[lender])

    def result(self, key: str, made: Sequence[Outcome]) -> list[Outcome] | None:
        """The traces of a class; None when this round does not tell them."""
        if key in self.whole:
            return [made[i] for i in self.whole[key]]
        lender, own = self.loans[key]
        updates, steps = made[own], [made[i] for i in self.whole[lender]]
        if not isinstance(updates, Trace) or not self.lent(key, made):
            return None
        try:
            return [with_updates(step, updates) for step in steps if isinstance(step, Trace)]
        except NotSeparable:
            return None
