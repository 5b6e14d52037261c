"""Processes of a loader must read the rows that the training process would read, each row once."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autofit.workload.data.worker_rows import refuse_other_rows, told
from tests.refusals import refused

COUNT = 40


class Numbers(Dataset[Any]):
    """A number per row, with noise from every common generator."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(2) + index, "y": np.random.rand(), "z": [random.random(), "text"]}


class OpenFile(Dataset[Any]):
    """Reads from a file that is open when the processes start."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"".join(b"%08d" % i for i in range(COUNT)))
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(8 * index)
        time.sleep(0.002)
        return {"x": int(self._file.read(8) or -1)}


class OwnGenerator(Numbers):
    """Other rows at every read, in one process too."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._random.random()}


class Stream(IterableDataset[Any]):
    """All rows, or where it shares them out each process's own; `kinds` of them, each many times."""

    def __init__(self, *, shares: bool, kinds: int = COUNT) -> None:
        self._shares, self._kinds = shares, kinds

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None and self._shares else (0, 1)
        for index in range(first, COUNT, step):
            yield {"x": torch.tensor(index % self._kinds)}


def test_an_open_file_is_one_for_all_processes(tmp_path: Path) -> None:
    with refused("rows are others when they are read in 2 processes", hint="open it at the first read"):
        refuse_other_rows(OpenFile(tmp_path / "rows"), 2)


@pytest.mark.parametrize(
    "data", [Numbers(), OwnGenerator(), [{"x": 1}], Stream(shares=True), Stream(shares=False, kinds=1), Stream(shares=True, kinds=7), {"one": [1, 2], "other": [3, 4]}, None]
)
def test_rows_that_are_the_same_or_cannot_be_compared_are_not_refused(data: Any) -> None:
    refuse_other_rows(data, 2)


class Sums(Dataset[Any]):
    """Fractions whose rounding depends on how many threads add them up."""

    def __init__(self) -> None:
        self._values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": (self._values * (index + 1)).sin().mean().reshape(1)}


def test_rounding_by_another_number_of_threads_is_no_other_row() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        refuse_other_rows(Sums(), 2)
    finally:
        torch.set_num_threads(threads)


def test_a_stream_that_every_process_reads_from_its_beginning_is_refused() -> None:
    with refused("each of 2 processes reads the same rows of the stream", hint="get_worker_info"):
        refuse_other_rows(Stream(shares=False), 2)
    refuse_other_rows(Stream(shares=False), 1)


def test_a_stream_of_the_datasets_library_shares_its_files_out() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_dict({"x": list(range(COUNT))})
    for shards in (1, 4):
        refuse_other_rows(table.to_iterable_dataset(num_shards=shards), 2)


def test_a_row_is_told_by_all_that_is_in_it() -> None:
    rows: list[Any] = [
        1, True, 1.5, "1", None, [1], (1, 2), {"a": 1}, {"b": 1}, torch.tensor(1), torch.tensor(1.0), torch.ones(2, dtype=torch.bfloat16),
        np.int64(1), np.ones(3), np.ones((3, 1)), torch.zeros(0), torch.eye(2).to_sparse(), np.array(["a"], dtype=object),
    ]  # fmt: skip
    assert not [(a, b) for a, b in itertools.combinations(rows, 2) if told(a).like(told(b))]
    assert told({"x": torch.ones(2)}) == told({"x": torch.ones(2)})
    assert told(object()) == told(object())
    numbers = torch.linspace(-1.0, 1.0, 1000)
    assert told(numbers).like(told(numbers * (1 + 1e-6))), "rounded in another way"
    assert not told(numbers).like(told(numbers.flip(0)))
    assert not told([0.5]).like(told([0.6]))
    assert told(torch.tensor([torch.nan, 1.0])).like(told(torch.tensor([torch.nan, 1.0])))
    masked = torch.tensor([-torch.inf, -torch.inf, 1.0])
    assert told(masked).like(told(masked.clone()))
    assert not told(masked).like(told(masked + 1))
    assert told(torch.complex(numbers, numbers).conj()).like(told(torch.complex(numbers, -numbers)))


def test_features_in_lists_are_told_as_those_in_arrays() -> None:
    features = np.random.default_rng(0).random((80, 3000))
    row = told({"input_features": features.tolist()})
    assert len(row.sums) == 3 * len(features), "not three for each number"
    assert row.like(told({"input_features": (features * (1 + 1e-6)).tolist()}))
    assert not row.like(told({"input_features": features[::-1].tolist()}))


def test_texts_in_an_array_are_compared() -> None:
    first, other = (told(np.array([text, "same"], dtype=object)) for text in ("one", "other"))
    assert first != other
    assert first == told(np.array(["".join(["o", "ne"]), "same"], dtype=object))


def test_a_large_row_is_told_in_little_memory() -> None:
    row = np.ones((10, 1_000_000), dtype=np.float32)
    tracemalloc.start()
    try:
        told(row)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < row.nbytes
