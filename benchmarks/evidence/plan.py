"""What is to be run: the full plan for a card, and a tiny one that goes the same way on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec, Workload
from autofit.units import GIB

ROOT = Path(__file__).resolve().parents[2]
FOUNDING_TABLE = ROOT / "tests" / "data" / "founding-measurements.json"
FUSED, FOREACH, ADAFACTOR, EIGHT_BIT = "adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit"
FP32, TF32, BF16, FP16 = Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One grid, and the searches on it.

    Attributes:
        name: of its file.
        workload, effective_batch: what is trained.
        limits: memory limits of the searches; None = what is free.
        precisions, optims: restrictions; None = all that the machine can run.
    """

    name: str
    workload: Workload
    effective_batch: int
    limits: tuple[int | None, ...] = (None, 24 * GIB, 16 * GIB)
    precisions: tuple[Precision, ...] | None = None
    optims: tuple[str, ...] | None = None

    def spec(self, device: str, **terms: Any) -> SearchSpec:
        """The terms of a search or a recording on `device`."""
        return SearchSpec(
            workload=self.workload,
            effective_batch=self.effective_batch,
            device=device,
            precisions=self.precisions,
            optims=self.optims,
            **terms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of one model; `key` names it in a sheet."""

    model: str
    workload: Workload
    config: TrialConfig

    @property
    def key(self) -> str:
        """Unique within a stage."""
        return f"{self.model} {self.config.label()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that decides what a run does.

    Attributes:
        shares: stage -> share of the whole time.
        memory: configurations whose memory is measured and predicted, those of most worth first.
        snapshots: of them, those whose allocator history is compared event by event.
        problems: grids, in order of worth.
        window_seconds: measured time per point of a grid.
        search_seconds, search_trials: bounds of one search; None = none but the box.
        fidelity: trials that are compared with long runs.
        long_steps, confirm_steps: optimizer steps of those, where the box allows.
        limits: the small model on which limits are tried: fits and does not fit in `limit_bytes` beside the context.
        oom_limit_bytes: in which out of memory is provoked, beside the context.
        founding: model of the founding table; `founding_steps` optimizer steps each.
        startups: children started for the median of the start-up.
    """

    shares: Mapping[str, float]
    memory: tuple[Case, ...]
    snapshots: tuple[Case, ...]
    problems: tuple[Problem, ...]
    window_seconds: float
    search_seconds: float | None
    search_trials: int | None
    fidelity: tuple[Case, ...]
    long_steps: int
    confirm_steps: int
    limits: tuple[Case, Case]
    limit_bytes: int
    oom_limit_bytes: int
    founding: Workload
    founding_steps: int
    startups: int


SHARES = {
    "facts": 1.5,
    "tests": 3.5,
    "oom": 1.5,
    "memory": 4.5,
    "landscape": 6.5,
    "search": 4.0,
    "fidelity": 2.5,
    "founding": 1.0,
}
STAGE_NAMES = tuple(SHARES)

BERT_LARGE = Workload(model="bert-large-uncased", task="sequence-classification", seq_len=512)
BERT_BASE = Workload(model="bert-base-uncased", task="sequence-classification", seq_len=128)
GPT2_MEDIUM = Workload(model="gpt2-medium", task="causal-lm", seq_len=1024)
LLAMA_1B = Workload(model="llama-3.2-1b", task="causal-lm", seq_len=1024)
T5_BASE = Workload(model="t5-base", task="seq2seq-lm", seq_len=512)
VIT_BASE = Workload(model="vit-base-patch16-224", task="image-classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the memory stage with two batch sizes."""

    name: str
    workload: Workload
    small: int
    large: int


MODELS = (
    Model(name="bert-large", workload=BERT_LARGE, small=4, large=16),
    Model(name="gpt2-medium", workload=GPT2_MEDIUM, small=2, large=8),
    Model(name="llama-1b", workload=LLAMA_1B, small=1, large=4),
    Model(name="t5-base", workload=T5_BASE, small=4, large=16),
    Model(name="vit-base", workload=VIT_BASE, small=16, large=64),
)
#: large batch?, accumulation, precision, checkpointing, optimizer: ten per model, eight of them without 8-bit optimizers
SHAPES: tuple[tuple[bool, int, Precision, bool, str], ...] = (
    (False, 1, FP32, False, FUSED),
    (True, 1, BF16, False, FUSED),
    (False, 2, BF16, False, FUSED),
    (True, 2, BF16, True, FUSED),
    (False, 1, BF16, False, ADAFACTOR),
    (False, 2, FP16, False, FUSED),
    (True, 2, BF16, True, EIGHT_BIT),
    (False, 1, FP32, True, FOREACH),
    (True, 1, TF32, False, FUSED),
    (False, 2, BF16, False, EIGHT_BIT),
    (True, 2, FP32, True, ADAFACTOR),
)


def memory_cases(
    models: Sequence[Model], shapes: Sequence[tuple[bool, int, Precision, bool, str]] = SHAPES
) -> tuple[Case, ...]:
    """Every shape for every model, one shape after the other, so that a short box still sees all models."""
    return tuple(
        Case(
            model=model.name,
            workload=model.workload,
            config=TrialConfig(
                per_device_train_batch_size=model.large if large else model.small,
                gradient_accumulation_steps=accumulation,
                precision=precision,
                gradient_checkpointing=checkpointing,
                optim=optim,
            ),
        )
        for large, accumulation, precision, checkpointing, optim in shapes
        for model in models
    )


def case(model: str, workload: Workload, batch: int, accumulation: int = 1, **knobs: Any) -> Case:
    """A configuration in one line."""
    config = TrialConfig(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **knobs)
    return Case(model=model, workload=workload, config=config)


def full_plan() -> Plan:
    """For a card of 24 GiB or more."""
    return Plan(
        shares=SHARES,
        memory=memory_cases(MODELS),
        snapshots=(
            case("bert-large", BERT_LARGE, 4, 2, precision=BF16),
            case("gpt2-medium", GPT2_MEDIUM, 2, precision=FP32, gradient_checkpointing=True, optim=FOREACH),
        ),
        problems=(
            Problem(name="bert-large-64", workload=BERT_LARGE, effective_batch=64),
            Problem(name="gpt2-medium-32", workload=GPT2_MEDIUM, effective_batch=32),
            Problem(name="vit-base-256", workload=VIT_BASE, effective_batch=256),
        ),
        window_seconds=0.5,
        search_seconds=240.0,
        search_trials=None,
        fidelity=(
            case("bert-large", BERT_LARGE, 16, precision=BF16),
            case("vit-base", VIT_BASE, 64, precision=BF16),
            case("gpt2-medium", GPT2_MEDIUM, 4, 2, precision=BF16),
            case("bert-large", BERT_LARGE, 4, 2, precision=TF32, gradient_checkpointing=True),
            case("bert-large", BERT_LARGE, 8, 8, precision=BF16),
        ),
        long_steps=500,
        confirm_steps=50,
        limits=(case("bert-base", BERT_BASE, 4, 2), case("bert-base", BERT_BASE, 512)),
        limit_bytes=3 * GIB,
        oom_limit_bytes=700 << 20,
        founding=BERT_LARGE,
        founding_steps=32,
        startups=5,
    )


_TINY = {"vocab_size": 300, "bos_token_id": 298, "eos_token_id": 299}
_TINY_ENCODER = {
    **_TINY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"model_type": "bert", **_TINY_ENCODER},
    "gpt2": {"model_type": "gpt2", **_TINY, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama": {"model_type": "llama", **_TINY_ENCODER, "num_key_value_heads": 2, "head_dim": 16},
    "t5": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": 300,
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 64,
        "num_labels": 10,
    },
}
_TINY_TASKS = {
    "bert": "sequence-classification",
    "gpt2": "causal-lm",
    "llama": "causal-lm",
    "t5": "seq2seq-lm",
    "vit": "image-classification",
}


def tiny_plan(directory: Path) -> Plan:
    """The same way with models of a hundred thousand parameters; their configs are written into `directory`."""
    models = [_tiny_model(name, directory) for name in TINY_CONFIGS]
    bert = models[0].workload
    shapes = ((False, 1, FP32, False, FUSED), (True, 2, FP32, True, ADAFACTOR))
    return replace(
        full_plan(),
        shares={
            "facts": 25.0,
            "tests": 22.0,
            "oom": 22.0,
            "memory": 32.0,
            "landscape": 16.0,
            "search": 22.0,
            "fidelity": 16.0,
            "founding": 8.0,
        },
        memory=memory_cases(models, shapes),
        snapshots=(case("bert", bert, 2, 2),),
        problems=(
            Problem(
                name="tiny-bert-2",
                workload=bert,
                effective_batch=2,
                limits=(None, 2 * GIB),
                optims=(FUSED, ADAFACTOR),
            ),
        ),
        window_seconds=0.05,
        search_seconds=10.0,
        search_trials=3,
        fidelity=(case("bert", bert, 2), case("bert", bert, 2, 2, gradient_checkpointing=True)),
        long_steps=8,
        confirm_steps=3,
        limits=(case("bert", bert, 2), case("bert", bert, 32768)),
        limit_bytes=2 * GIB,
        founding=bert,
        founding_steps=3,
        startups=2,
    )


def _tiny_model(name: str, directory: Path) -> Model:
    path = directory / f"tiny-{name}.json"
    path.write_text(json.dumps(TINY_CONFIGS[name]))
    seq_len = None if name == "vit" else 32
    workload = Workload(model=str(path), task=_TINY_TASKS[name], seq_len=seq_len)
    return Model(name=name, workload=workload, small=2, large=4)
