"""Whether the processes of a data loader read the rows that the training process would read.

They are forked from it. An open file has one position for all of them, so that rows are cut together from several places, and a stream that does not share
out its rows gives each process all of them. Both are fast and raise nothing, and the training is another one.

Rows are compared by digest, and by sums where they hold fractions, which other numbers of threads round in other ways; each is read with a random state
of its own. Not covered: datasets that draw from generators of their own (they read other rows twice in one process), what is neither number nor text in a
row, streams whose processes shuffle the same rows far apart or that hold rows several times, and collators.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from transformers import set_seed

from autofit.errors import UserError
from autofit.workload.data.scan import is_map_style

ROWS = 32  #: per process that are compared, at most
SECONDS = 1.0  #: in which they are read
ROUNDING = 1e-2  #: of the sum of absolute values, by which sums may differ
BLOCK = 1 << 20  #: fractions that are summed at a time: a row may take most of the memory
REPEATED = 0.1  #: of a stream's rows that two processes may both read: rows that are there twice


def refuse_other_rows(dataset: Any, workers: int) -> None:
    """Read some rows in this process and in `workers` others.

    Raises:
        UserError: they are not the same, or those of a stream come several times.
    """
    if is_map_style(dataset):
        _refuse_torn(ToldRows(dataset), workers)
    elif workers > 1 and isinstance(dataset, IterableDataset):  # what else there is, only a loader of the user's own can read
        _refuse_repeated(dataset, workers)


@dataclass(frozen=True, slots=True)
class Told:
    """A row in short: a digest of all but the values of fractions, and their sums, in threes (plain, of absolute values, weighted by position)."""

    digest: str
    sums: tuple[float, ...] = ()

    def like(self, other: Told) -> bool:
        """Whether both are the same row, up to rounding."""
        if self.digest != other.digest or len(self.sums) != len(other.sums):
            return False
        sizes = (size for size in self.sums[1::3] for _ in range(3))
        return all(abs(a - b) <= ROUNDING * size for a, b, size in zip(self.sums, other.sums, sizes))


class ToldRows(Dataset[Told]):
    """Each row in short."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Told:
        set_seed(index)
        return told(self._rows[index])


def _refuse_torn(rows: ToldRows, workers: int) -> None:
    wanted = min(len(rows), ROWS * workers)
    picked = [i * len(rows) // wanted for i in range(wanted)]
    here = list(_until(time.monotonic() + SECONDS, (rows[i] for i in picked)))
    picked = picked[: len(here)]
    if not all(row.like(rows[i]) for row, i in zip(here, picked)):
        return  # nothing to compare with
    there = list(DataLoader(rows, batch_size=None, sampler=picked, num_workers=workers))
    differing = sum(not a.like(b) for a, b in zip(here, there, strict=True))
    if differing:
        raise UserError(
            f"{differing} of {len(here)} rows are others when they are read in {workers} processes",
            hint="a file or a connection that is opened before the processes start is one for all of them: open it at the first read",
        )


def _refuse_repeated(stream: Any, workers: int) -> None:
    read: dict[int, list[Told]] = defaultdict(list)
    loader = DataLoader(stream, batch_size=1, num_workers=workers, collate_fn=_signed)
    for worker, row in _until(time.monotonic() + SECONDS * 2, itertools.islice(loader, ROWS * workers)):
        read[worker].append(row)
    # Rows that come again within one process say nothing.
    distinct = [found for rows in read.values() if len(found := set(rows)) > max(1.0, (1 - REPEATED) * len(rows))]
    for one, other in itertools.combinations(distinct, 2):
        if len(one & other) > REPEATED * min(len(one), len(other)):
            raise UserError(
                f"each of {workers} processes reads the same rows of the stream, which are trained on {workers} times",
                hint="share them out by torch.utils.data.get_worker_info() where the stream is read",
            )


def _signed(rows: list[Any]) -> tuple[int, Told]:
    worker = get_worker_info()
    return (0 if worker is None else worker.id), told(rows[0])


def _until(end: float, values: Iterator[Any]) -> Iterator[Any]:
    """Values until the time is over, at least two."""
    for number, value in enumerate(values, start=1):
        yield value
        if number > 1 and time.monotonic() > end:
            return


def told(row: Any) -> Told:
    """A row in short: what is in tensors, arrays, images, texts and numbers, nested or not; of anything else, its type."""
    digest, sums = hashlib.sha256(), list[float]()
    for part in _parts(row):
        if isinstance(part, bytes):
            digest.update(part)
        else:
            flat = part.ravel()
            for begin in range(0, max(1, flat.size), BLOCK):
                values = flat[begin : begin + BLOCK].astype(np.float64)
                finite = np.isfinite(values)
                digest.update(np.packbits(finite).tobytes())
                values[~finite] = 0.0
                sums += [float(values.sum()), float(np.abs(values).sum()), float(values @ np.linspace(0.0, 1.0, values.size))]
    return Told(digest.hexdigest(), tuple(sums))


def _parts(value: Any) -> Iterator[bytes | Any]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield str(value.dtype).encode()
        yield from _parts(_array(value))
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from _parts(value.tolist())
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        yield np.asarray(value) if value.dtype.kind == "f" else value.tobytes()
    elif isinstance(value, float):
        yield np.asarray(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name).encode()
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds == {float}:  # features may be lists of 240 000
            yield from _parts(np.asarray(value))
        elif kinds <= {str, int, bool}:
            yield repr(value).encode()
        else:
            for part in value:
                yield from _parts(part)
    elif isinstance(value, str | bytes | int | None):
        yield repr(value).encode()
    elif callable(getattr(value, "tobytes", None)):  # PIL
        yield value.tobytes()


def _array(tensor: torch.Tensor) -> Any:
    """A tensor's values; None of one that numpy has no form for (sparse, nested, quantized)."""
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        return (plain.float() if plain.is_floating_point() else plain).numpy()
    except (RuntimeError, TypeError):
        return None
