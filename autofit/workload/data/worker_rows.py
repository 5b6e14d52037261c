"""Whether the processes of a data loader read the rows that the training process would read.

They are forked from it. An open file has one position for all of them, so that rows are cut together from several places, and a stream that does not share
out its rows gives each process all of them. Both are fast and raise nothing, and the training is another one.

Rows are compared by digest, each read with a random state of its own. Not covered: datasets that draw from generators of their own (they read other rows
twice in one process), what no digest sees in a row, streams whose processes shuffle the same rows far apart, and collators.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from transformers import set_seed

from autofit.errors import UserError
from autofit.workload.data.scan import is_map_style

ROWS = 32  #: per process that are compared, at most
SECONDS = 1.0  #: in which they are read
REPEATED = 0.1  #: of a stream's rows that two processes may both read: rows that are there twice


def refuse_other_rows(dataset: Any, workers: int) -> None:
    """Read some rows in this process and in `workers` others.

    Raises:
        UserError: they are not the same, or those of a stream come several times.
    """
    if is_map_style(dataset):
        _refuse_torn(Digests(dataset), workers)
    elif workers > 1:
        _refuse_repeated(dataset, workers)


class Digests(Dataset[str]):
    """The digest of each row."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        set_seed(index)
        return row_digest(self._rows[index])


def _refuse_torn(digests: Digests, workers: int) -> None:
    wanted = min(len(digests), ROWS * workers)
    picked = [i * len(digests) // wanted for i in range(wanted)]
    here = list(_until(time.monotonic() + SECONDS, (digests[i] for i in picked)))
    picked = picked[: len(here)]
    if here != [digests[i] for i in picked]:
        return  # nothing to compare with
    there = list(DataLoader(digests, batch_size=None, sampler=picked, num_workers=workers))
    differing = sum(a != b for a, b in zip(here, there, strict=True))
    if differing:
        raise UserError(
            f"{differing} of {len(here)} rows are others when they are read in {workers} processes",
            hint="a file or a connection that is opened before the processes start is one for all of them: open it at the first read",
        )


def _refuse_repeated(stream: Any, workers: int) -> None:
    read: dict[int, set[str]] = defaultdict(set)
    loader = DataLoader(stream, batch_size=1, num_workers=workers, collate_fn=_signed)
    for worker, digest in _until(time.monotonic() + SECONDS * 2, itertools.islice(loader, ROWS * workers)):
        read[worker].add(digest)
    for one, other in itertools.combinations(read.values(), 2):
        # Rows that are all alike say nothing.
        if min(len(one), len(other)) > 1 and len(one & other) > REPEATED * min(len(one), len(other)):
            raise UserError(
                f"each of {workers} processes reads the same rows of the stream, which are trained on {workers} times",
                hint="share them out by torch.utils.data.get_worker_info() where the stream is read",
            )


def _signed(rows: list[Any]) -> tuple[int, str]:
    worker = get_worker_info()
    return (0 if worker is None else worker.id), row_digest(rows[0])


def _until(end: float, values: Iterator[Any]) -> Iterator[Any]:
    """Values until the time is over, at least two."""
    for number, value in enumerate(values, start=1):
        yield value
        if number > 1 and time.monotonic() > end:
            return


def row_digest(row: Any) -> str:
    """Of what is in tensors, arrays, images, texts and numbers, nested or not; of anything else, its type."""
    found = hashlib.sha256()
    for part in _parts(row):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name).encode()
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
    elif callable(getattr(value, "tobytes", None)):  # PIL
        yield value.tobytes()
