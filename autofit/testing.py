"""A device that is only a formula, to try samplers and searches on: deterministic, in milliseconds, without torch.

    landscape = simulated_landscape(effective_batch=64, jitter=0.01)
    spec = SearchSpec(workload=Workload(model="simulated"), effective_batch=64, sampler="tpe")
    result = run_search(spec, landscape=landscape, predict=False)

Seconds of a configuration with batch `b` (`k` is 4/3 with checkpointing, which runs forward twice, else 1):

    t_micro  = k * (launch_seconds + b * seconds_per_sample / precision_speed)
    t_fetch  = fetch_seconds
    t_update = update_seconds * optimizer_passes / 4

Bytes, with `P` parameters and `s` bytes of optimizer state for each:

    allocated = P * (4 + 4 + s) + b * activation_bytes / precision_saving / (5 with checkpointing)
    reserved  = allocated + 3 %, rounded up to blocks of 2 MiB

It is a caricature, good for tests of what a search does and no evidence of how fast it finds winners on hardware.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import divisors, preferred_order
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.units import GIB, MIB

PRECISION_SPEED: Mapping[Precision, float] = {
    Precision.FP32: 1.0,
    Precision.TF32: 3.0,
    Precision.BF16: 5.0,
    Precision.FP16: 5.0,
    Precision.PURE_BF16: 6.0,
}
OPTIMIZER_PASSES: Mapping[str, float] = {
    "adamw_torch_fused": 4.0,
    "adamw_torch": 7.0,
    "adafactor": 11.0,
    "adamw_bnb_8bit": 6.0,
    "sgd": 2.0,
}
OPTIMIZER_STATE_BYTES: Mapping[str, int] = {"adafactor": 0, "adamw_bnb_8bit": 2, "sgd": 0}
ADAM_STATE_BYTES = 8
RECOMPUTATION = 4 / 3
CHECKPOINTING_SAVING = 5
SIXTEEN_BIT_SAVING = 1.6
RESERVED_OVER_ALLOCATED = 1.03
BLOCK_BYTES = 2 * MIB


def simulated_landscape(
    effective_batch: int = 64,
    *,
    precisions: Sequence[Precision] = (Precision.FP32, Precision.BF16),
    optims: Sequence[str] = ("adamw_torch_fused", "adafactor"),
    checkpointing: Sequence[bool] = (False, True),
    parameters: int = 110_000_000,
    activation_bytes: int = 160 * MIB,
    seconds_per_sample: float = 0.004,
    launch_seconds: float = 0.006,
    fetch_seconds: float = 0.0002,
    update_seconds: float = 0.012,
    total_memory_bytes: int = 16 * GIB,
    context_bytes: int = 500 * MIB,
    ruggedness: float = 0.0,
    jitter: float = 0.0,
    samples: int = 8,
    seed: int = 0,
) -> Landscape:
    """Return every configuration at `effective_batch`, priced by the formulas of this module; same arguments, same landscape.

    Args:
        effective_batch: samples per optimizer step; every divisor is a batch size.
        precisions, optims, checkpointing: the other choices of the space.
        parameters: of the model.
        activation_bytes: kept per sample between forward and backward, in fp32 without checkpointing.
        seconds_per_sample: forward and backward of one sample in fp32.
        launch_seconds: of a micro-step, whatever its batch.
        fetch_seconds: per micro-step.
        update_seconds: per optimizer step with fused AdamW.
        total_memory_bytes, context_bytes: of the card.
        ruggedness: standard deviation (log) of what each configuration's micro-step is off the formula.
        jitter: standard deviation (log) of single samples.
        samples: micro-steps per configuration.
        seed: of ruggedness and jitter.
    """
    rng = random.Random(seed)
    points = []
    for config in _configs(effective_batch, precisions, optims, checkpointing):
        micro = math.exp(rng.gauss(0.0, ruggedness)) * _micro_seconds(
            config, seconds_per_sample, launch_seconds
        )
        update = update_seconds * OPTIMIZER_PASSES.get(config.optim, 4.0) / 4.0
        points.append(
            Point(
                config=config,
                measurement=Measurement(
                    micro_step_seconds=_scattered(micro, samples, jitter, rng),
                    fetch_seconds=_scattered(fetch_seconds, samples, jitter, rng),
                    update_seconds=_scattered(update, max(1, samples // 2), jitter, rng),
                    memory=_memory(config, parameters, activation_bytes),
                ),
            )
        )
    device = Device(
        kind="cuda",
        name="simulated card",
        total_memory_bytes=total_memory_bytes,
        context_bytes=context_bytes,
        precisions=tuple(precisions),
    )
    return Landscape(
        points=tuple(points), device=device, spec={"effective_batch": effective_batch}, modelled=True
    )


def _configs(
    effective_batch: int,
    precisions: Sequence[Precision],
    optims: Sequence[str],
    checkpointing: Sequence[bool],
) -> list[TrialConfig]:
    return [
        TrialConfig(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=effective_batch // size,
            gradient_checkpointing=checkpointed,
            precision=precision,
            optim=optim,
        )
        for checkpointed in checkpointing
        for precision in precisions
        for optim in optims
        for size in preferred_order(divisors(effective_batch))
    ]


def _micro_seconds(config: TrialConfig, seconds_per_sample: float, launch_seconds: float) -> float:
    compute = config.per_device_train_batch_size * seconds_per_sample / PRECISION_SPEED[config.precision]
    return (RECOMPUTATION if config.gradient_checkpointing else 1.0) * (launch_seconds + compute)


def _memory(config: TrialConfig, parameters: int, activation_bytes: int) -> Memory:
    state = OPTIMIZER_STATE_BYTES.get(config.optim, ADAM_STATE_BYTES)
    sixteen = config.precision not in (Precision.FP32, Precision.TF32)
    activations = float(config.per_device_train_batch_size * activation_bytes)
    activations /= (SIXTEEN_BIT_SAVING if sixteen else 1.0) * (
        CHECKPOINTING_SAVING if config.gradient_checkpointing else 1.0
    )
    allocated = parameters * (4 + 4 + state) + math.ceil(activations)
    reserved = math.ceil(RESERVED_OVER_ALLOCATED * allocated / BLOCK_BYTES) * BLOCK_BYTES
    return Memory(peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)


def _scattered(middle: float, count: int, jitter: float, rng: random.Random) -> tuple[float, ...]:
    return tuple(middle * math.exp(rng.gauss(0.0, jitter)) for _ in range(count))
