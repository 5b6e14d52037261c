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
    found = shared_sum(rows, columns, capability)
    assert found is not None
    assert (found.stairs.at(found.line), found.semaphores) == (nbytes, semaphores)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1024), (512, 768), (8192, 50257)])
def test_few_rows_and_many_columns_are_not_shared(rows: int, columns: int) -> None:
    found = shared_sum(rows, columns, HOPPER)
    assert found is None or found.stairs.at(found.line) == 0


@pytest.mark.parametrize("columns", [64, 770, 1024, 4096])
def test_the_line_through_two_heights_leads_to_what_any_other_takes(columns: int) -> None:
    (low, high) = (shared_sum(rows, columns, HOPPER) for rows in (1024, 2048))
    assert low is not None
    assert high is not None
    assert low.stairs == high.stairs
    for rows in (1024, 1536, 4096, 12017, 16384, 65536, 131072):
        exact = shared_sum(rows, columns, HOPPER)
        assert exact is not None
        assert low.stairs.at(low.line + (high.line - low.line) * (rows - 1024) // 1024) == exact.stairs.at(exact.line)


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
