"""Hypothesis strategies for the values that cross boundaries. All are legal, and all survive JSON without loss."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from autofit.devices.device import Device, MemoryHolder
from autofit.problem.config import Precision, Scalar, TrialConfig
from autofit.problem.space import divisors
from autofit.problem.spec import SearchSpec, Workload
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Interval, Measurement, Memory
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord

NAMED_BATCHES = (1, 7, 36, 50, 64, 97, 100, 256)  #: effective batches that must multiply out, by promise
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit", "sgd")

INFEASIBLE_REASONS = (
    Reason.OUT_OF_MEMORY,
    Reason.SUSPECTED_OUT_OF_MEMORY,
    Reason.ALLOCATOR_THRASH,
    Reason.NON_FINITE_LOSS,
    Reason.ALL_STEPS_SKIPPED,
    Reason.STEPS_SKIPPED,
    Reason.DEPARTS_FROM_FP32,
    Reason.KNOB_WITHOUT_EFFECT,
)
SKIPPED_REASONS = (Reason.PREDICTED_TOO_BIG, Reason.DOMINATED)
FAILED_REASONS = tuple(r for r in Reason if r not in (*INFEASIBLE_REASONS, *SKIPPED_REASONS))
REASONS_BY_OUTCOME = {
    Outcome.INFEASIBLE: INFEASIBLE_REASONS,
    Outcome.SKIPPED: SKIPPED_REASONS,
    Outcome.FAILED: FAILED_REASONS,
}

seconds = st.floats(min_value=1e-6, max_value=1e3)
short_text = st.text(
    st.characters(codec="utf-8"), max_size=30
)  # any that a file can hold, control characters too
bytes_or_none = st.none() | st.integers(0, 1 << 45)


def effective_batches(largest: int = 10_000) -> st.SearchStrategy[int]:
    """Any effective batch to `largest`, those that are promised more often."""
    return st.sampled_from(NAMED_BATCHES).filter(lambda n: n <= largest) | st.integers(1, largest)


def extras() -> st.SearchStrategy[tuple[tuple[str, Scalar], ...]]:
    """Further keywords as `TrialConfig.extra` holds them; most often none."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "attn_implementation": st.sampled_from(("eager", "sdpa")) | st.none(),
        "torch_compile": st.booleans(),
        "every_n_layers": st.integers(1, 4),
    }
    some = st.fixed_dictionaries({}, optional=choices).map(lambda chosen: tuple(chosen.items()))
    return st.just(()) | some


@st.composite
def trial_configs(draw: st.DrawFn, effective_batch: int | None = None) -> TrialConfig:
    """A configuration; with `effective_batch`, one whose product is exactly that."""
    total = draw(effective_batches()) if effective_batch is None else effective_batch
    size = draw(st.sampled_from(divisors(total)))
    return TrialConfig(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=total // size,
        gradient_checkpointing=draw(st.booleans()),
        precision=draw(st.sampled_from(Precision)),
        optim=draw(st.sampled_from(OPTIMS)),
        extra=draw(extras()),
    )


def memories() -> st.SearchStrategy[Memory]:
    """Counters, each of which may be missing."""
    return st.builds(
        Memory,
        peak_allocated_bytes=bytes_or_none,
        peak_reserved_bytes=bytes_or_none,
        context_bytes=bytes_or_none,
        device_used_bytes=bytes_or_none,
        host_peak_bytes=bytes_or_none,
        alloc_retries=st.integers(0, 50),
    )


def measurements() -> st.SearchStrategy[Measurement]:
    """Raw samples of one trial; losses are finite (a non-finite one is stored as null and comes back as NaN)."""
    return st.builds(
        Measurement,
        micro_step_seconds=st.lists(seconds, min_size=1, max_size=12).map(tuple),
        fetch_seconds=st.lists(seconds, max_size=4).map(tuple),
        update_seconds=st.lists(seconds, max_size=4).map(tuple),
        memory=memories(),
        optimizer_steps=st.integers(0, 100),
        skipped_steps=st.integers(0, 5),
        losses=st.lists(st.floats(-10, 100), max_size=4).map(tuple),
        tokens_per_sample=st.none() | st.floats(1, 8192),
        facts=st.none()
        | st.dictionaries(short_text, st.none() | st.booleans() | st.integers(-(2**63), 2**63) | short_text, max_size=3),
    )


def failures(outcome: Outcome) -> st.SearchStrategy[Failure]:
    """Why a trial has no measurement, for a reason that leads to `outcome`."""
    return st.builds(
        Failure,
        reason=st.sampled_from(REASONS_BY_OUTCOME[outcome]),
        message=short_text,
        phase=st.none() | st.sampled_from(("model", "forward", "backward", "update")),
        traceback=st.none() | short_text,
        log_tail=st.none() | short_text,
        requested_bytes=bytes_or_none,
    )


