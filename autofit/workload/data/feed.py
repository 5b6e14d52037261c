"""How batches reach a Trainer in a trial: first the largest batch that its sampler can draw, then its own batches, in an order that stands for an epoch.

Nothing of the user's is replaced: dataset, collator, column removal, workers and sampler are the Trainer's own. Three methods of the instance are
wrapped:

- `get_batch_samples`: while the clock is in its prelude, each micro-step gets the longest rows through the loader's own dataset and collator, so
  that memory is measured where an epoch is worst, with optimizer state and gradients present.
- `_get_train_sampler`: the sampler's epochs follow each other without end and without a partial batch, and the batches of an epoch (of several where
  it has few) come in `lengths.spread_order`: a short window then has the mean of the whole.
- `get_train_dataloader`: only to know the loader.

Not covered: streams (no row can be chosen), and loaders of a user's own making that are no DataLoader over the training dataset: those are measured as
they come, and the record says that no longest batch was shown.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from accelerate.utils import send_to_device
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autofit.problem.config import TrialConfig
from autofit.trials.lengths import Floats, Ints, Lengths, spread_order
from autofit.trials.uneven import BatchSizes
from autofit.workload.clock import StepClock, Window
from autofit.workload.data.scan import LENGTH, PADDED, is_map_style, lengths_of
from autofit.workload.token_count import BatchCount, padding_share

LEAST_MICRO_STEPS, AIMED_MICRO_STEPS = 8, 24  #: of uneven batches: pairs that mirror each other
LONGER_WINDOW = 3.0  #: times the window of even batches, unless enough micro-steps are there before
LEAST_BATCHES, MOST_BATCHES = 4_096, 16_384  #: that are put in order at a time: of several epochs where one has few, so that their mean is not one epoch's luck
MOST_ROWS = 1 << 17  #: that are drawn to have that many, beside the least
STEPS_OF_DATA = 512  #: optimizer steps that a loader holds before it starts over


@dataclass
class Sizes:
    """The size of each batch that was given out in turn, and the means over all that were drawn."""

    given: list[float] = field(default_factory=list)
    mean: float | None = None
    mean_square: float | None = None

    def drawn(self, sizes: Floats, order: Ints) -> None:
        """Note batches that are given out in `order`."""
        self.given += sizes[order].tolist()
        self.mean, self.mean_square = float(sizes.mean()), float((sizes**2).mean())

    def share_of(self, numbers: Sequence[int]) -> float:
        """The mean batch of an epoch in those of the batches `numbers`."""
        seen = sum(self.given[number] for number in numbers)
        return 1.0 if self.mean is None or not seen else self.mean * len(numbers) / seen


@dataclass
class Plan:
    """What the sampler gave out, in elements with the padding to the longest row and without: with the targets, which take time too, and without
    them, as tokens are counted."""

    padded: Sizes = field(default_factory=Sizes)
    flat: Sizes = field(default_factory=Sizes)
    padded_inputs: Sizes = field(default_factory=Sizes)
    flat_inputs: Sizes = field(default_factory=Sizes)

    def drawn(self, lengths: Lengths, batches: Ints) -> Ints | None:
        """Note (m, b) row indices and return the order in which they are to be given out; None where their sizes are not known."""
        padded = lengths.batch_sizes(batches)
        if padded is None:
            return None
        order, inputs = spread_order(padded), replace(lengths, targets=np.zeros_like(lengths.targets))
        for sizes, known, is_padded in (
            (self.padded, lengths, True), (self.flat, lengths, False), (self.padded_inputs, inputs, True), (self.flat_inputs, inputs, False)
        ):  # fmt: skip
            found = known.batch_sizes(batches, padded=is_padded)
            assert found is not None
            sizes.drawn(found, order)
        return order


class EndlessBatches(Sampler[int]):
    """Epoch after epoch of a sampler, cut into full batches.

    Args:
        inner: the Trainer's own sampler.
        batch: rows per batch.
        length: `len` of this one, at least one batch.
        lengths: of the dataset's rows; None = batches stay in the sampler's order.
        plan: is told what was given out.
    """

    def __init__(self, inner: Sampler[int], *, batch: int, length: int, lengths: Lengths | None, plan: Plan) -> None:
        self._inner, self._batch, self._length = inner, batch, length
        self._lengths, self._plan = lengths, plan

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return itertools.islice((int(row) for batch in self._batches() for row in batch), self._length)

    def _batches(self) -> Iterator[Ints]:
        while True:
            rows = np.fromiter(itertools.islice(self._endless(), self._chunk() * self._batch), dtype=np.int64)
            batches = rows.reshape(-1, self._batch)
            order = None if self._lengths is None else self._plan.drawn(self._lengths, batches)
            yield from batches if order is None else batches[order]

    def _chunk(self) -> int:
        """Full batches of one epoch; where it has few, of several."""
        own = max(1, len(self._inner) // self._batch)  # type: ignore[arg-type]
        least = max(64, min(LEAST_BATCHES, MOST_ROWS // self._batch))
        return min(MOST_BATCHES, -(-least // own) * own)

    def _endless(self) -> Iterator[int]:
        """Rows without end; the rows that would make a partial batch at an epoch's end are left out, as far as the epoch has a full one."""
        own = len(self._inner)  # type: ignore[arg-type]
        whole = own - own % self._batch or own
        while True:
            yield from itertools.islice(iter(self._inner), whole)


