"""What the runs of each configuration say together. A function of the records alone, so that anyone can compute it again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofit.problem.config import Precision, TrialConfig
from autofit.trials.measurement import UNKNOWN, Interval, Memory, pooled_interval
from autofit.trials.soundness import departed
from autofit.trials.trial import Outcome, Role, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is known of one configuration after all its runs.

    Attributes:
        config: the configuration.
        samples_per_second: mean over the runs that count (the play-off's, where it took part, else all).
        interval: 95 %; over runs where there are several, within the run where there is one.
        runs: how many runs it rests on.
        memory: the largest counters over all its runs.
        tokens_per_second: non-padding tokens; None where tokens make no sense.
    """

    config: TrialConfig
    samples_per_second: float
    interval: Interval
    runs: int
    memory: Memory
    tokens_per_second: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON for the result file."""
        return {
            "config": self.config.to_json(),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "interval": asdict(self.interval),
            "runs": self.runs,
            "memory": asdict(self.memory),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Estimate:
        """Inverse of `to_json`; unknown keys are ignored.

        Raises:
            ValueError: a speed that no run can have, or an interval with its ends exchanged.
        """
        found = cls(
            config=TrialConfig.from_json(data["config"]),
            samples_per_second=data["samples_per_second"],
            tokens_per_second=data["tokens_per_second"],
            interval=Interval(**data["interval"]),
            runs=data["runs"],
            memory=Memory(**data["memory"]),
        )
        for name in ("samples_per_second", "tokens_per_second", "runs"):
            value = getattr(found, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} of {found.config.label()} is {value!r}")
        if not 0 <= found.interval.low <= found.interval.high:
            raise ValueError(f"the interval of {found.config.label()} is from {found.interval.low!r} to {found.interval.high!r}")
        return found


def estimate_of(records: Sequence[TrialRecord]) -> Estimate | None:
    """What the runs of ONE configuration say together; None when it is infeasible or never completed.

    A configuration that was out of memory or unsound in any run is infeasible, whatever its other runs said.
    """
    if any(r.outcome is Outcome.INFEASIBLE for r in records):
        return None
    completed = [r for r in records if r.outcome is Outcome.COMPLETED]
    if not completed:
        return None
    counted = counted_of(completed)
    speeds = [speed for r in counted if (speed := r.samples_per_second) is not None]
    mean = math.fsum(speeds) / len(speeds)
    tokens = next(
        (
            r.measurement.tokens_per_sample
            for r in counted
            if r.measurement and r.measurement.tokens_per_sample
        ),
        None,
    )
    return Estimate(
        config=completed[0].config,
        samples_per_second=mean,
        tokens_per_second=None if tokens is None else tokens * mean,
        interval=_interval(counted, speeds),
        runs=len(speeds),
        memory=_largest([r.measurement.memory for r in completed if r.measurement]),
    )


def counted_of(completed: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Of the completed runs of one configuration those that its speed rests on: the play-off's, where it took part, else all but its confirmation."""
    return (
        [r for r in completed if r.role is Role.PLAYOFF]
        or [r for r in completed if r.role is not Role.CONFIRMATION]
        or completed
    )


def _interval(records: Sequence[TrialRecord], speeds: Sequence[float]) -> Interval:
    """Of the mean over runs where there are three or more; else the hull of the runs and of their own intervals (a t interval over
    two runs says little, and is taken where neither run shows its own spread)."""
    if len(speeds) >= 3:
        return pooled_interval(speeds)
    within = [i for r in records if (i := r.interval) is not None and i.known]
    if not within:
        return pooled_interval(speeds) if len(speeds) > 1 else UNKNOWN
    return Interval(
        low=min([*speeds, *(i.low for i in within)]), high=max([*speeds, *(i.high for i in within)])
    )


def _largest(memories: Sequence[Memory]) -> Memory:
    def most(name: str) -> int | None:
        values = [v for m in memories if (v := getattr(m, name)) is not None]
        return max(values) if values else None

    names = (
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "context_bytes",
        "device_used_bytes",
        "host_peak_bytes",
    )
    return Memory(
        **{name: most(name) for name in names}, alloc_retries=max(m.alloc_retries for m in memories)
    )  # type: ignore[arg-type]


def by_config(records: Sequence[TrialRecord]) -> dict[str, list[TrialRecord]]:
    """Records grouped by configuration, in order of trial number."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda r: r.number):
        groups.setdefault(record.config.key(), []).append(record)
    return groups


def estimates(records: Sequence[TrialRecord]) -> dict[str, Estimate]:
    """Configuration key -> estimate, feasible ones only: none in a precision that was found to depart from fp32."""
    unsound = departed(records)
    sound = [r for r in records if r.config.precision not in unsound]
    found = {key: estimate_of(group) for key, group in by_config(sound).items()}
    return {key: estimate for key, estimate in found.items() if estimate is not None}


def recast(records: Sequence[TrialRecord], weights_dtype: str | None) -> dict[Precision, str]:
    """Precision -> dtype in which the user's code stored the weights in its trials, where that is 16 bit and only `pure_bf16` asks for it.

    Args:
        records: all trials.
        weights_dtype: of the model as it was described, in fp32.
    """
    if weights_dtype != "float32":
        return {}
    seen = [(r.config.precision, (r.measurement.facts or {}).get("weight_dtype")) for r in records if r.measurement]
    return {p: str(dtype) for p, dtype in seen if dtype in ("bfloat16", "float16") and p is not Precision.PURE_BF16}


def break_even_hours(search_seconds: float, speedup: float | None) -> float | None:
    """Hours of training with the answer after which it has paid for the search.

    Training for T seconds at `speedup` does the work of `speedup * T` seconds at the baseline, so it pays at T = search / (speedup - 1).
    """
    if speedup is None or speedup <= 1:
        return None
    return search_seconds / (speedup - 1) / 3600
