"""How batches reach a Trainer in a trial: first the largest batch that its sampler can draw, then its own batches, in an order that stands for an epoch.

Nothing of the user's is replaced: dataset, collator, column removal, workers and sampler are the Trainer's own. Three methods of the instance are
wrapped:

- `get_batch_samples`: while the clock is in its prelude, each micro-step gets the longest rows through the loader's own dataset and collator, so
  that memory is measured where an epoch is worst, with optimizer state and gradients present.
- `_get_train_sampler`: the sampler's epochs follow each other without end and without a partial batch, and the batches of an epoch (of several where
  it has few) come in `lengths.spread_order`: a short window then has the mean of the whole (see `order`).
- `get_train_dataloader`: only to know the loader.

Not covered: streams (no row can be chosen), and loaders of a user's own making that are no DataLoader over the training dataset: those are measured as
they come, and the record says that no longest batch was shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autofit.problem.config import TrialConfig
from autofit.trials.lengths import Lengths
from autofit.workload.clock import Window
from autofit.workload.data.order import EndlessBatches, Plan
from autofit.workload.data.scan import LENGTH, is_map_style, lengths_of

LEAST_MICRO_STEPS, AIMED_MICRO_STEPS = 8, 24  #: of uneven batches: pairs that mirror each other
LONGER_WINDOW = 3.0  #: times the window of even batches, unless enough micro-steps are there before
STEPS_OF_DATA = 512  #: optimizer steps that a loader holds before it starts over


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


def rows_of(trainer: Trainer) -> int | None:
    """Rows of the training data; None for a stream."""
    dataset: Any = trainer.train_dataset
    return len(dataset) if is_map_style(dataset) else None
