"""What the batches of a trial were: their sizes beside those of an epoch, tokens, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autofit.trials.uneven import BatchSizes
from autofit.workload.clock import StepClock
from autofit.workload.data.feed import DataFeed
from autofit.workload.data.order import Plan
from autofit.workload.data.scan import PADDED
from autofit.workload.token_count import BatchCount, padding_share


def measured_sizes(feed: DataFeed, clock: StepClock) -> BatchSizes | None:
    """Sizes of the measured batches; None for batches that are alike.

    They are the plan's where the sampler's batches were followed, else what the model really got (then those of an epoch are not known).
    """
    numbers, seen = _followed(feed, clock), tuple(float(count.padded) for count in clock.counts)
    count = len(clock.samples.batch)
    counted = seen if len(seen) == count else (1.0,) * count
    if not feed.uneven or feed.lengths is None:
        return BatchSizes(measured=counted) if len(set(counted)) > 1 else None
    if numbers is None:
        return BatchSizes(measured=counted)
    padded = _pads(feed.plan, numbers, seen)
    plan = feed.plan.padded if padded else feed.plan.flat
    shown = feed.lengths.batch_sizes(np.array(feed.last_shown), padded=padded) if feed.shown else None
    longest = None if shown is None else float(shown.max())
    return BatchSizes(
        measured=tuple(plan.given[number] for number in numbers),
        mean=plan.mean,
        mean_square=plan.mean_square,
        longest=longest,
        longest_seconds=() if shown is None else tuple(t for t, size in zip(clock.prelude_seconds, shown) if size == longest),
    )


def _followed(feed: DataFeed, clock: StepClock) -> list[int] | None:
    """The measured batches by their number in the plan; None where the loader did not follow it."""
    numbers = [number + feed.taken for number in clock.samples.batch]
    return numbers if numbers and numbers[-1] < len(feed.plan.padded.given) else None


def _pads(plan: Plan, numbers: Sequence[int], seen: Sequence[float]) -> bool:
    """Whether the collator pads to the longest row: its batches are as large as that makes them, and not as small as without padding."""
    padded, flat = (sum(sizes.given[number] for number in numbers) for sizes in (plan.padded_inputs, plan.flat_inputs))
    return len(seen) != len(numbers) or abs(sum(seen) - padded) <= abs(sum(seen) - flat)


def epoch_counts(feed: DataFeed, clock: StepClock) -> list[BatchCount]:
    """The measured batches' counts, their tokens brought to those of an epoch, because few batches are off by luck; as they are where it is not known
    which rows they were, or where the collator cuts the longest."""
    numbers, longest = _followed(feed, clock), max((count.length for count in clock.prelude_counts), default=0)
    whole = feed.lengths is not None and feed.lengths.unit in PADDED and feed.shown and longest >= feed.lengths.inputs.max()
    if not whole or numbers is None or len(numbers) != len(clock.counts):
        return clock.counts
    pads = _pads(feed.plan, numbers, [float(count.padded) for count in clock.counts])
    real = feed.plan.flat_inputs.share_of(numbers)
    padded = feed.plan.padded_inputs.share_of(numbers) if pads else real
    return [replace(count, padded=count.padded * padded, real=count.real * real) for count in clock.counts]


def data_facts(feed: DataFeed, clock: StepClock) -> dict[str, Any]:
    """Under `data`: the lengths of the rows, what the prelude really showed to the model, and the padding of an epoch's batches."""
    if feed.lengths is None:
        return {}
    facts: dict[str, Any] = {"lengths": feed.lengths.summary().to_json(), "uneven": feed.uneven}
    if feed.uneven:
        facts["prelude_steps"] = feed.shown
        facts["prelude_longest"] = max((count.length for count in clock.prelude_counts), default=None)
        facts["measured_longest"] = max((count.length for count in clock.counts), default=None)
    facts["padding_share"] = padding_share(epoch_counts(feed, clock))
    return {"data": facts}