class DataFeed:
    """Feeds one Trainer; `attach` before `train`.

    Args:
        lengths: of its training rows; None = not known.
        target_accumulation: of the configuration, which a trial may shorten: samplers that group rows by their lengths look at it.
        user_data: whether the rows are somebody's: then they may differ where their lengths are not known.
    """

    def __init__(self, lengths: Lengths | None, *, target_accumulation: int, user_data: bool = True) -> None:
        self.lengths, self._target = lengths, target_accumulation
        self.may_differ = user_data and (lengths is None or lengths.uneven)
        self._loader: Any = None
        self._in_prelude: Callable[[], bool] = lambda: False
        self.plan = Plan()
        self.shown = 0
        self.taken = 0  # of the loader's batches, before the measured ones
        self.last_shown: list[tuple[int, ...]] = []  # the batches of the prelude's last step
        self._longest: tuple[tuple[int, ...], ...] = ()

    @property
    def uneven(self) -> bool:
        """Whether batches differ in size."""
        return self.lengths is not None and self.lengths.uneven

    def attach(self, trainer: Trainer, in_prelude: Callable[[], bool]) -> None:
        """Wrap the instance's methods.

        Args:
            in_prelude: whether the next optimizer step is to see the longest batch.
        """
        if not is_map_style(trainer.train_dataset):
            return
        self._in_prelude = in_prelude
        self._wrap_sampler(trainer)
        if self.uneven:
            self._wrap_loader(trainer)
            self._wrap_batches(trainer)

    def _wrap_sampler(self, trainer: Trainer) -> None:
        make, batch = trainer._get_train_sampler, trainer.args.train_batch_size
        length = batch * trainer.args.gradient_accumulation_steps * STEPS_OF_DATA

        def endless(*args: Any, **kwargs: Any) -> Any:
            own, trainer.args.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps, self._target
            try:
                sampler = make(*args, **kwargs)
            finally:
                trainer.args.gradient_accumulation_steps = own
            if sampler is None or isinstance(sampler, BatchRebalanceSampler) or not hasattr(sampler, "__len__") or not len(sampler):
                return sampler
            full = max(length, len(sampler) - len(sampler) % batch)
            return EndlessBatches(sampler, batch=batch, length=full, lengths=self.lengths if self.uneven else None, plan=self.plan)

        trainer._get_train_sampler = endless  # type: ignore[method-assign]

    def _wrap_loader(self, trainer: Trainer) -> None:
        make = trainer.get_train_dataloader

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._loader = make(*args, **kwargs)
            return self._loader

        trainer.get_train_dataloader = noted  # type: ignore[method-assign]

    def _wrap_batches(self, trainer: Trainer) -> None:
        fetch = trainer.get_batch_samples
        unwatched = functools.partial(type(trainer).get_batch_samples, trainer)  # the time of the prelude's fetch is nobody's

        def longest_first(epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
            if not self._in_prelude():
                return fetch(epoch_iterator, num_batches, *args, **kwargs)
            if not self._usable(trainer):
                found = fetch(epoch_iterator, num_batches, *args, **kwargs)
                self.taken += len(found[0])
                return found
            self.shown += 1
            longest = self._longest_batches(trainer)
            self.last_shown = [longest[(self.shown + number) % len(longest)] for number in range(num_batches)]
            return unwatched((self._batch(trainer, rows) for rows in self.last_shown), num_batches, *args, **kwargs)

        trainer.get_batch_samples = longest_first  # type: ignore[method-assign]

    def _usable(self, trainer: Trainer) -> bool:
        """Whether the loader reads the rows whose lengths are known."""
        dataset: Any = getattr(self._loader, "dataset", None)
        known = 0 if self.lengths is None else self.lengths.total
        return callable(getattr(self._loader, "collate_fn", None)) and is_map_style(dataset) and len(dataset) == known

    def prelude_steps(self, trainer: Trainer) -> int:
        """Optimizer steps of the prelude: one in which optimizer state appears, and those that see every longest batch beside it."""
        if not self.uneven:
            return 0
        return 1 + -(-len(self._longest_batches(trainer)) // trainer.args.gradient_accumulation_steps)

    def _longest_batches(self, trainer: Trainer) -> tuple[tuple[int, ...], ...]:
        assert self.lengths is not None
        size = trainer.args.train_batch_size
        if not self._longest or len(self._longest[0]) != size:
            self._longest = self.lengths.longest_batches(size)
        return self._longest

    def _batch(self, trainer: Trainer, rows: tuple[int, ...]) -> Any:
        dataset = self._loader.dataset
        together = getattr(dataset, "__getitems__", None)
        samples = together(list(rows)) if callable(together) else [dataset[row] for row in rows]
        return send_to_device(self._loader.collate_fn(samples), trainer.args.device)


def feed_of(trainer: Trainer, config: TrialConfig, *, user_data: bool) -> DataFeed:
    """The feed for a Trainer's training data; synthetic data is even and needs no look.

    Raises:
        UserError: the dataset is empty, or raises when a row is read.
    """
    column = str(getattr(trainer.args, "length_column_name", LENGTH))
    lengths = lengths_of(trainer.train_dataset, length_column=column) if user_data else None
    return DataFeed(lengths, target_accumulation=config.gradient_accumulation_steps, user_data=user_data)


def uneven_window(window: Window) -> Window:
    """The window for batches that differ: a mean needs more of them than a median of equal ones."""
    return replace(
        window, seconds=LONGER_WINDOW * window.seconds, min_micro_steps=AIMED_MICRO_STEPS, least_micro_steps=LEAST_MICRO_STEPS
    )


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


def rows_of(trainer: Trainer) -> int | None:
    """Rows of the training data; None for a stream."""
    dataset: Any = trainer.train_dataset
    return len(dataset) if is_map_style(dataset) else None
