"""Hand-made records and results for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.result import Baseline, Cost, TuneResult, break_even_hours, estimate_of, estimates
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord
from autofit.units import GIB, MIB

#: as transformers 5.23 has them, the part that the knobs touch
ARGUMENT_DEFAULTS: Mapping[str, Any] = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": None,
    "activation_checkpointing_kwargs": None,
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "optim": "adamw_torch_fused",
    "torch_compile": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "use_cpu": False,
}
SEARCH_ROLES = (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH)
GPU = Device(
    kind="cuda",
    name="NVIDIA A100-SXM4-80GB",
    total_memory_bytes=80 * GIB,
    free_memory_bytes=79 * GIB,
    context_bytes=500 * MIB,
    compute_capability="8.0",
    precisions=tuple(Precision),
)
CPU = Device(kind="cpu", name="cpu", total_memory_bytes=24 * GIB, precisions=(Precision.FP32, Precision.BF16))


def make_config(batch: int = 8, effective_batch: int = 64, **fields: Any) -> TrialConfig:
    """A configuration with the exact product."""
    return TrialConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=effective_batch // batch, **fields
    )


def make_measurement(
    config: TrialConfig,
    samples_per_second: float,
    *,
    needed_bytes: int = 10 * GIB,
    context_bytes: int = 500 * MIB,
    jitter: float = 0.01,
    samples: int = 12,
    tokens_per_sample: float | None = 128.0,
    micro_seconds: float | None = None,
    **fields: Any,
) -> Measurement:
    """A measurement whose throughput is `samples_per_second`, with symmetric jitter around it; 5 % of the time is the update's.

    With `micro_seconds` of a micro-step the rest is the loader's.
    """
    batch, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    step_seconds = batch * steps / samples_per_second
    micro = 0.94 * step_seconds / steps if micro_seconds is None else micro_seconds
    spread = [1 + jitter * (2 * i / max(1, samples - 1) - 1) for i in range(samples)]
    reserved = needed_bytes - context_bytes
    memory = Memory(
        peak_allocated_bytes=int(0.93 * reserved),
        peak_reserved_bytes=reserved,
        context_bytes=context_bytes,
        device_used_bytes=needed_bytes + 30 * MIB,
        host_peak_bytes=3 * GIB,
    )
    return Measurement(
        micro_step_seconds=tuple(micro * s for s in spread),
        fetch_seconds=(0.95 * step_seconds / steps - micro,) * 3,
        update_seconds=(0.05 * step_seconds,) * 3,
        memory=memory,
        optimizer_steps=4,
        losses=(0.7, 0.69, 0.68, 0.68),
        tokens_per_sample=tokens_per_sample,
        **fields,
    )


def make_record(
    number: int,
    config: TrialConfig,
    samples_per_second: float | None = None,
    *,
    role: Role = Role.SEARCH,
    reason: Reason | None = None,
    message: str = "",
    phase: str | None = None,
    predicted_bytes: int | None = None,
    seconds: float = 4.2,
    why: str | None = None,
    **measured: Any,
) -> TrialRecord:
    """A record: completed at a speed, or ended for a reason (infeasible, skipped or failed, as the reason says)."""
    failure = None if reason is None else Failure(reason=reason, message=message or reason.value, phase=phase)
    measurement = (
        None if samples_per_second is None else make_measurement(config, samples_per_second, **measured)
    )
    outcome = Outcome.COMPLETED if reason is None else _outcome(reason)
    return TrialRecord(
        number=number,
        config=config,
        role=role,
        outcome=outcome,
        measurement=measurement,
        failure=failure,
        seconds=0.0 if outcome is Outcome.SKIPPED else seconds,
        predicted_bytes=predicted_bytes,
        why=why,
    )


def make_result(
    records: Sequence[TrialRecord],
    *,
    best: TrialConfig | None = None,
    defaults: TrialConfig | None = None,
    recipe: TrialConfig | None = None,
    device: Device = GPU,
    memory_limit_bytes: int = 16 * GIB,
    effective_batch: int = 64,
    workload: Workload | None = None,
    **fields: Any,
) -> TuneResult:
    """A result over `records`: the winner is `best`, else the fastest; baselines are found by role unless named."""
    found = estimates(records)
    winner = (
        found[best.key()] if best is not None else max(found.values(), key=lambda e: e.samples_per_second)
    )
    baselines = {
        "defaults": _baseline(defaults, Role.DEFAULTS, records),
        "hand_recipe": _baseline(recipe, Role.HAND_RECIPE, records),
    }
    speedup = {
        name: None if b.estimate is None else winner.samples_per_second / b.estimate.samples_per_second
        for name, b in baselines.items()
    }
    values: dict[str, Any] = {
        "best": winner,
        "confirmed": any(r.role is Role.CONFIRMATION and r.config == winner.config for r in records),
        "baselines": baselines,
        "speedup": speedup,
        "spec": SearchSpec(
            workload=workload or Workload(model="bert-large-uncased", seq_len=128),
            effective_batch=effective_batch,
        ),
        "device": device,
        "software": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "memory_limit_bytes": memory_limit_bytes,
        "trials": tuple(records),
        "cost": Cost(
            seconds=75.0,
            device_seconds=61.0,
            trials=sum(r.outcome is not Outcome.SKIPPED and r.role in SEARCH_ROLES for r in records),
            out_of_memory=sum(r.outcome is Outcome.INFEASIBLE for r in records),
            break_even_hours={name: break_even_hours(75.0, ratio) for name, ratio in speedup.items()},
        ),
        "model": {
            "task": "sequence-classification",
            "seq_len": 128,
            "source": "preset",
            "n_params": 335_143_938,
        },
        "argument_defaults": ARGUMENT_DEFAULTS,
        "stopped": "every configuration was run, or cannot fit",
    }
    return TuneResult(**{**values, **fields})


def _baseline(config: TrialConfig | None, role: Role, records: Sequence[TrialRecord]) -> Baseline:
    own = [r for r in records if (r.config == config if config is not None else r.role is role)]
    if not own:
        return Baseline(config=config, note="was not run")
    if config is None:
        config = own[-1].config
        own = [r for r in records if r.config == config]
    estimate = estimate_of(own)
    return Baseline(config=config, estimate=estimate, note=None if estimate is not None else "does not fit")


def _outcome(reason: Reason) -> Outcome:
    if reason in (Reason.PREDICTED_TOO_BIG, Reason.DOMINATED):
        return Outcome.SKIPPED
    failed = (
        Reason.TIMEOUT,
        Reason.CRASH,
        Reason.UNREADABLE_ANSWER,
        Reason.ERROR,
        Reason.INTERRUPTED,
        Reason.UNSUPPORTED,
    )
    return Outcome.FAILED if reason in failed else Outcome.INFEASIBLE
