"""What a trial measured, and the statistics that are computed from it.

The child returns raw samples; everything here is computed in the parent and can be computed again from the record.

Throughput at accumulation `a` of an effective batch `B` on one device follows from three times that do not depend on `a`:

    samples_per_second = B / (a * (t_micro + t_fetch) + t_update)

with `t_micro` one `training_step` (forward + backward of one per-device batch), `t_fetch` the loader's and the
loop's share per micro-step, and `t_update` clip + optimizer step + scheduler + zero_grad. Under data parallelism the last
micro-step also reduces gradients; one process is what is modelled here.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from autofit.errors import UserError
from autofit.kinds import LARGEST
from autofit.trials.spread import PartError, log_half, part_error
from autofit.trials.spread import t_quantile as t_quantile
from autofit.trials.uneven import BatchSizes, at_mean_batch, mean_batch_error

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-12, 1e12  #: beyond these no clock has counted, and speeds overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory counters of one trial, in bytes; None where the device has no such counter.

    Attributes:
        peak_allocated_bytes: CUDA: most bytes in live tensors (`max_memory_allocated`). CPU: peak resident set of the
            process less what it had before the model was built.
        peak_reserved_bytes: CUDA: most bytes held by the caching allocator (`max_memory_reserved`). CPU: peak address
            space less what it had before; this is what the limit is enforced on.
        context_bytes: what the device loses before the first tensor (CUDA context, libraries). CPU: 0.
        device_used_bytes: CUDA: the device's used memory as NVML sees it at the end. CPU: peak resident set.
        host_peak_bytes: peak resident set of the process.
        alloc_retries: times the allocator had to free its cache and try again; growth after warm-up is thrash.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    context_bytes: int | None = None
    device_used_bytes: int | None = None
    host_peak_bytes: int | None = None
    alloc_retries: int = 0

    @property
    def needed_bytes(self) -> int | None:
        """What the run takes from the device: context + peak reserved; None when unknown."""
        if self.peak_reserved_bytes is None:
            return None
        return self.peak_reserved_bytes + (self.context_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % interval, in the unit of the estimate it belongs to."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether it says anything: one sample shows no spread, and its interval holds every speed (see `UNKNOWN`)."""
        return self.high < UNKNOWN.high

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


