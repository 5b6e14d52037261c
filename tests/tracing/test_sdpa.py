"""Attention goes to the kernel that the named card would choose."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.tracing import sdpa
from autofit.tracing.sdpa import Call, choose
from tests.tracing.attention_calls import calls
from tests.tracing.child import in_child


def _call(
    dtype: torch.dtype = torch.float16, *, dim: int = 64, heads: int = 4, key_heads: int = 4, **more: Any
) -> Call:
    options: dict[str, Any] = {"mask": None, "dropout": 0.0, "causal": False, "needs_grad": True, **more}
    q, k = torch.empty(2, heads, 16, dim, dtype=dtype), torch.empty(2, key_heads, 16, dim, dtype=dtype)
    return Call(query=q, key=k, value=k, gqa=heads != key_heads, **options)


MASK = torch.zeros(2, 1, 16, 16)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROUTES = [
    ("16 bit on Ampere", _call(F16), (8, 0), "flash"),
    ("16 bit on Volta", _call(F16), (7, 0), "efficient"),
    ("bf16 on Volta, which lacks it", _call(BF16), (7, 0), "math"),
    ("fp32", _call(F32), (8, 0), "efficient"),
    ("a mask", _call(F16, mask=MASK), (8, 0), "efficient"),
    ("grouped queries in 16 bit", _call(BF16, key_heads=2, causal=True), (8, 0), "flash"),
    ("heads of 256", _call(F16, dim=256), (8, 0), "flash"),
    ("heads of 200 in training on a small card", _call(F16, dim=200), (8, 9), "efficient"),
    ("a head size that no fused kernel can align", _call(F16, dim=300), (8, 0), "math"),
    ("16 bit on Hopper", _call(BF16), (9, 0), "cudnn"),
    ("a mask on Hopper", _call(BF16, mask=MASK), (9, 0), "cudnn"),
    ("a dropout that is no sixteenth on Hopper", _call(BF16, dropout=0.1), (9, 0), "flash"),
    ("fp32 on Hopper", _call(F32), (9, 0), "efficient"),
    ("16 bit on consumer Blackwell", _call(BF16), (12, 0), "flash"),
]


@pytest.mark.parametrize(
    ("call", "capability", "kernel"), [r[1:] for r in ROUTES], ids=[r[0] for r in ROUTES]
)
def test_the_kernel_is_the_one_that_the_card_would_choose(
    call: Call, capability: tuple[int, int], kernel: str
) -> None:
    assert choose(call, capability) == kernel



@pytest.mark.parametrize(("version", "kernel"), [((2, 13), "math"), ((2, 14), "efficient")])
def test_grouped_queries_in_fp32_have_a_fused_kernel_only_from_torch_2_14(
    version: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "torch_version", lambda: version)
    assert choose(_call(F32, key_heads=2), (8, 0)) == kernel


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "attention-choices.json").read_text())


@pytest.mark.parametrize("row", RECORDED["rows"])
def test_pytorchs_own_builds_chose_the_same_for_random_calls(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, capability = re.findall(r"(\d+)\.(\d+)", row)
    monkeypatch.setattr(sdpa, "torch_version", lambda: tuple(map(int, version)))
    monkeypatch.setattr(sdpa, "cudnn_leads", lambda: RECORDED["rows"][row]["cudnn"] > 91500)
    asked = calls(RECORDED["count"], seed=RECORDED["seed"], device="meta")
    ours = "".join(RECORDED["letters"][choose(call, tuple(map(int, capability)))] for call in asked)
    theirs = RECORDED["rows"][row]["choices"]
    assert [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b] == []


def test_cudnn_comes_last_for_those_who_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa.cudnn_leads.cache_clear()
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(_call(BF16), (9, 0)) == "flash"
    sdpa.cudnn_leads.cache_clear()


def _routed(dtype: torch.dtype, dim: int, mask_dtype: torch.dtype | None, autocast: bool) -> tuple[Any, ...]:
    from autofit.tracing import fake_device

    fake_device.install()
    routes: Counter[str] = Counter()
    attention = sdpa.routed(torch.nn.functional.scaled_dot_product_attention, (8, 0), routes)
    with FakeTensorMode(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        q = torch.empty(2, 4, 17, dim, dtype=dtype, device="cuda", requires_grad=True)
        mask = None if mask_dtype is None else torch.ones(2, 1, 17, 17, dtype=mask_dtype, device="cuda")
        out = attention(q, q, q, mask)
    return dict(routes), tuple(out.shape), out.dtype


def test_an_odd_head_size_is_padded_for_flash_and_cut_again() -> None:
    assert in_child(_routed, F16, 20, None, False) == ({"flash": 1}, (2, 4, 17, 20), F16)


def test_masks_of_any_kind_and_length_reach_the_efficient_kernel() -> None:
    for dtype in (torch.bool, F16):
        assert in_child(_routed, F16, 64, dtype, False) == ({"efficient": 1}, (2, 4, 17, 64), F16)


def test_attention_on_the_cpu_is_left_to_torch() -> None:
    routes: Counter[str] = Counter()
    attention = sdpa.routed(torch.nn.functional.scaled_dot_product_attention, (8, 0), routes)
    q = torch.randn(1, 2, 8, 16)
    assert torch.equal(attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert routes == {"cpu": 1}
