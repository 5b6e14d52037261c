"""The work of one operator, as the roofline is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.memory.trace_builder import TraceBuilder
from autofit.tracing import costs

aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 2, 8, 16, 32
FORWARD = aten._scaled_dot_product_flash_attention.default
BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
PRODUCTS = 2 * 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH  #: scores and their product with the values, two operations per multiplication


def rows(heads: int) -> torch.Tensor:
    return torch.empty(BATCH, heads, LENGTH, WIDTH, device="meta")


@pytest.fixture
def strict_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's table as it was up to 2.11: it refuses keys with fewer heads than queries."""

    def refuse(query: Any, key: Any, value: Any) -> None:
        assert query.shape[1] == key[1] == value[1], "shapes are incompatible"

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        refuse(query, key, value)
        return PRODUCTS

    def backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        refuse(query, key, value)
        return PRODUCTS * 5 // 2

    monkeypatch.setattr(costs, "_formula", {FORWARD: forward, BACKWARD: backward}.get)


def flops(func: Any, *args: Any) -> int:
    builder = TraceBuilder()
    costs.record(builder, func, args, {}, rows(HEADS))
    return sum(op.flops for op in builder._ops)


@pytest.mark.usefixtures("strict_table")
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_grouped_query_attention_costs_what_attention_costs_whatever_torchs_table_takes(kv_heads: int) -> None:
    assert flops(FORWARD, rows(HEADS), rows(kv_heads), rows(kv_heads)) == PRODUCTS
    assert flops(BACKWARD, rows(HEADS), rows(HEADS), rows(kv_heads), rows(kv_heads)) == PRODUCTS * 5 // 2


@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_the_installed_torchs_own_table_agrees(kv_heads: int) -> None:
    assert flops(FORWARD, rows(HEADS), rows(kv_heads), rows(kv_heads)) == PRODUCTS
    assert flops(BACKWARD, rows(HEADS), rows(HEADS), rows(kv_heads), rows(kv_heads)) == PRODUCTS * 5 // 2
