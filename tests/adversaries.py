"""Landscapes made to mislead a search, from a few lines of physics each, with a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import divisors
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.units import GIB, MIB

CONTEXT = 500 * MIB
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit")
PRECISIONS = (Precision.BF16, Precision.FP16, Precision.TF32, Precision.FP32)
SPEEDUP = {Precision.BF16: 4.0, Precision.FP16: 3.9, Precision.TF32: 2.5, Precision.FP32: 1.0}
UPDATE = {"adamw_torch_fused": 0.010, "adamw_torch": 0.018, "adafactor": 0.030, "adamw_bnb_8bit": 0.014}

Seconds = Callable[[TrialConfig], float]


def plain_micro(config: TrialConfig) -> float:
    """Launches against work: saturates with the batch, a third more with checkpointing."""
    work = 0.008 * config.per_device_train_batch_size / SPEEDUP[config.precision]
    return math.hypot(0.012, work) * (4 / 3 if config.gradient_checkpointing else 1.0)


def plain_update(config: TrialConfig) -> float:
    """By optimizer alone."""
    return UPDATE[config.optim]


def plain_bytes(config: TrialConfig) -> int:
    """Weights, state, gradients and activations of a model of 300 million parameters."""
    state = {"adafactor": 0.1, "adamw_bnb_8bit": 0.6}.get(config.optim, 2.0)
    weights = 1.2 * GIB * (1 + state + (1.0 if config.gradient_accumulation_steps > 1 else 0.4))
    sample = 0.3 * GIB * (0.6 if config.precision in (Precision.BF16, Precision.FP16) else 1.0)
    return int(
        weights
        + sample * config.per_device_train_batch_size * (0.2 if config.gradient_checkpointing else 1.0)
    )


def grid(
    *,
    effective_batch: int = 64,
    micro: Seconds = plain_micro,
    update: Seconds = plain_update,
    needed: Callable[[TrialConfig], int] = plain_bytes,
    precisions: Sequence[Precision] = PRECISIONS,
    optims: Sequence[str] = OPTIMS,
    jitter: float = 0.005,
    drift: float = 0.0,
    seed: int = 0,
) -> Landscape:
    """The full product of the choices. `drift` moves whole runs, `jitter` single steps (both relative)."""
    rng = np.random.default_rng(seed)
    points = []
    for batch in divisors(effective_batch):
        for precision in precisions:
            for checkpointing in (False, True):
                for optim in optims:
                    config = TrialConfig(
                        per_device_train_batch_size=batch,
                        gradient_accumulation_steps=effective_batch // batch,
                        gradient_checkpointing=checkpointing,
                        precision=precision,
                        optim=optim,
                    )
                    moved = math.exp(rng.normal(0.0, drift)) if drift else 1.0
                    points.append(
                        Point(
                            config=config,
                            measurement=_measured(config, micro, update, needed, jitter, moved, rng),
                        )
                    )
    device = Device(
        kind="cuda",
        name="adversary",
        total_memory_bytes=80 * GIB,
        context_bytes=CONTEXT,
        precisions=tuple(precisions),
    )
    return Landscape(points=tuple(points), device=device, modelled=True)


def _measured(
    config: TrialConfig,
    micro: Seconds,
    update: Seconds,
    needed: Callable[[TrialConfig], int],
    jitter: float,
    moved: float,
    rng: np.random.Generator,
) -> Measurement:
    def samples(seconds: float, count: int) -> tuple[float, ...]:
        return tuple(float(v) for v in seconds * moved * np.exp(rng.normal(0.0, jitter, count)))

    reserved = needed(config)
    return Measurement(
        micro_step_seconds=samples(micro(config), 16),
        fetch_seconds=samples(0.0005, 8),
        update_seconds=samples(update(config), 8),
        memory=Memory(peak_allocated_bytes=reserved, peak_reserved_bytes=reserved),
    )
