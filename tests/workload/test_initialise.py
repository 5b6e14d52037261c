from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.workload.initialise import BLOCK, FastRandom

LARGE = (1200, 1024)


def test_a_large_tensor_gets_the_asked_distribution() -> None:
    weight = torch.empty(LARGE)
    with FastRandom():
        weight.normal_(mean=1.0, std=0.02)
    assert weight.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    with FastRandom():
        nn.init.uniform_(weight, -0.5, 0.25)
    assert weight.min().item() >= -0.5
    assert weight.max().item() <= 0.25


def test_a_large_tensor_repeats_one_block_and_no_two_rows_are_equal() -> None:
    weight = torch.empty(2 * BLOCK + 7)
    with FastRandom():
        weight.normal_()
    assert torch.equal(weight[:BLOCK], weight[BLOCK : 2 * BLOCK])
    matrix = torch.empty(3000, 1024)
    with FastRandom():
        matrix.normal_()
    assert len(matrix.unique(dim=0)) == 3000


def test_different_distributions_do_not_share_a_block() -> None:
    narrow, wide = torch.empty(LARGE), torch.empty(LARGE)
    with FastRandom():
        narrow.normal_(0.0, 0.02)
        wide.normal_(0.0, 1.0)
    assert wide.std() > 10 * narrow.std()


def test_small_tensors_and_half_precision_are_drawn_as_usual() -> None:
    small, half = torch.empty(64), torch.empty(LARGE, dtype=torch.bfloat16)
    with FastRandom():
        small.normal_()
        half.normal_(std=0.02)
    assert small.unique().numel() == 64
    assert half.float().std().item() == pytest.approx(0.02, rel=0.02)


def test_shapes_without_memory_pass_through() -> None:
    with FastRandom(), torch.device("meta"):
        layer = nn.Linear(2048, 2048)
    assert layer.weight.device.type == "meta"


def test_other_operations_are_untouched() -> None:
    with FastRandom():
        norm = nn.LayerNorm(8)
        result = torch.arange(4).sum()
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()
    assert int(result) == 6
