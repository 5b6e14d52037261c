"""From traces at two batch sizes to the peaks at any batch.

The steps of a training loop make the same allocations in the same order whatever the batch (from 2 on), and each
allocation's size is affine in the batch, some in steps. So the law is not a line through two peaks, which is wrong by up to 83 % when
the peak moves from the update to the activations, but a line per allocation; the peaks of a batch come from a replay
with its sizes. A batch of 1 takes other paths through broadcasting and reshaping and has a trace of its own, as have
one micro-step per update and several (gradients stay alive between micro-steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from typing import Any

from autofit.errors import FileFormatError
from autofit.memory.envelope import Envelope
from autofit.memory.events import Trace
from autofit.memory.repetition import Repetition, repetition_of
from autofit.memory.replay import Peaks, Replay, min_capacity, replay

VERSION = 1
MAX_BATCH = 1 << 16


class NotAffine(Exception):
    """The traces do not make a law: they differ in structure, or a size is not affine in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLaw:
    """The peaks of one configuration for every batch.

    Attributes:
        base: the trace at the smaller batch, without its `ops`.
        rises: bytes by which each allocation grows over `span` samples.
        span: samples between the two traces.
        single: the trace at batch 1; None = a batch of 1 is extrapolated.
    """

    base: Trace
    rises: tuple[int, ...]
    span: int
    single: Trace | None = None
    _known: dict[str, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _steps: dict[bool, Repetition | None] = field(default_factory=dict, repr=False, compare=False)
    _replays: dict[tuple[int, bool], Replay] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def fit(
        cls, low: Trace, high: Trace, *, single: Trace | None = None, checks: Sequence[Trace] = ()
    ) -> MemoryLaw:
        """The law through two traces.

        Args:
            low, high: traces of one configuration at two batch sizes, 2 or more.
            single: the trace at batch 1.
            checks: traces at further batch sizes that the law must reproduce exactly.

        Raises:
            NotAffine: another structure, a size that falls as the batch grows, or a check that fails.
        """
        span = high.facts.batch - low.facts.batch
        if span < 1:
            raise NotAffine(f"batches {low.facts.batch} and {high.facts.batch} are not in rising order")
        low, high = _alike(low, high)
        compare_structure(low, high)
        rises = tuple(b - a for a, b in zip(low.sizes, high.sizes))
        for k, rise in enumerate(rises):
            if rise < 0:
                raise NotAffine(
                    f"{low.operator(k)} asks for {low.sizes[k]} bytes at batch {low.facts.batch} "
                    f"and {high.sizes[k]} at {high.facts.batch}"
                )
        law = cls(
            base=replace(low, ops=()), rises=rises, span=span, single=single and replace(single, ops=())
        )
        for check in checks:
            law.check(check)
        return law

    def check(self, trace: Trace) -> None:
        """Compare the law with a trace at another batch.

        Raises:
            NotAffine: another structure or size, by the first allocation that differs.
        """
        compare_structure(self.base, trace, stairs=False)
        for k, (told, seen) in enumerate(zip(self.sizes(trace.facts.batch), trace.taken(trace.sizes))):
            if told != seen:
                raise NotAffine(
                    f"{trace.operator(k)} asks for {seen} bytes at batch {trace.facts.batch}, not {told}"
                )

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Bytes of every allocation at `batch`."""
        if batch == 1 and self.single is not None:
            return self.single.taken(self.single.sizes)
        more, span = batch - self.base.facts.batch, self.span
        if more % span == 0:
            times = more // span
            return self.base.taken([max(0, a + r * times) for a, r in zip(self.base.sizes, self.rises)])
        return self.base.taken([max(0, a - (-r * more // span)) for a, r in zip(self.base.sizes, self.rises)])

    def trace(self, batch: int) -> Trace:
        """The trace as it would be at `batch`."""
        if batch == 1 and self.single is not None:
            return replace(self.single, sizes=self.sizes(1), stairs=())
        return replace(self.base, sizes=self.sizes(batch), stairs=(), facts=replace(self.base.facts, batch=batch))

    def exact(self, batch: int) -> bool:
        """Whether `batch` was traced or lies on the law, not before its beginning."""
        return batch >= min(2, self.base.facts.batch) or self.single is not None

    def replay(self, batch: int, *, expandable: bool = False) -> Replay:
        """What the allocator does at `batch` when memory is no limit."""
        key = (batch, expandable)
        if key not in self._replays:
            self._replays[key] = replay(
                self._events(batch), self.sizes(batch), expandable=expandable, again=self._again(batch)
            )
        return self._replays[key]

    def predict(self, batch: int, *, expandable: bool = False) -> Peaks:
        """Peaks at `batch` (>= 1) without the context; none of them falls as the batch grows."""
        return Peaks(
            peak_allocated_bytes=self.peak_allocated_bytes(batch, expandable=expandable),
            peak_reserved_bytes=self.peak_reserved_bytes(batch, expandable=expandable),
            min_capacity_bytes=self.min_capacity_bytes(batch, expandable=expandable),
        )

    def peak_allocated_bytes(self, batch: int, *, expandable: bool = False) -> int:
        """That of `predict`, for one replay."""
        return self._envelope("allocated", expandable).at(batch)

    def peak_reserved_bytes(self, batch: int, *, expandable: bool = False) -> int:
        """That of `predict`, for one replay."""
        return self._envelope("reserved", expandable).at(batch)

    def min_capacity_bytes(self, batch: int, *, expandable: bool = False) -> int:
        """That of `predict`, for some ten replays; between the other two."""
        return self._envelope("capacity", expandable).at(batch)

    def fits(self, batch: int, capacity_bytes: int, *, expandable: bool = False) -> bool:
        """Whether `predict(batch).min_capacity_bytes` is at most `capacity_bytes`, at the least cost."""
        if self.peak_allocated_bytes(batch, expandable=expandable) > capacity_bytes:
            return False
        if self.peak_reserved_bytes(batch, expandable=expandable) <= capacity_bytes:
            return True
        return self.min_capacity_bytes(batch, expandable=expandable) <= capacity_bytes

    def max_batch(self, capacity_bytes: int, *, expandable: bool = False, limit: int = MAX_BATCH) -> int:
        """Largest batch up to `limit` that fits in `capacity_bytes` (context not counted); 0 when none does."""
        fits = partial(self.fits, capacity_bytes=capacity_bytes, expandable=expandable)
        if limit < 1 or not fits(1):
            return 0
        low, high = 1, 2
        while high <= limit and fits(high):
            low, high = high, 2 * high
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def to_json(self) -> dict[str, Any]:
        """The law and what it has already worked out, as JSON."""
        return {
            "version": VERSION,
            "base": self.base.to_json(),
            "rises": list(self.rises),
            "span": self.span,
            "single": None if self.single is None else self.single.to_json(),
            "known": {name: sorted(values.items()) for name, values in self._known.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryLaw:
        """Inverse of `to_json`.

        Raises:
            FileFormatError: another version, or not a law.
        """
        if data.get("version") != VERSION:
            raise FileFormatError(f"memory law version {data.get('version')!r} is not {VERSION}")
        try:
            single, base = data["single"], Trace.from_json(data["base"])
            if len(data["rises"]) != len(base.sizes) or data["span"] < 1:
                raise ValueError("rises do not match the trace")
            return cls(
                base=base,
                rises=tuple(data["rises"]),
                span=data["span"],
                single=None if single is None else Trace.from_json(single),
                _known={name: {int(b): int(v) for b, v in values} for name, values in data["known"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"not a memory law: {error!r}") from None

    def _traced(self, batch: int) -> Trace:
        return self.single if batch == 1 and self.single is not None else self.base

    def _events(self, batch: int) -> tuple[int, ...]:
        return self._traced(batch).events

    def _again(self, batch: int) -> Repetition | None:
        traced = self._traced(batch)
        single = traced is self.single
        if single not in self._steps:
            self._steps[single] = repetition_of(traced)
        return self._steps[single]

    def _envelope(self, counter: str, expandable: bool) -> Envelope:
        known = self._known.setdefault(f"{counter}/expandable" if expandable else counter, {})
        if counter == "capacity":
            return Envelope(
                raw=partial(self._capacity, expandable=expandable),
                floor=self._raw("allocated", expandable),
                ceiling=self._raw("reserved", expandable),
                known=known,
            )
        return Envelope(raw=self._raw(counter, expandable), known=known)

    def _raw(self, counter: str, expandable: bool) -> Callable[[int], int]:
        known = self._known.setdefault(f"{counter}/expandable" if expandable else counter, {})

        def raw(batch: int) -> int:
            if batch not in known:
                seen = self.replay(batch, expandable=expandable)
                allocated = counter == "allocated"
                known[batch] = seen.peak_allocated_bytes if allocated else seen.peak_reserved_bytes
            return known[batch]

        return raw

    def _capacity(self, batch: int, *, expandable: bool) -> int:
        unlimited = self.replay(batch, expandable=expandable)
        return min_capacity(
            self._events(batch),
            self.sizes(batch),
            unlimited=unlimited,
            expandable=expandable,
            again=self._again(batch),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLaw:
    """Laws at three lengths, joined: every coefficient is quadratic in the sequence length.

    Attributes:
        laws: by sequence length, in rising order; the first, middle and last carry the parabola.
    """

    laws: tuple[tuple[int, MemoryLaw], ...]

    @classmethod
    def fit(cls, laws: Mapping[int, MemoryLaw]) -> SequenceLaw:
        """Join laws of one configuration at three or more lengths; those beyond three are checks.

        Raises:
            NotAffine: too few lengths, another structure, or a check that is not met exactly.
        """
        ordered = tuple(sorted(laws.items()))
        if len(ordered) < 3:
            raise NotAffine(f"a sequence law needs three lengths, got {len(ordered)}")
        first = ordered[0][1]
        for length, law in ordered[1:]:
            compare_structure(first.base, law.base)
            if first.single is not None and law.single is not None:
                compare_structure(first.single, law.single)
            if (law.span, law.base.facts.batch) != (first.span, first.base.facts.batch):
                raise NotAffine(f"the law at length {length} was traced at other batches")
        joined = cls(laws=ordered)
        for length, law in ordered:
            told = joined.at(length)
            if (told.base.sizes, told.rises) != (law.base.sizes, law.rises):
                raise NotAffine(f"sizes are not quadratic in the sequence length: they fail at {length}")
        return joined

    def at(self, seq_len: int) -> MemoryLaw:
        """The law at `seq_len`; exact when it shares the divisor (128, say) of the lengths that were traced."""
        nodes = [self.laws[0], self.laws[len(self.laws) // 2], self.laws[-1]]
        weights, divisor = _lagrange([length for length, _ in nodes], seq_len)

        def blend(columns: list[tuple[int, ...]]) -> tuple[int, ...]:
            a, b, c = weights
            return tuple([max(0, -(-(a * x + b * y + c * z) // divisor)) for x, y, z in zip(*columns)])

        def trace(traces: list[Trace]) -> Trace:
            facts = replace(traces[0].facts, seq_len=seq_len)
            return replace(traces[0], sizes=blend([t.sizes for t in traces]), facts=facts)

        singles = [law.single for _, law in nodes if law.single is not None]
        return MemoryLaw(
            base=trace([law.base for _, law in nodes]),
            rises=blend([law.rises for _, law in nodes]),
            span=nodes[0][1].span,
            single=trace(singles) if len(singles) == len(nodes) else None,
        )


def _alike(one: Trace, other: Trace) -> tuple[Trace, Trace]:
    """Both with `stairs` only where they agree: a sum whose width is the batch (of distances between samples) has others at each, and too few rows to take much."""
    if one.stairs == other.stairs:
        return one, other
    both = frozenset(one.stairs) & frozenset(other.stairs)

    def settled(trace: Trace) -> Trace:
        kept = tuple(row for row in trace.stairs if row in both)
        own = replace(trace, stairs=tuple(row for row in trace.stairs if row not in both))
        return replace(trace, sizes=own.taken(trace.sizes), stairs=kept)

    return settled(one), settled(other)


def compare_structure(one: Trace, other: Trace, *, stairs: bool = True) -> None:
    """Check that two traces make the same allocations in the same order, with the same deaths in between.

    The order of deaths between two births is free: autocast empties its cache in the order of a hash.

    Args:
        one, other: the traces.
        stairs: whether what rises in steps must do so in the same steps.

    Raises:
        NotAffine: the first difference.
    """
    if len(one.sizes) != len(other.sizes):
        raise NotAffine(f"{len(one.sizes)} allocations against {len(other.sizes)}")
    for k, (a, b) in enumerate(zip(one.operators, other.operators)):
        if one.names[a] != other.names[b] or one.kinds[k] != other.kinds[k]:
            raise NotAffine(
                f"allocation {k} is {one.names[a]} in one trace and {other.names[b]} in the other"
            )
    if stairs and one.stairs != other.stairs:
        raise NotAffine("sums of other shapes share memory")
    if one.events != other.events and _ordered(one.events) != _ordered(other.events):
        raise NotAffine("storages die at other times")


def _ordered(events: tuple[int, ...]) -> list[int]:
    """`events` with each run of deaths sorted."""
    ordered: list[int] = []
    run: list[int] = []
    for event in events:
        if event < 0:
            run.append(event)
        else:
            ordered += sorted(run)
            run.clear()
            ordered.append(event)
    return ordered + sorted(run)


def _lagrange(nodes: list[int], at: int) -> tuple[list[int], int]:
    """Weights that carry values at three `nodes` to `at` along a parabola, and the divisor of their sum."""
    tops, bottoms = [], []
    for node in nodes:
        others = [other for other in nodes if other != node]
        tops.append((at - others[0]) * (at - others[1]))
        bottoms.append((node - others[0]) * (node - others[1]))
    divisor = lcm(*bottoms)
    return [top * (divisor // bottom) for top, bottom in zip(tops, bottoms)], divisor
