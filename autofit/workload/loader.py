"""The data loader of a trial as it really is: its settings, and how long the training waits for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from autofit.trials.trial import LOADER_KNOBS
from autofit.workload.data.library import is_a

DEFAULT_PREFETCH = 2  #: torch's own, per worker


class LoaderWatch:
    """Times `get_batch_samples`: the loader alone, without the loop around it. Sees how large the batches are that it gives.

    Args:
        trainer: whose batches are waited for.
        rows: of the user's own training data, before it was repeated; None when unknown.
        user_data: whether data or collator are the user's.
    """

    def __init__(self, trainer: Trainer, *, rows: int | None, user_data: bool) -> None:
        self._args, self._rows, self._user_data = trainer.args, rows, user_data
        self._first: float | None = None
        self._ahead = fetched_ahead(trainer.args)
        self._batches = 0
        self._seconds = 0.0
        self._given: int | None = None
        self._repeats = False
        self._sizes: set[int] = set()
        fetch, make = trainer.get_batch_samples, trainer.get_train_dataloader

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = fetch(*args, **kwargs)
            self._note(time.perf_counter() - begin, len(found[0]))
            self._sizes.update(*map(first_dimensions, found[0]))
            return found

        def noted(*args: Any, **kwargs: Any) -> Any:
            loader = make(*args, **kwargs)
            self._given = batch_size_of(loader)
            self._repeats = repeats_in_workers(loader)
            return loader

        trainer.get_train_dataloader = noted  # type: ignore[method-assign]

        trainer.get_batch_samples = timed  # type: ignore[method-assign]

    def _note(self, seconds: float, batches: int) -> None:
        if self._first is None:
            self._first = seconds  # workers start in it
        elif self._ahead > 0:
            self._ahead -= batches  # was fetched while the first steps ran
        else:
            self._batches += batches
            self._seconds += seconds

    def facts(self) -> dict[str, Any]:
        """Under `loader`: settings as the Trainer has them; `wait_seconds` per batch (mean), `first_seconds` of the first fetch, `rows`, `user_data`,
        and `repeats`: whether several workers may give every row several times."""
        settings = {name: getattr(self._args, name, None) for name in LOADER_KNOBS}
        loader = {
            **settings,
            "wait_seconds": self._seconds / self._batches if self._batches else None,
            "first_seconds": self._first,
            "rows": self._rows,
            "user_data": self._user_data,
            "repeats": self._repeats,
        }
        return {"loader": loader}

    def batch_size(self) -> tuple[int, int]:
        """(asked, seen) samples per batch: a loader of the user's own may give others than `args` say.

        Other than asked is seen only where both the loader says so and no tensor of any batch has that many rows: packed samples are one row,
        and pairs of answers two each.
        """
        asked = int(self._args.train_batch_size)
        other = self._given not in (None, asked) and bool(self._sizes) and asked not in self._sizes
        return asked, self._given if other and self._given is not None else asked


def batch_size_of(loader: Any) -> int | None:
    """Samples per batch, as a loader or its batch sampler says; None where neither does."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def repeats_in_workers(loader: Any) -> bool:
    """Whether each worker may give the whole dataset: a stream does, unless it divides itself among workers, as those of the datasets library do and
    as one has to that already has several. That of any other cannot be seen from outside, and is not risked."""
    dataset = getattr(loader, "dataset", None)
    stream = isinstance(dataset, torch.utils.data.IterableDataset) and not is_a(dataset, "IterableDataset")
    return stream and not getattr(loader, "num_workers", 0)


def first_dimensions(batch: Any) -> set[int]:
    """Rows of each tensor of a batch."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
    return {int(value.shape[0]) for value in values if isinstance(value, torch.Tensor) and value.ndim}


def fetched_ahead(args: Any) -> int:
    """Batches that workers have ready before they are asked for; 0 without workers."""
    return int(args.dataloader_num_workers) * int(args.dataloader_prefetch_factor or DEFAULT_PREFETCH)