@st.composite
def trial_records(
    draw: st.DrawFn,
    configs: st.SearchStrategy[TrialConfig] | None = None,
    outcomes: tuple[Outcome, ...] = tuple(Outcome),
    roles: tuple[Role, ...] = tuple(Role),
) -> TrialRecord:
    """A record: a measurement when it completed, else a failure that fits the outcome."""
    outcome = draw(st.sampled_from(outcomes))
    completed = outcome is Outcome.COMPLETED
    return TrialRecord(
        number=draw(st.integers(0, 10_000)),
        config=draw(trial_configs() if configs is None else configs),
        role=draw(st.sampled_from(roles)),
        outcome=outcome,
        measurement=draw(measurements()) if completed else None,
        failure=None if completed else draw(failures(outcome)),
        seconds=0.0 if outcome is Outcome.SKIPPED else draw(seconds),
        predicted_bytes=draw(bytes_or_none),
        why=draw(st.none() | short_text),
    )


def devices() -> st.SearchStrategy[Device]:
    """A CPU or a card."""
    holders = st.builds(MemoryHolder, pid=st.integers(1, 99_999), name=short_text, used_bytes=bytes_or_none)
    return st.builds(
        Device,
        kind=st.sampled_from(("cpu", "cuda")),
        index=st.integers(0, 7),
        name=short_text,
        total_memory_bytes=st.integers(0, 1 << 45),
        free_memory_bytes=bytes_or_none,
        context_bytes=st.integers(0, 1 << 30),
        compute_capability=st.none() | st.sampled_from(("7.5", "8.0", "9.0")),
        precisions=st.lists(st.sampled_from(Precision), unique=True).map(tuple),
        holders=st.lists(holders, max_size=2).map(tuple),
    )


def workloads() -> st.SearchStrategy[Workload]:
    """A named model."""
    return st.builds(
        Workload,
        model=short_text.filter(bool),
        task=st.none() | st.sampled_from(("causal-lm", "sequence-classification")),
        seq_len=st.none() | st.integers(1, 8192),
        trust_remote_code=st.booleans(),
        attn_implementation=st.none() | st.sampled_from(("eager", "sdpa")),
    )


def search_specs() -> st.SearchStrategy[SearchSpec]:
    """The terms of a search, restrictions included."""
    return st.builds(
        SearchSpec,
        workload=workloads(),
        effective_batch=effective_batches(),
        device=st.none() | st.sampled_from(("cpu", "cuda:0")),
        memory_limit_bytes=st.none() | st.integers(1, 1 << 45),
        precisions=st.none() | st.lists(st.sampled_from(Precision), min_size=1, unique=True).map(tuple),
        optims=st.none() | st.lists(st.sampled_from(OPTIMS), min_size=1, unique=True).map(tuple),
        checkpointing=st.none() | st.sampled_from(((True,), (False,), (False, True))),
        batch_sizes=st.none() | st.lists(st.integers(1, 256), min_size=1, unique=True).map(tuple),
        trials=st.none() | st.integers(1, 100),
        timeout_seconds=st.none() | st.floats(1, 1e5),
        trial_timeout_seconds=st.none() | st.floats(1, 1e5),
        sampler=st.sampled_from(("auto", "tpe", "random", "grid")),
        seed=st.integers(0, 1 << 31),
        tolerance=st.floats(0, 0.5),
    )


@st.composite
def landscapes(draw: st.DrawFn) -> Landscape:
    """A grid at one effective batch, with what a landscape file can hold: samples and the two peaks."""
    configs = draw(
        st.lists(
            trial_configs(effective_batch=draw(effective_batches(512))),
            min_size=1,
            max_size=8,
            unique_by=TrialConfig.key,
        )
    )
    return Landscape(
        points=tuple(Point(config=config, measurement=draw(_recorded())) for config in configs),
        device=draw(devices()),
        spec=draw(st.dictionaries(short_text, st.none() | st.integers(-(2**63), 2**63) | short_text, max_size=3)),
        software=draw(st.dictionaries(short_text, short_text, max_size=3)),
        modelled=draw(st.booleans()),
    )


def _recorded() -> st.SearchStrategy[Measurement | None]:
    memory = st.builds(Memory, peak_allocated_bytes=bytes_or_none, peak_reserved_bytes=bytes_or_none)
    samples = st.lists(seconds, max_size=4).map(tuple)
    return st.none() | st.builds(
        Measurement,
        micro_step_seconds=st.lists(seconds, min_size=1, max_size=4).map(tuple),
        fetch_seconds=samples,
        update_seconds=samples,
        memory=memory,
    )


def intervals() -> st.SearchStrategy[Interval]:
    """A pair of bounds in order."""
    return st.tuples(seconds, seconds).map(lambda pair: Interval(low=min(pair), high=max(pair)))