UNKNOWN = Interval(low=0.0, high=LARGEST)  #: of one sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Raw samples of one completed trial.

    Attributes:
        micro_step_seconds: one per measured micro-step, synchronised at the edges, first optimizer step dropped.
        fetch_seconds: one per measured optimizer step: loader and loop time per micro-step.
        update_seconds: one per measured optimizer step.
        memory: counters over the whole trial, warm-up included.
        optimizer_steps: completed optimizer steps, warm-up included.
        skipped_steps: optimizer steps skipped by the gradient scaler (fp16 overflow).
        losses: training loss per optimizer step, in order; may hold non-finite values.
        tokens_per_sample: mean non-padding tokens per sample, of uneven batches an epoch's; None where tokens make no sense.
        sizes: of the batches, where rows differ in length; None where batches are alike.
        facts: what the child saw of each knob (checkpointing active, optimizer class, ...), clocks, pressure.
    """

    micro_step_seconds: tuple[float, ...]
    fetch_seconds: tuple[float, ...] = ()
    update_seconds: tuple[float, ...] = ()
    memory: Memory = Memory()
    optimizer_steps: int = 0
    skipped_steps: int = 0
    losses: tuple[float, ...] = ()
    tokens_per_sample: float | None = None
    sizes: BatchSizes | None = None
    facts: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("micro_step_seconds", "fetch_seconds", "update_seconds"):
            values = tuple(float(v) for v in getattr(self, name))
            if any(not 0 <= v <= LONGEST_SECONDS for v in values):
                raise UserError(f"{name} must be finite and not negative")
            object.__setattr__(self, name, values)
        if not self.micro_step_seconds:
            raise UserError("a measurement needs at least one micro_step_seconds")
        if min(self.micro_step_seconds) < SHORTEST_SECONDS:
            raise UserError("micro_step_seconds must be positive")
        object.__setattr__(self, "losses", tuple(self.losses))

    @property
    def uneven(self) -> bool:
        """Whether batches differ in size, so that means count and not medians (see `uneven`)."""
        return self.sizes is not None

    @property
    def typical_micro_seconds(self) -> tuple[float, ...]:
        """`micro_step_seconds`; of uneven batches, as an epoch's mean batch would have taken."""
        return self.micro_step_seconds if self.sizes is None else at_mean_batch(self.micro_step_seconds, self.sizes)

    @property
    def t_micro(self) -> float:
        """Seconds of one micro-step: the median, of uneven batches the mean of an epoch's."""
        return _middle(self.typical_micro_seconds, mean=self.uneven)

    @property
    def t_fetch(self) -> float:
        """Seconds of loader and loop per micro-step: the median, or where loader workers fetch ahead the mean (see `fetch_blocks`)."""
        blocks = self.fetch_blocks
        if not blocks:
            return 0.0
        return _middle(blocks, mean=self.mean_fetch)

    @property
    def mean_fetch(self) -> bool:
        """Whether `fetch_blocks` count by their mean."""
        return self.loader_workers > 0 or self.uneven

    @property
    def loader_workers(self) -> int:
        """Processes that fetched data ahead, as the child saw it."""
        loader = (self.facts or {}).get("loader") or {}
        return int(loader.get("dataloader_num_workers") or 0)

    @property
    def fetch_blocks(self) -> tuple[float, ...]:
        """`fetch_seconds`, averaged over runs as long as there are workers: their batches come in bursts, of which a median sees the short waits only."""
        size = max(1, min(self.loader_workers, len(self.fetch_seconds)))
        whole = len(self.fetch_seconds) - len(self.fetch_seconds) % size
        chunks = (self.fetch_seconds[i : i + size] for i in range(0, whole, size))
        return tuple(statistics.fmean(chunk) for chunk in chunks)

    @property
    def t_update(self) -> float:
        """Seconds of one optimizer update: the median, beside uneven batches the mean."""
        return _middle(self.update_seconds, mean=self.uneven) if self.update_seconds else 0.0

    def samples_per_second(
        self, *, per_device_train_batch_size: int, gradient_accumulation_steps: int
    ) -> float:
        """Throughput of one device by the formula of this module."""
        return throughput(
            per_device_train_batch_size,
            gradient_accumulation_steps,
            self.t_micro,
            self.t_fetch,
            self.t_update,
        )

    def interval(self, *, per_device_train_batch_size: int, gradient_accumulation_steps: int) -> Interval:
        """95 % interval of `samples_per_second` from the raw samples of this one run (see `spread`); `UNKNOWN` where one sample is all there is.

        It knows jitter, not drift: two runs minutes apart can differ by more (see `pooled_interval`).
        """
        half = _log_half(self, gradient_accumulation_steps)
        if half is None:
            return UNKNOWN
        speed = self.samples_per_second(
            per_device_train_batch_size=per_device_train_batch_size, gradient_accumulation_steps=gradient_accumulation_steps
        )
        high = speed * math.exp(half)
        return Interval(low=speed * math.exp(-half), high=high) if high < UNKNOWN.high else UNKNOWN

    def parts(self, accumulation: int) -> list[tuple[float, float, Sequence[float], PartError | None]]:
        """Parts of an optimizer step as `log_half` takes them."""
        micro, blocks = self.typical_micro_seconds, self.fetch_blocks
        fitted = None if self.sizes is None else mean_batch_error(self.micro_step_seconds, self.sizes)
        error = part_error(micro, mean=self.uneven) if fitted is None else PartError(variance=fitted[0], freedom=fitted[1])
        found: list[tuple[float, float, Sequence[float], PartError | None]] = [(accumulation, self.t_micro, micro, error)]
        if blocks:
            waits = blocks if len(blocks) > 1 else self.fetch_seconds
            found.append((accumulation, self.t_fetch, waits, part_error(waits, mean=self.mean_fetch)))
        if self.update_seconds:
            found.append((1, self.t_update, self.update_seconds, part_error(self.update_seconds, mean=self.uneven)))
        return found

    def to_json(self) -> dict[str, Any]:
        """Flat JSON: the sample lists, the counters under `memory`, the rest as is."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}
        data["losses"] = [x if math.isfinite(x) else None for x in self.losses]
        data["facts"] = dict(self.facts) if self.facts is not None else None
        data["sizes"] = None if self.sizes is None else self.sizes.to_json()
        return {**data, "memory": asdict(self.memory)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Inverse of `to_json`; unknown keys are ignored, so that newer records load.

        Raises:
            UserError: missing samples or values of a wrong kind.
        """
        try:
            known = {f.name for f in fields(cls)} - {"memory"}
            kept = {k: v for k, v in data.items() if k in known and v is not None}
            kept["losses"] = tuple(math.nan if x is None else float(x) for x in data.get("losses", ()))
            if "sizes" in kept:
                kept["sizes"] = BatchSizes.from_json(kept["sizes"])
            counters = {f.name for f in fields(Memory)}
            memory = Memory(**{k: v for k, v in (data.get("memory") or {}).items() if k in counters})
            return cls(**kept, memory=memory)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"not a measurement: {error}") from None


def throughput(batch: int, accumulation: int, t_micro: float, t_fetch: float, t_update: float) -> float:
    """Samples per second of one device: `batch * a / (a * (t_micro + t_fetch) + t_update)`."""
    seconds = accumulation * (t_micro + t_fetch) + t_update
    return batch * accumulation / seconds if seconds > 0 else math.inf


def pooled_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of repeated runs (Student's t over runs), which includes drift between them.

    Args:
        values: throughput of at least two runs of one configuration.
    """
    if len(values) < 2:
        raise ValueError("pooled_interval needs at least two runs")
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(low=max(0.0, mean - half), high=mean + half)


def _middle(values: Sequence[float], *, mean: bool) -> float:
    return statistics.fmean(values) if mean else statistics.median(values)


def _log_half(measurement: Measurement, accumulation: int) -> float | None:
    """Half of the interval of a run's log speed; kept, because results ask for it again and again."""
    workers = measurement.loader_workers
    return _kept_log_half(
        measurement.micro_step_seconds, measurement.fetch_seconds, measurement.update_seconds, measurement.sizes, workers, accumulation
    )


@functools.lru_cache(maxsize=4096)
def _kept_log_half(
    micro: tuple[float, ...], fetch: tuple[float, ...], update: tuple[float, ...], sizes: BatchSizes | None, workers: int, accumulation: int
) -> float | None:
    facts = {"loader": {"dataloader_num_workers": workers}}
    alike = Measurement(micro_step_seconds=micro, fetch_seconds=fetch, update_seconds=update, sizes=sizes, facts=facts)
    return log_half(alike.parts(accumulation))
