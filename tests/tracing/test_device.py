"""The fake device: its self-test, its verdict on disk, its refusals."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch

from autofit.memory.request import TraceUnavailable
from autofit.tracing import fake_device, kernels, patches
from tests.tracing.child import in_child


def test_the_patches_work_in_a_throw_away_process() -> None:
    assert fake_device.run_try_out() is None


def test_the_verdict_is_kept_and_belongs_to_one_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcomes = iter(["once", "it is broken", "once", None])
    monkeypatch.setattr(fake_device, "run_try_out", lambda: next(outcomes))
    verdicts = []
    for _ in range(2):
        fake_device.self_test.cache_clear()
        verdicts.append(fake_device.self_test())
    stored = tmp_path / "autofit" / "fake-device.json"
    stored.write_text(json.dumps({"identity": "another torch", "reason": "it is broken"}))
    fake_device.self_test.cache_clear()
    verdicts.append(fake_device.self_test())
    fake_device.self_test.cache_clear()
    assert verdicts == ["it is broken", "it is broken", None]


def test_a_crash_of_the_throw_away_process_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -11 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    reason = fake_device.run_try_out()
    assert reason is not None
    assert "died of signal 11" in reason


def test_another_platform_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TraceUnavailable, match="needs Linux on x86-64, this is darwin"):
        fake_device.require_platform()


def _backward_then_install() -> str:
    torch.ones(2, requires_grad=True).sum().backward()
    try:
        fake_device.install()
    except TraceUnavailable as error:
        return error.message
    return "installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is patched")
def test_a_process_that_has_trained_before_is_refused() -> None:
    import subprocess

    # Left at once: torch's own shutdown has been seen to crash after the fake device met a live autograd thread.
    code = f"import os; from {__name__} import _backward_then_install as f; print(f(), flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "autograd cannot use a fake device in this process" in done.stdout


def _stubbed() -> tuple[list[str], list[str]]:
    fake_device.install()
    first = kernels.register_missing_kernels()
    return first, kernels.register_missing_kernels()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a CUDA build has these kernels")
def test_operators_with_a_fallback_stay_whole_in_a_cpu_build() -> None:
    before, again = in_child(_stubbed)
    assert again == []
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has("aten::silu_backward", "CUDA"), "this process must stay as it was"
    assert in_child(has, "aten::silu_backward", "CUDA")
    assert set(before) <= {"aten::silu_backward", "aten::mish_backward", "aten::_fused_rms_norm"} | set(
        before
    )


def test_every_patch_is_undone() -> None:
    from torch.nn import functional
    from torch.optim import optimizer
    from transformers.utils import import_utils

    watched = [
        (functional, "scaled_dot_product_attention"),
        (torch.cuda, "synchronize"),
        (torch.cuda, "is_bf16_supported"),
        (torch.amp.GradScaler, "_maybe_opt_step"),
        (import_utils, "is_fake_tensor"),
        (optimizer, "_foreach_supported_types"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    with contextlib.suppress(KeyError), patches.applied((8, 0)):
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(watched, before))
        raise KeyError
    assert [getattr(owner, name) for owner, name in watched] == before
