"""A trace on fake CPU tensors against real CPU training steps, by the events of PyTorch's own allocator."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.problem.config import Precision
from autofit.tracing.record import trace_step
from tests.tracing.subjects import (
    ARCHITECTURES,
    make_subject,
    model_bytes,
    real_peak,
    settings_for,
    traced_peak,
)

BATCH, LENGTH = 8, 64
TOLERANCE = 0.001
CONVOLUTION_TOLERANCE = 0.01  # oneDNN reorders the weights of 16-bit convolutions where no dispatcher sees it

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"arguments": {"optim": "adamw_torch"}},
    "accumulation": {"arguments": {"optim": "adamw_torch"}, "accumulation": 2},
    "checkpointing": {"arguments": {"optim": "adamw_torch", "gradient_checkpointing": True}},
    "bf16": {"arguments": {"optim": "adamw_torch"}, "precision": Precision.BF16},
    "checkpointing bf16 fused": {
        "arguments": {"optim": "adamw_torch_fused", "gradient_checkpointing": True},
        "precision": Precision.BF16,
        "accumulation": 2,
    },
    "adafactor": {"arguments": {"optim": "adafactor", "label_smoothing_factor": 0.1}},
    "sgd": {"arguments": {"optim": "sgd", "max_grad_norm": 0.0}},
}
#: oneDNN's convolutions take memory that no dispatcher sees: such models have a test of their own
CONVOLUTIONAL = ("wav2vec2",)
QUICK = [("bert", "bf16"), ("llama", "checkpointing bf16 fused"), ("t5", "adafactor")]
ALL = [(name, how) for name in ARCHITECTURES if name not in CONVOLUTIONAL for how in CONFIGURATIONS]


def _compare(name: str, how: str) -> None:
    architecture = ARCHITECTURES[name]
    settings = settings_for(batch=BATCH, length=LENGTH, device_type="cpu", costs=False, **CONFIGURATIONS[how])
    trace = trace_step(make_subject(architecture, batch=BATCH, length=LENGTH, device="cpu"), settings)
    expected = real_peak(architecture, settings, batch=BATCH, length=LENGTH)
    told, loaded = traced_peak(trace), model_bytes(trace)
    loose = architecture.inputs == "image" and settings.precision is Precision.BF16
    tolerance = CONVOLUTION_TOLERANCE if loose else TOLERANCE
    assert abs(told - expected) <= tolerance * (expected + loaded), (
        f"{name} {how}: traced {told}, real {expected}"
    )


@pytest.mark.parametrize(("name", "how"), QUICK)
def test_a_trace_has_the_peak_of_real_steps(name: str, how: str) -> None:
    _compare(name, how)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [case for case in ALL if case not in QUICK])
def test_every_architecture_and_configuration_has_the_peak_of_real_steps(name: str, how: str) -> None:
    _compare(name, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "accumulation", "checkpointing", "bf16"])
def test_a_convolutional_front_end_is_traced_but_for_the_scratch_of_its_convolutions(how: str) -> None:
    architecture = ARCHITECTURES["wav2vec2"]
    settings = settings_for(batch=BATCH, length=LENGTH, device_type="cpu", costs=False, **CONFIGURATIONS[how])
    trace = trace_step(make_subject(architecture, batch=BATCH, length=LENGTH, device="cpu"), settings)
    expected = real_peak(architecture, settings, batch=BATCH, length=LENGTH)
    assert 0.85 * expected <= traced_peak(trace) <= 1.001 * expected
