"""Seconds of a training step from its operators' work and a card's data sheet.

Each operator takes the longer of its arithmetic at the card's peak and its traffic at the card's bandwidth; operators
follow each other. Every operand counts as a trip to memory and no efficiency is assumed, so the speed is an upper
bound that real kernels miss by a factor: on nine measured configurations of a V100 it came out 1.4 to 1.5 times too
fast in fp32 and 2.0 to 2.5 times in fp16, in nearly the right order (Kendall's tau 0.94). Use it to order trials and let
the first real trial set the level. Ignored: the input pipeline, communication, clocks, and what kernels really reach.
The host's time to launch is a floor that matters for small batches on fast cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

from autofit.errors import FileFormatError
from autofit.memory.events import Moment, Trace
from autofit.memory.law import NotAffine

VERSION = 1
LAUNCH_SECONDS = 5e-6
"""What eager PyTorch's dispatcher and driver take per kernel on a present-day host, a round figure."""
UPDATE_MOMENTS = frozenset({Moment.CLIP, Moment.UPDATE, Moment.ZERO})


class Roof(Protocol):
    """What a card's data sheet says: dense peaks in TFLOP/s (None or 0 = no such unit), bandwidth in GB/s."""

    @property
    def fp32_tflops(self) -> float: ...
    @property
    def tf32_tflops(self) -> float | None: ...
    @property
    def fp16_tflops(self) -> float | None: ...
    @property
    def bf16_tflops(self) -> float | None: ...
    @property
    def bandwidth_gbps(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one micro-step (forward and backward) and of one update (clipping, optimizer, zeroing)."""

    micro_step: float
    update: float

    def samples_per_second(self, *, batch: int, accumulation: int) -> float:
        """Throughput of one device at this batch with `accumulation` micro-steps per update."""
        return batch * accumulation / (accumulation * self.micro_step + self.update)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Work:
    """Operator calls that cost the same.

    Attributes:
        moment, operator, dtype: as in `OpCost`.
        flops, flops_rise: at the law's base batch, and what `span` samples more add.
        nbytes, nbytes_rise: bytes moved, likewise.
        kernels: kernels launched by one call.
        calls: how many such calls.
    """

    moment: Moment
    operator: str
    dtype: str
    flops: int
    flops_rise: int
    nbytes: int
    nbytes_rise: int
    kernels: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLaw:
    """The work of a micro-step and an update, each operator's affine in the batch.

    Attributes:
        base_batch: batch of the smaller trace.
        span: samples between the two traces.
        work: operator calls, alike ones together.
    """

    base_batch: int
    span: int
    work: tuple[Work, ...]

    @classmethod
    def fit(cls, low: Trace, high: Trace) -> CostLaw:
        """The law through the operators of two traces.

        Raises:
            NotAffine: the traces call other operators.
        """
        span = high.facts.batch - low.facts.batch
        if span < 1:
            raise NotAffine(f"batches {low.facts.batch} and {high.facts.batch} are not in rising order")
        if len(low.ops) != len(high.ops):
            raise NotAffine(f"{len(low.ops)} operators against {len(high.ops)}")
        calls: Counter[tuple[Any, ...]] = Counter()
        for a, b in zip(low.ops, high.ops):
            if (a.moment, a.operator, a.dtype) != (b.moment, b.operator, b.dtype):
                raise NotAffine(f"{a.operator} in one trace is {b.operator} in the other")
            rises = (b.flops - a.flops, b.nbytes - a.nbytes)
            calls[a.moment, a.operator, a.dtype, a.flops, rises[0], a.nbytes, rises[1], a.kernels] += 1
        work = tuple(_work([*key, count]) for key, count in sorted(calls.items()))
        return cls(base_batch=low.facts.batch, span=span, work=work)

    def seconds(
        self, roof: Roof, batch: int, *, tf32: bool = False, launch_seconds: float = LAUNCH_SECONDS
    ) -> StepSeconds:
        """Seconds of a micro-step and of an update at `batch`.

        Args:
            roof: the card.
            batch: samples per micro-step.
            tf32: whether fp32 matrix products run on tensor cores.
            launch_seconds: the host's time per kernel; 0 leaves the floor out.
        """
        more = (batch - self.base_batch) / self.span
        speeds, bandwidth = _peaks(roof, tf32=tf32), roof.bandwidth_gbps * 1e9
        device, launches = [0.0, 0.0], [0, 0]
        for w in self.work:
            if not w.kernels:
                continue
            part = w.moment in UPDATE_MOMENTS
            arithmetic = max(0.0, w.flops + w.flops_rise * more) / speeds.get(w.dtype, speeds["fp32"])
            traffic = max(0.0, w.nbytes + w.nbytes_rise * more) / bandwidth
            device[part] += w.calls * max(arithmetic, traffic)
            launches[part] += w.calls * w.kernels
        micro, update = (max(d, n * launch_seconds) for d, n in zip(device, launches))
        return StepSeconds(micro_step=micro, update=update)

    def flops(self, batch: int) -> float:
        """Floating-point operations of one micro-step at `batch`."""
        more = (batch - self.base_batch) / self.span
        return sum(
            w.calls * (w.flops + w.flops_rise * more) for w in self.work if w.moment not in UPDATE_MOMENTS
        )

    def to_json(self) -> dict[str, Any]:
        """All rows, as JSON."""
        rows = [list(astuple(w)) for w in self.work]
        return {"version": VERSION, "base_batch": self.base_batch, "span": self.span, "work": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostLaw:
        """Inverse of `to_json`.

        Raises:
            FileFormatError: another version, or not a cost law.
        """
        if data.get("version") != VERSION:
            raise FileFormatError(f"cost law version {data.get('version')!r} is not {VERSION}")
        try:
            work = tuple(_work([Moment(row[0]), *row[1:]]) for row in data["work"])
            if data["span"] < 1:
                raise ValueError(f"span {data['span']!r} is not positive")
            return cls(base_batch=data["base_batch"], span=data["span"], work=work)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a cost law: {error!r}") from None


def _work(row: list[Any]) -> Work:
    if len(row) != len(fields(Work)):
        raise ValueError(f"a row of {len(row)} values is no work")
    return Work(**{f.name: value for f, value in zip(fields(Work), row)})


def _peaks(roof: Roof, *, tf32: bool) -> dict[str, float]:
    """Flops per second by dtype class; a class that the card lacks runs at fp32's speed."""
    fp32 = roof.fp32_tflops * 1e12
    fast = (roof.tf32_tflops or 0) * 1e12 if tf32 else 0.0
    return {
        "fp32": fast or fp32,
        "fp16": (roof.fp16_tflops or 0) * 1e12 or fp32,
        "bf16": (roof.bf16_tflops or 0) * 1e12 or fp32,
        "int8": (roof.fp16_tflops or 0) * 1e12 or fp32,
        "fp64": fp32 / 2,
    }
