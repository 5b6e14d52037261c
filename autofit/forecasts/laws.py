"""Memory and cost laws of many configurations: from the cache, else traced by a child, else the reason why there is none.

Configurations that share a class (precision but for tf32, checkpointing, optimizer, accumulation 1 or more, attention, ...) share one law for all
batch sizes. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.memory.cache import CachedLaws, LawKey, load_laws, store_laws
from autofit.memory.law import MemoryLaw
from autofit.memory.request import OUT_OF_PATIENCE, TraceRequest
from autofit.memory.roofline import CostLaw
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload

Ask = Callable[[dict[str, Any]], dict[str, Any]]
TRACING = ("memory", "tracing", "workload")  #: packages whose sources decide what a trace holds
STEERING = ("TORCH_CUDNN_SDPA_DEPRIORITIZED",)  #: environment variables of torch's that the trace follows
VERSIONED = ("torch", "transformers", "accelerate", "bitsandbytes", "peft")
SINGLE_TRACE_BATCHES, LAW_BATCHES = (1, 2, 4), (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLaws:
    """What is known of one class: laws, or why there are none."""

    laws: CachedLaws | None
    reason: str | None = None

    @property
    def late(self) -> bool:
        """Whether it was not traced because the time for that was over."""
        return self.reason is not None and self.reason.startswith(OUT_OF_PATIENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All of a trace that is not the configuration.

    Attributes:
        workload: what is trained.
        facts: a child's description of the model (`digest`, `task`, `seq_len`, ...).
        compute_capability: of the card, `8.0`.
        padded: whether batches hold padding.
        label_smoothing_factor, max_grad_norm: as in TrainingArguments.
    """

    workload: Workload
    facts: Mapping[str, Any]
    compute_capability: str = "8.0"
    padded: bool = False
    label_smoothing_factor: float = 0.0
    max_grad_norm: float = 1.0

    @property
    def kept_on_disk(self) -> bool:
        """Whether a law may be kept: not where code of the user's decides what is allocated, which no digest of a config tells."""
        return self.workload.objects_path is None and self.workload.data is None and not self.workload.trust_remote_code

    def request(self, config: TrialConfig) -> TraceRequest:
        """The trace of `config`'s class at its own batch."""
        return TraceRequest(
            workload=self.workload,
            config=config,
            batch=config.per_device_train_batch_size,
            seq_len=self.facts.get("seq_len"),
            compute_capability=self.compute_capability,
            padded=self.padded,
            max_grad_norm=self.max_grad_norm,
            label_smoothing_factor=self.label_smoothing_factor,
        )

    def cache_key(self, config: TrialConfig) -> LawKey:
        """Where the class's laws are kept."""
        precision = Precision.FP32 if config.precision is Precision.TF32 else config.precision
        return LawKey(
            model=str(self.facts["digest"]),
            task=self.facts.get("task"),
            seq_len=self.facts.get("seq_len"),
            precision=str(precision),
            optim=config.optim,
            checkpointing="on" if config.gradient_checkpointing else "off",
            attention=self.workload.attn_implementation or self.facts.get("attn_implementation"),
            compute_capability=self.compute_capability,
            padded=self.padded,
            accumulates=config.gradient_accumulation_steps > 1,
            versions=versions(),
            extra={
                **dict(config.extra),
                "label_smoothing_factor": self.label_smoothing_factor,
                "max_grad_norm": self.max_grad_norm,
            },
        )


def uneven(facts: Mapping[str, Any]) -> bool:
    """Whether a child found rows of several lengths, so that batches hold padding."""
    return bool((facts.get("data") or {}).get("uneven"))


def versions() -> dict[str, str]:
    """Installed versions that decide what a training step allocates (read without importing them), and the environment's say in it."""
    found = {"tracer": _tracer()} | {name: os.environ[name] for name in STEERING if name in os.environ}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _tracer() -> str:
    """Changes with every change of the sources that trace: a number to raise by hand would be forgotten once."""
    digest, home = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for package in TRACING for path in (home / package).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def law_class(setting: Setting, config: TrialConfig) -> str:
    """A string that is equal for configurations that share a law."""
    return setting.request(config).class_key()


def collect(
    setting: Setting,
    configs: Iterable[TrialConfig],
    ask: Ask,
    *,
    workers: int = 1,
    single: bool = False,
    patience_seconds: float | None = None,
) -> dict[str, ClassLaws]:
    """Class -> laws, for all configurations. Those asked for together share traces, see `tracing.shared`.

    Args:
        setting: what is trained and for which card.
        configs: whose classes are wanted.
        ask: sends an estimate request to a child and returns its payload.
        workers: processes that trace at a time.
        single: whether batch 1, which has a structure of its own, is traced too (half as long again).
        patience_seconds: no trace begins after this time (`ClassLaws.late`); None = no limit, 0 = the cache must answer.
    """
    found: dict[str, ClassLaws] = {}
    missing: dict[str, TrialConfig] = {}
    for config in configs:
        key = law_class(setting, config)
        if key in found or key in missing:
            continue
        kept = load_laws(setting.cache_key(config)) if setting.kept_on_disk else None
        if kept is not None and (kept.memory.single is not None or not single):
            found[key] = ClassLaws(laws=kept)
        else:
            missing[key] = config
    if patience_seconds is not None and patience_seconds <= 0:
        late = ClassLaws(laws=None, reason=f"{OUT_OF_PATIENCE} {patience_seconds:.0f} s")
        return found | dict.fromkeys(missing, late)
    if missing:
        batches = SINGLE_TRACE_BATCHES if single else LAW_BATCHES
        ways = {"batches": list(batches), "workers": workers, "patience_seconds": patience_seconds}
        found |= _traced(setting, missing, lambda requests: ask({"requests": requests, **ways}))
    return found


def _traced(
    setting: Setting,
    missing: Mapping[str, TrialConfig],
    ask: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, ClassLaws]:
    answers = ask([setting.request(config).to_json() for config in missing.values()])["answers"]
    found = {}
    for (key, config), answer in zip(missing.items(), answers):
        if answer["law"] is None:
            found[key] = ClassLaws(laws=None, reason=str(answer["reason"]))
            continue
        laws = CachedLaws(
            memory=MemoryLaw.from_json(answer["law"]),
            cost=None if answer["costs"] is None else CostLaw.from_json(answer["costs"]),
        )
        if setting.kept_on_disk:
            store_laws(setting.cache_key(config), laws)
        found[key] = ClassLaws(laws=laws)
    return found
