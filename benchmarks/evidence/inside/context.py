"""What a process takes from the card beside its tensors, step by step, and what the card says of itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.evidence.inside.counters import counters, driver_used_bytes
from benchmarks.evidence.inside.line import Report, serve

RATE_SIZE = {"cuda": 8192, "cpu": 256}
RATE_ROUNDS = 10


def main(order: Mapping[str, Any], report: Report) -> None:
    """Report each step, then properties and matrix rates."""
    before = driver_used_bytes()
    device = "cpu" if order["device"] == "cpu" else "cuda"
    report(step="before", driver_used_bytes=before)
    for name, act in steps(device).items():
        begin = time.perf_counter()
        act()
        seconds = time.perf_counter() - begin
        report(step=name, seconds=seconds, **counters(before))
    report(properties=properties(device))
    for name, dtype, tf32 in (
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
    ):
        report(rate=name, tflops=matrix_rate(device, dtype, tf32=tf32), size=RATE_SIZE[device])


def steps(device: str) -> dict[str, Callable[[], Any]]:
    """Name -> an action; each one brings up one more library. In order."""

    def convolve() -> None:
        image = torch.ones(2, 3, 64, 64, device=device, requires_grad=True)
        weight = torch.ones(8, 3, 16, 16, device=device, requires_grad=True)
        functional.conv2d(image, weight, stride=16).sum().backward()

    def attend() -> None:
        q, k, v = (
            torch.ones(2, 4, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        functional.scaled_dot_product_attention(q, k, v).sum().backward()

    def product(dtype: torch.dtype) -> None:
        a = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()

    def linear() -> None:
        a = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
        functional.linear(a, a, torch.ones(256, device=device, dtype=torch.bfloat16)).sum().item()

    return {
        "initialised": torch.cuda.init if device == "cuda" else (lambda: None),
        "first tensor": lambda: torch.ones(1, device=device),
        "fp32 product (cuBLAS)": lambda: product(torch.float32),
        "bf16 product": lambda: product(torch.bfloat16),
        "linear with bias (cuBLASLt)": linear,
        "convolution (cuDNN)": convolve,
        "attention": attend,
    }


def properties(device: str) -> dict[str, Any]:
    """What torch says of the card and its libraries."""
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cpu":
        return found
    card = torch.cuda.get_device_properties(0)
    found |= {
        "name": card.name,
        "total_memory_bytes": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "l2_bytes": getattr(card, "L2_cache_size", None),
        "compute_capability": f"{card.major}.{card.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "bf16_with_emulation": torch.cuda.is_bf16_supported(),
        "expandable_segments": "expandable_segments:True" in _allocator_settings(),
    }
    return found


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def matrix_rate(device: str, dtype: torch.dtype, *, tf32: bool) -> float:
    """10^12 operations per second of a square product of random matrices: mean of `RATE_ROUNDS` after one warm-up."""
    size = RATE_SIZE[device]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    a @ b
    wait()
    begin = time.perf_counter()
    for _ in range(RATE_ROUNDS):
        a @ b
    wait()
    return 2 * size**3 * RATE_ROUNDS / (time.perf_counter() - begin) / 1e12


if __name__ == "__main__":
    serve(main)
