"""The data loader of a trial as it really is: its settings, and how long the training waits for it."""

from __future__ import annotations

import time
from typing import Any

from transformers import Trainer

from autofit.trial import LOADER_KNOBS

DEFAULT_PREFETCH = 2  #: torch's own, per worker


class LoaderWatch:
    """Times `get_batch_samples`: the loader alone, without the loop around it.

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
        fetch = trainer.get_batch_samples

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = fetch(*args, **kwargs)
            self._note(time.perf_counter() - begin, len(found[0]))
            return found

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
        """Under `loader`: settings as the Trainer has them; `wait_seconds` per batch (mean), `first_seconds` of the first fetch, `rows`, `user_data`."""
        settings = {name: getattr(self._args, name, None) for name in LOADER_KNOBS}
        loader = {
            **settings,
            "wait_seconds": self._seconds / self._batches if self._batches else None,
            "first_seconds": self._first,
            "rows": self._rows,
            "user_data": self._user_data,
        }
        return {"loader": loader}


def fetched_ahead(args: Any) -> int:
    """Batches that workers have ready before they are asked for; 0 without workers."""
    return int(args.dataloader_num_workers) * int(args.dataloader_prefetch_factor or DEFAULT_PREFETCH)


