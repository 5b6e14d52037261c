"""Workspaces of sums over rows: the plan of PyTorch's reductions, against what its CUDA build took for such sums (on the hollow device)."""

from __future__ import annotations

import pytest
import torch

from autofit.tracing.reductions import shared_sum, summed_rows

HOPPER, AMPERE = (9, 0), (8, 0)
TAKEN = [
    (HOPPER, 8192, 1024, 67108864, 32),
    (HOPPER, 8192, 4096, 138412032, 128),
    (HOPPER, 3000, 768, 18481152, 24),
    (HOPPER, 3000, 64, 393216, 4),
    (AMPERE, 3000, 4096, 98566144, 128),
    (AMPERE, 3000, 1000, 24064000, 32),
    (AMPERE, 3000, 770, 4730880, 52),
]


@pytest.mark.parametrize(("capability", "rows", "columns", "nbytes", "semaphores"), TAKEN)
def test_a_sum_takes_what_pytorch_took(capability: tuple[int, int], rows: int, columns: int, nbytes: int, semaphores: int) -> None:
    found = shared_sum(rows, columns, capability, smooth=False)
    assert found is not None
    assert (found.nbytes, found.semaphores) == (nbytes, semaphores)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1024), (512, 768), (8192, 50257)])
def test_few_rows_and_many_columns_are_not_shared(rows: int, columns: int) -> None:
    assert shared_sum(rows, columns, HOPPER, smooth=False) is None


@pytest.mark.parametrize("columns", [64, 770, 1024, 4096])
def test_the_smooth_size_is_on_a_line_and_bounds_the_exact_one(columns: int) -> None:
    def smooth(rows: int) -> tuple[int, int]:
        found = shared_sum(rows, columns, HOPPER, smooth=True)
        assert found is not None
        return found.nbytes, found.most

    (low, most), (high, _) = smooth(1024), smooth(2048)
    assert high == 2 * low
    for rows in (1024, 4096, 16384, 65536):
        exact = shared_sum(rows, columns, HOPPER, smooth=False)
        told = min(low * rows // 1024, most)
        assert exact is None or exact.nbytes <= told


@pytest.mark.parametrize(
    ("shape", "dims", "found"),
    [
        ((8, 512, 1024), [0, 1], (4096, 1024)),
        ((4096, 1024), [0], (4096, 1024)),
        ((4096, 1024), [-2], (4096, 1024)),
        ((1, 4096, 1024), [1], (4096, 1024)),
        ((8, 512, 1024), [0], None),  # over samples
        ((8, 512, 1024), [1], None),
        ((8, 512, 1024), [2], None),
        ((8, 512), [0, 1], None),  # of everything
        ((8, 512), [], None),
    ],
)
def test_sums_over_rows_are_told_from_others(shape: tuple[int, ...], dims: list[int], found: tuple[int, int] | None) -> None:
    assert summed_rows([torch.empty(shape, device="meta"), dims]) == found


def test_a_strided_tensor_is_left_alone() -> None:
    assert summed_rows([torch.empty((1024, 4096), device="meta").t(), [0]]) is None
