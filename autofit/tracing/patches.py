"""Python-level patches that make torch and transformers behave under the fake mode as they do on a card.

All of them are undone when the context ends. Each names what would go wrong without it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autofit.tracing import sdpa


@contextlib.contextmanager
def applied(compute_capability: tuple[int, int]) -> Iterator[Counter[str]]:
    """Apply every patch, for a card of `compute_capability`; yields the count of attention calls by kernel."""
    routes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        _patch_cuda(patch, compute_capability)
        # Without it the fake device is sent to the math path, which stores length x length.
        original = functional.scaled_dot_product_attention
        patch(functional, "scaled_dot_product_attention", sdpa.routed(original, compute_capability, routes))
        # A read-back of found_inf would decide whether the update runs: it always does here.
        patch(torch.amp.GradScaler, "_maybe_opt_step", _always_step)
        # Optimizers and clipping choose their multi-tensor form by the exact type of the tensors.
        for module in (optimizer, _foreach_utils):
            patch(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
        _patch_transformers(patch)
        yield routes


def _patch_cuda(patch: Callable[[Any, str, Any], None], compute_capability: tuple[int, int]) -> None:
    """Autocast and GradScaler switch themselves off, and bitsandbytes stops, when no device answers; models with experts ask for its capability."""
    import torch.cuda.amp.common as amp

    patch(amp, "amp_definitely_not_available", lambda: False)
    patch(torch.cuda, "is_bf16_supported", lambda *_args, **_kwargs: True)
    patch(torch.cuda, "synchronize", lambda *_args, **_kwargs: None)
    patch(torch.cuda, "get_device_capability", lambda *_args, **_kwargs: compute_capability)


def _patch_transformers(patch: Callable[[Any, str, Any], None]) -> None:
    """transformers never drops an all-ones mask when it sees a fake tensor, and so loses the flash kernel."""
    from transformers.utils import import_utils

    if hasattr(import_utils, "is_fake_tensor"):  # transformers before 5 had no such test
        patch(import_utils, "is_fake_tensor", lambda _tensor: False)


def _always_step(_scaler: Any, stepped: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
    return stepped.step(*args, **kwargs)
