"""Random calls of scaled_dot_product_attention, the same for every seed, on any device: what is recorded from a card's torch and asked of our choice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from autofit.tracing.sdpa import Call

HEAD_SIZES = (8, 16, 20, 32, 36, 40, 60, 64, 72, 80, 96, 100, 104, 128, 136, 160, 192, 200, 224, 232, 256, 264)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LETTERS = {"math": "m", "flash": "f", "efficient": "e", "cudnn": "c"}


def calls(count: int, *, seed: int, device: str) -> Iterator[Call]:
    """`count` calls whose tensors hold nothing; those that need a gradient say so themselves, whatever the mode."""
    rng = random.Random(seed)
    while count:
        dtype, size = rng.choice(DTYPES), rng.choice(HEAD_SIZES)
        value_size = size if rng.random() < 0.85 else rng.choice((8, 64, 100, 128))
        batch, heads, length = rng.choice((1, 2, 4)), rng.choice((1, 4, 12)), rng.choice((1, 2, 7, 64, 512))
        keys = length if rng.random() < 0.7 else rng.choice((1, 7, 64, 512))
        grouped = rng.random() < 0.25
        key_heads = rng.choice((1, 2, 4)) if grouped else heads
        layouts = [rng.choices(("bhld", "blhd", "qkv", "lastdim"), (8, 8, 4, 1))[0] for _ in range(1 if rng.random() < 0.8 else 3)]
        needs_grad, with_mask_grad = rng.random() < 0.6, rng.random() < 0.3
        kind, mask_shape = rng.choices(("none", "bool", "float", "permuted"), (5, 2, 3, 1))[0], (rng.choice((1, batch)), rng.choice((1, heads)))
        dropout, causal = rng.choice((0.0, 0.0, 0.1, 0.125, 0.5)), rng.random() < 0.4
        if heads % key_heads:
            continue
        count -= 1
        q, k, v = (
            _tensor(shape, dtype, layout, device).requires_grad_(needs_grad)
            for shape, layout in zip(
                ((batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)), (layouts * 3)[:3]
            )
        )
        mask = _mask(kind, (*mask_shape, length, keys), heads, dtype, device)
        if mask is not None and mask.is_floating_point():
            mask.requires_grad_(with_mask_grad)
        yield Call(
            query=q, key=k, value=v, mask=mask, dropout=dropout, causal=causal and mask is None, gqa=heads != key_heads, needs_grad=needs_grad
        )


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> Tensor:
    batch, heads, length, size = shape
    if layout == "bhld":
        return torch.empty(shape, dtype=dtype, device=device)
    if layout == "blhd":
        return torch.empty((batch, length, heads, size), dtype=dtype, device=device).transpose(1, 2)
    if layout == "qkv":
        return torch.empty((batch, length, 3, heads, size), dtype=dtype, device=device)[:, :, 1].transpose(1, 2)
    return torch.empty((batch, heads, size, length), dtype=dtype, device=device).transpose(2, 3)


def _mask(kind: str, shape: tuple[int, ...], heads: int, dtype: torch.dtype, device: str) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "permuted":  # T5's position bias
        return torch.empty((shape[2], shape[3], heads), dtype=dtype, device=device).permute(2, 0, 1).unsqueeze(0)
    return torch.empty(shape, dtype=torch.bool if kind == "bool" else dtype, device=device)
