"""Memory that kernels take for themselves, by hand-made examples of what PyTorch's sources say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from autofit.memory.events import Kind, Trace
from autofit.tracing import kernels
from autofit.tracing.kernels import Card
from autofit.tracing.record import trace_step
from autofit.units import MIB
from tests.tracing.child import in_child
from tests.tracing.subjects import ARCHITECTURES, make_subject, settings_for

AMPERE = Card(capability=(8, 0))
VOLTA = Card(capability=(7, 0))


@pytest.mark.parametrize(
    ("capability", "mib"),
    [((7, 0), 8.125), ((8, 0), 8.125), ((8, 9), 8.125), ((9, 0), 32), ((10, 0), 32), ((12, 0), 32)],
)
def test_the_gemm_workspace_depends_on_the_card(capability: tuple[int, int], mib: float) -> None:
    assert kernels.cublas_workspace_bytes(capability) == mib * MIB


def _embedding(count: int, rows: int, width: int) -> list[Any]:
    return [
        torch.empty(count, width, device="meta"),
        torch.empty(count, dtype=torch.long, device="meta"),
        rows,
        -1,
        False,
    ]


def test_few_indices_need_no_memory_in_an_embeddings_backward() -> None:
    assert kernels.embedding_backward(_embedding(3072, 30000, 64), AMPERE) == []


def test_many_indices_are_sorted_and_summed_in_partial_segments() -> None:
    sort, sums = kernels.embedding_backward(_embedding(4000, 30000, 64), AMPERE)
    assert sum(sort) == 4000 * 8 * 5
    partials = 4000 // 10 + 4000
    assert sums[-1] == partials * 64 * 4
    assert sum(sums[:-1]) == 3 * 4000 * 8 + 2 * 4000 * 8 + partials * 8


def test_a_small_table_bounds_the_segments() -> None:
    _, sums = kernels.embedding_backward(_embedding(4000, 2, 64), AMPERE)
    assert sums[-1] == (400 + 2) * 64 * 4


def test_a_smooth_card_has_sizes_on_a_line() -> None:
    smooth = Card(capability=(8, 0), smooth=True)
    sizes = [kernels.embedding_backward(_embedding(512 * b, 30000, 64), smooth) for b in (2, 4, 6, 16)]
    flat = [[n for group in groups for n in group] for groups in sizes]
    assert all(f - d == 6 * (b - a) for a, b, d, f in zip(flat[0], flat[1], flat[1], flat[3]))
    exact = kernels.embedding_backward(_embedding(512 * 16, 30000, 64), AMPERE)
    assert all(told >= real for told, real in zip(flat[3], (n for group in exact for n in group)))


def _attention(
    dtype: torch.dtype,
    *,
    batch: int = 2,
    heads: int = 4,
    length: int = 100,
    dim: int = 64,
    key_heads: int = 4,
) -> list[Any]:
    q = torch.empty(batch, heads, length, dim, dtype=dtype, device="meta")
    k = torch.empty(batch, key_heads, length, dim, dtype=dtype, device="meta")
    return [q, q, k, k]


def test_flash_backward_accumulates_in_fp32_over_rounded_lengths() -> None:
    (group,) = kernels.flash_backward(_attention(torch.bfloat16, dim=80), AMPERE)
    assert group == [2 * 4 * 128 * 4, 2 * 4 * 128 * 96 * 4]


def test_flash_backward_expands_the_gradients_of_grouped_keys() -> None:
    (group,) = kernels.flash_backward(_attention(torch.bfloat16, key_heads=2), AMPERE)
    assert group[2:] == [2 * 2 * 4 * 64 * 2] * 2 or group[2:] == [2 * 100 * 4 * 64 * 2] * 2


def test_efficient_backward_in_16_bit_needs_row_sums_and_one_accumulator() -> None:
    (group,) = kernels.efficient_backward(_attention(torch.float16), AMPERE)
    tiles = 2 * 1  # of 64 x 64, with a header of 16 bytes each
    assert group == [2 * 4 * 100 * 4, 2 * 4 * tiles * (64 * 64 * 4 + 16)]


def test_efficient_backward_in_fp32_first_multiplies_gradient_and_output() -> None:
    first, second = kernels.efficient_backward(_attention(torch.float32), AMPERE)
    assert first[0] == 2 * 4 * 100 * 64 * 4
    assert second[0] == 2 * 4 * 100 * 4


def test_wide_heads_on_volta_need_accumulators_of_keys_and_values() -> None:
    narrow = kernels.efficient_backward(_attention(torch.float16, dim=64), VOLTA)
    wide = kernels.efficient_backward(_attention(torch.float16, dim=128), VOLTA)
    assert sum(wide[-1]) > 2 * sum(narrow[-1])


def test_a_fused_kernel_accumulates_only_very_wide_16_bit_heads_in_forward() -> None:
    assert kernels.efficient_forward(_attention(torch.float16, dim=128)[1:], AMPERE) == []
    assert kernels.efficient_forward(_attention(torch.float32, dim=256)[1:], AMPERE) == []
    assert kernels.efficient_forward(_attention(torch.float16, dim=256)[1:], AMPERE) == [
        [2 * 4 * 100 * 256 * 4]
    ]


def test_the_norm_of_many_tensors_needs_a_number_per_chunk_of_the_largest() -> None:
    tensors = [torch.empty(65536 * 3 + 1, device="meta"), torch.empty(5, device="meta")]
    assert kernels.foreach_norm([tensors], AMPERE) == [[2 * 4 * 4]]


def _trace(capability: tuple[int, int]) -> Trace:
    settings = settings_for(batch=2, length=16, capability=capability, costs=False)
    return trace_step(make_subject(ARCHITECTURES["bert"], batch=2, length=16, device="cuda"), settings)


@pytest.mark.parametrize(("capability", "mib"), [((8, 0), 8.125), ((9, 0), 32)])
def test_each_thread_that_multiplies_has_one_gemm_workspace_and_one_more_where_biases_are_added(capability: tuple[int, int], mib: float) -> None:
    trace = in_child(_trace, capability)
    sizes = [n for k, n in enumerate(trace.sizes) if trace.operator(k) == "cublas workspace"]
    assert sizes == [int(mib * MIB), MIB, int(mib * MIB)]  # the main thread's, which adds biases by cuBLASLt, and the engine's


def test_borrowed_memory_is_given_back_before_the_next_operator() -> None:
    trace = in_child(_trace, (8, 0))
    alive: Counter[int] = Counter()
    for event in trace.events:
        key = event if event >= 0 else ~event
        if trace.kinds[key] is Kind.WORKSPACE and trace.operator(key) != "cublas workspace":
            alive[key] += 1 if event >= 0 else -1
        elif event >= 0:
            assert not +alive, "a workspace outlived its kernel"
