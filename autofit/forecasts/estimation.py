"""How much memory a training takes, answered without running it: `autofit.estimate` and what is behind `autofit estimate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofit.devices.target import Target, target_of
from autofit.errors import UserError
from autofit.forecasts.laws import Ask, ClassLaws, Setting, collect, law_class, uneven
from autofit.forecasts.modelfacts import load_facts, shape_of, store_facts
from autofit.memory.anatomy import dissect
from autofit.memory.formula import estimate_by_formula
from autofit.problem.arguments import DEFAULT_BATCH
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import divisors
from autofit.problem.spec import MAX_EFFECTIVE_BATCH, Workload
from autofit.processes.inputs import live_workload
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import Kind
from autofit.units import format_bytes

SCHEMA, VERSION = "autofit/estimate", 1
ESTIMATE_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What an answer is about, with what was left out filled in.

    Attributes:
        model: its name.
        task: an auto class's name in kebab case; None where a live model has none that is known.
        seq_len: tokens of the longest sample (samples of audio for speech, patches of an image); None where the data does not tell.
        adapter: the adapter and the storage of the weights under it, in words; None = all of the model is trained as it is.
    """

    model: str
    task: str | None = None
    seq_len: int | None = None
    adapter: str | None = None

    @classmethod
    def of(cls, setting: Setting) -> Subject:
        """The subject of a setting: what its child found out, where the user did not say."""
        workload, facts = setting.workload, setting.facts
        return cls(
            model=workload.model,
            task=facts.get("task") or workload.task,
            seq_len=facts.get("sample_length", facts.get("seq_len") or workload.seq_len),
            adapter=None if workload.adaptation is None else workload.adaptation.label(),
        )

    def label(self) -> str:
        """In one line."""
        named = f"{self.model} with {self.adapter}" if self.adapter else self.model
        return ", ".join(filter(None, (named, self.task, f"length {self.seq_len}" if self.seq_len else "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted peak memory of one configuration on one device. All sizes in bytes.

    Attributes:
        subject: the model, its task, and how long its samples are.
        config: what was asked.
        device: name of the card, or of the memory size.
        memory_bytes: what a run may use there, context included; None = not said.
        peak_allocated_bytes: most bytes in live tensors.
        peak_reserved_bytes: most bytes that the caching allocator holds when memory is no limit.
        min_capacity_bytes: smallest memory (context not counted) in which the training survives.
        context_bytes: what the device loses before the first tensor.
        device_used_bytes: context + peak reserved: what the driver shows.
        anatomy: the parts at the peak and where the peak is, see `memory.anatomy`.
        fits: whether it survives in `memory_bytes`; None when that was not said.
        confidence: `traced` (within about a percent at fixed shapes) or `formula` (see `warnings` for its usual error).
        warnings: one sentence each.
        usual_error: relative error to expect of a `formula`; None where it is a lower bound, and what is left out is not known.
    """

    subject: Subject
    config: TrialConfig
    device: str
    memory_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    min_capacity_bytes: int
    context_bytes: int
    device_used_bytes: int
    anatomy: Mapping[str, Any]
    fits: bool | None
    confidence: str
    warnings: tuple[str, ...] = ()
    usual_error: float | None = 0.0

    def __str__(self) -> str:
        """The answer on one line; `autofit estimate` prints the parts of it."""
        size = "" if self.memory_bytes is None else f" of {format_bytes(self.memory_bytes)}"
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return f"{self.config.label()} on {self.device}: {format_bytes(self.device_used_bytes)}{size}{fits} ({self.confidence})"

    @property
    def spare_bytes(self) -> int | None:
        """Memory that would be left at the smallest footprint; negative when it does not fit; None without a size."""
        return (
            None
            if self.memory_bytes is None
            else self.memory_bytes - self.context_bytes - self.min_capacity_bytes
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `autofit estimate --json` prints."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **asdict(self),
            "config": self.config.to_json(),
            "anatomy": dict(self.anatomy),
            "warnings": list(self.warnings),
        }


def estimate(
    model: Any = None,
    *,
    batch_size: int | None = None,
    effective_batch: int | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    precision: str = "fp32",
    checkpointing: bool = False,
    optim: str = "adamw_torch_fused",
    attn_implementation: str | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    padded: bool = False,
    trust_remote_code: bool = False,
    model_init: Callable[[], Any] | None = None,
    train_dataset: Any = None,
    data_collator: Any = None,
    processing_class: Any = None,
    args: Any = None,
    trainer_cls: type | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    quantize: str | None = None,
) -> MemoryEstimate:
    """Predict the peak memory of a training without running it.

    Two optimizer steps of the real model are traced on tensors that do not exist, and the allocations are replayed through a model of
    PyTorch's caching allocator. Works on a machine without a GPU, for any card.

    Args:
        model: as for `tune`: a name, a path, a config, a module, or a function that builds one.
        batch_size: per-device batch; None = 8, or the largest divisor of `effective_batch` up to 8.
        effective_batch: samples per optimizer step; None = the batch size (no accumulation).
        task, seq_len, precision, checkpointing, optim, attn_implementation: of the training.
        gpu: a card's name (`A100-80GB`); None = only `memory` counts.
        memory: bytes of the device that the run may use; None = all of `gpu`.
        padded: whether batches hold padding, so that attention needs a mask.
        trust_remote_code: whether the model's own code may run.
        model_init, train_dataset, data_collator, processing_class, trainer_cls, trainer_kwargs: as for `tune`.
        args: `TrainingArguments` whose other fields are kept; batch, accumulation, precision, checkpointing and optimizer are those said here.
        peft_config, quantize: an adapter that is trained, and how the weights under it are stored, as for `tune`.

    Raises:
        UserError: an input cannot be used.
    """
    target = target_of(gpu, memory)
    config = config_of(
        batch_size=batch_size,
        effective_batch=effective_batch,
        precision=precision,
        checkpointing=checkpointing,
        optim=optim,
    )
    with live_workload(
        model=model,
        model_init=model_init,
        task=task,
        seq_len=seq_len,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        train_dataset=train_dataset,
        data_collator=data_collator,
        processing_class=processing_class,
        args=args,
        trainer_cls=trainer_cls,
        trainer_kwargs=trainer_kwargs,
        peft_config=peft_config,
        quantize=quantize,
    ) as workload:
        return estimate_all(workload, [config], target, padded=padded)[0]


def config_of(
    *, batch_size: int | None, effective_batch: int | None, precision: str, checkpointing: bool, optim: str
) -> TrialConfig:
    """The configuration that is meant.

    Raises:
        UserError: a batch below 1 or above `MAX_EFFECTIVE_BATCH`, or one that does not divide the effective batch.
    """
    for name, value in (("batch size", batch_size), ("effective batch", effective_batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{name} must be a positive whole number, got {value!r}")
        if value is not None and value > MAX_EFFECTIVE_BATCH:
            raise UserError(f"{name} must be at most {MAX_EFFECTIVE_BATCH}, got {value}")
    if batch_size is None:
        batch_size = (
            DEFAULT_BATCH
            if effective_batch is None
            else max(d for d in divisors(effective_batch) if d <= DEFAULT_BATCH)
        )
    effective_batch = effective_batch or batch_size
    if effective_batch % batch_size:
        near = [d for d in divisors(effective_batch) if d <= batch_size][-1]
        raise UserError(
            f"batch size {batch_size} does not divide the effective batch {effective_batch} exactly",
            hint=f"the next smaller that does is {near}",
        )
    return TrialConfig(
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=effective_batch // batch_size,
        gradient_checkpointing=checkpointing,
        precision=Precision(precision) if isinstance(precision, str) and precision in set(Precision) else precision,  # type: ignore[arg-type]
        optim=optim,
    )


def estimate_all(
    workload: Workload, configs: Sequence[TrialConfig], target: Target, *, padded: bool = False
) -> list[MemoryEstimate]:
    """One estimate per configuration, in order."""
    with asking(workload) as (facts, ask):
        setting = Setting(
            workload=workload, facts=facts, compute_capability=target.compute_capability, padded=padded or uneven(facts)
        )
        laws = collect(setting, configs, ask, single=any(c.per_device_train_batch_size == 1 for c in configs))
        return [_estimate(setting, config, laws[law_class(setting, config)], target) for config in configs]


@contextlib.contextmanager
def asking(workload: Workload) -> Iterator[tuple[dict[str, Any], Ask]]:
    """(facts about the model, how to ask a child for laws); a child is started only when the caches do not know.

    Raises:
        UserError: the model cannot be resolved.
    """
    with contextlib.ExitStack() as stack:
        started: list[ProcessRunner] = []

        def runner() -> ProcessRunner:
            if not started:
                started.append(stack.enter_context(ProcessRunner(workload, "cpu")))
            return started[0]

        kept = workload.objects_path is None and workload.data is None
        facts = load_facts(workload) if kept else None
        if facts is None:
            facts = runner().describe()["model"]
            store_facts(workload, facts)
        yield facts, lambda payload: runner().ask(Kind.ESTIMATE, payload, timeout=ESTIMATE_TIMEOUT_SECONDS)


def _estimate(setting: Setting, config: TrialConfig, found: ClassLaws, target: Target) -> MemoryEstimate:
    if found.laws is None:
        return _by_formula(setting, config, found.reason or "", target)
    law, batch = found.laws.memory, config.per_device_train_batch_size
    peaks = law.predict(batch)
    anatomy = dissect(
        law.trace(batch),
        context_bytes=target.context_bytes,
        seen=law.replay(batch),
        reserved_bytes=peaks.peak_reserved_bytes,
    )
    return MemoryEstimate(
        subject=Subject.of(setting),
        config=config,
        device=target.name,
        memory_bytes=target.memory_bytes,
        peak_allocated_bytes=peaks.peak_allocated_bytes,
        peak_reserved_bytes=peaks.peak_reserved_bytes,
        min_capacity_bytes=peaks.min_capacity_bytes,
        context_bytes=target.context_bytes,
        device_used_bytes=target.context_bytes + peaks.peak_reserved_bytes,
        anatomy=anatomy.to_json(),
        fits=_fits(target, peaks.min_capacity_bytes),
        confidence="traced",
        warnings=(*target.warnings, *unusual(config.precision, target), *paged(config.optim), *law.base.facts.notes),
    )


def _by_formula(setting: Setting, config: TrialConfig, reason: str, target: Target) -> MemoryEstimate:
    facts = setting.facts
    if config.gradient_checkpointing and facts.get("supports_gradient_checkpointing") is False:
        raise UserError("this model cannot checkpoint activations", hint="leave --checkpointing (checkpointing=) out")
    answer = estimate_by_formula(
        shape_of(facts),
        batch=config.per_device_train_batch_size,
        precision=config.precision,
        optim=config.optim,
        checkpointing=config.gradient_checkpointing,
        accumulates=config.gradient_accumulation_steps > 1,
        fused_attention=(setting.workload.attn_implementation or facts.get("attn_implementation")) == "sdpa",
    )
    total = answer.peaks.peak_reserved_bytes + target.context_bytes
    parts = {str(kind): size for kind, size in answer.kinds.items()} | {"context": target.context_bytes}
    error = "a lower bound" if answer.usual_error is None else f"usually within {answer.usual_error:.0%}"
    return MemoryEstimate(
        subject=Subject.of(setting),
        config=config,
        device=target.name,
        memory_bytes=target.memory_bytes,
        peak_allocated_bytes=answer.peaks.peak_allocated_bytes,
        peak_reserved_bytes=answer.peaks.peak_reserved_bytes,
        min_capacity_bytes=answer.peaks.min_capacity_bytes,
        context_bytes=target.context_bytes,
        device_used_bytes=total,
        anatomy={
            "parts": {name: {"bytes": size, "share": round(size / total, 6)} for name, size in parts.items()},
            "peak": None,
        },
        fits=_fits(target, answer.peaks.min_capacity_bytes),
        confidence="formula",
        warnings=(
            *target.warnings,
            *unusual(config.precision, target),
            f"this could not be traced ({reason}): a closed formula answered, {error}",
            *answer.notes,
        ),
        usual_error=answer.usual_error,
    )


def unusual(precision: Precision, target: Target) -> tuple[str, ...]:
    """That the device does not compute in this precision natively."""
    needed = Precision.BF16 if precision is Precision.PURE_BF16 else precision
    if needed in target.precisions:
        return ()
    return (f"{target.name} has no native {needed}: transformers refuses it or emulates it slowly, and a search leaves it out",)


def paged(optim: str) -> tuple[str, ...]:
    """That figures of the allocator leave out what an optimizer pages."""
    if not optim.startswith("paged_"):
        return ()
    return (f"{optim}: its large states are in memory that the driver moves between card and host as there is room: they are in none of these figures",)


def _fits(target: Target, capacity_bytes: int) -> bool | None:
    return (
        None if target.memory_bytes is None else target.context_bytes + capacity_bytes <= target.memory_bytes
    )
