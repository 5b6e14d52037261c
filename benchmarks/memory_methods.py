"""Other ways to answer "how much memory does this training take", asked the same questions: accelerate, the closed formula, packages from PyPI.

Nothing is tuned or corrected: each method gets every input that it has a parameter for, and what it cannot be told is in its `ignores`. The packages are
optional; a method whose package is missing is left out and said so.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autofit.memory.formula import ModelShape, estimate_by_formula, optimizer_state_bytes
from autofit.problem.config import PRECISION_FACTS, Precision
from autofit.units import GIB

PACKAGES = "pip install --no-deps torch-kitsune==0.7.0 gpu-estimator==0.2.0 llm-analysis==0.2.2 'fire<0.6' termcolor six"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One training step.

    Attributes:
        config: the model's transformers config.
        n_params: of the model that is trained, head included.
        batch, seq_len: of one micro-step; images count as patches.
        text: whether the inputs are tokens.
        accumulates: more than one micro-step per update.
        logits: whether a language model's head is trained.
    """

    config: Any
    n_params: int
    batch: int
    seq_len: int
    precision: Precision
    optim: str
    checkpointing: bool
    accumulates: bool
    text: bool = True
    logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to answer.

    Attributes:
        name: for tables.
        package: distribution that it needs; None = this one.
        ask: bytes, or None when it has no answer to such a question.
        has_overhead: whether its number already holds a margin for context and allocator, so that no context is added to it.
        ignores: what it has no parameter for, or gets wrong by construction.
    """

    name: str
    package: str | None
    ask: Callable[[Question], int | None]
    has_overhead: bool
    ignores: str

    @property
    def version(self) -> str | None:
        """Of its package; None when it is not installed."""
        if self.package is None:
            return "here"
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def by_accelerate(question: Question) -> int:
    """What `accelerate estimate-memory` prints under "Training using Adam", by its own functions; the model is built as it builds it."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    with init_empty_weights():
        model = AutoModel.from_config(question.config, dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    names = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
    usage = estimate_training_usage(total, names.get(question.precision, "float32"))
    return max(usage.values())


def by_formula(question: Question) -> int:
    """Our closed formula, the fall-back of `autofit estimate`."""
    config = question.config
    shape = ModelShape(
        n_params=question.n_params,
        hidden_size=getattr(config, "hidden_size", None),
        layers=getattr(config, "num_hidden_layers", None),
        heads=getattr(config, "num_attention_heads", None),
        vocab_size=getattr(config, "vocab_size", None) if question.logits else None,
        seq_len=question.seq_len,
    )
    answer = estimate_by_formula(
        shape,
        batch=question.batch,
        precision=question.precision,
        optim=question.optim,
        checkpointing=question.checkpointing,
        accumulates=question.accumulates,
    )
    return answer.peaks.peak_allocated_bytes


def by_llm_analysis(question: Question) -> int | None:
    """llm-analysis (decoder-only transformers after Megatron-LM): the sum that its `training` reports.

    `training` itself refuses fp32 when it comes to latency, so its public methods are called one by one, in its order. In fp32 there is no
    master copy: its `other_op_bytes` is lowered by the copy that it always adds.
    """
    config = question.config
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or hidden is None or not question.text or getattr(config, "is_encoder_decoder", False):
        return None
    logging.getLogger("llm_analysis").setLevel(logging.ERROR)
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig

    inner = next(
        (
            v
            for n in ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner")
            if (v := getattr(config, n, None))
        ),
        4 * hidden,
    )
    model = ModelConfig(
        name="asked",
        num_layers=layers,
        n_head=config.num_attention_heads,
        hidden_dim=hidden,
        vocab_size=config.vocab_size,
        max_seq_len=question.seq_len,
        num_key_value_heads=getattr(config, "num_key_value_heads", None),
        ffn_embed_dim=inner,
        expansion_ratio=inner / hidden,
    )
    half = PRECISION_FACTS[question.precision].autocast_dtype is not None
    bits = 16 if half else 32
    card = GPUConfig("any", 80, 1000, 300, 1e-6, 100)
    told = LLMAnalysis(
        model, card, DtypeConfig("asked", bits, bits, bits), flops_efficiency=0.5, hbm_memory_efficiency=0.5
    )
    other = (optimizer_state_bytes(question.optim) or 0.0) - (0 if half else 4)
    recompute = ActivationRecomputation.FULL if question.checkpointing else ActivationRecomputation.NONE
    state, gradients = told.get_memory_optimizer_state_and_gradient_per_layer(4, other)
    parts = [
        told.get_memory_embedding(),
        told.get_weight_memory_per_layer() * layers,
        told.get_weight_memory_last_layernorm(),
        (state + gradients) * layers,
        *told.get_memory_optimizer_state_and_gradient_embedding(4, other),
        *told.get_memory_optimizer_state_and_gradient_last_layernorm(4, other),
        told.get_activation_memory_per_layer(
            question.batch,
            question.seq_len,
            is_inference=False,
            activation_recomputation=recompute,
            flash_attn=False,
            softmax_dropout=True,
        )
        * layers,
        told.get_activation_memory_output_embedding(question.batch, question.seq_len),
        told.get_activation_memory_per_layernorm(question.batch, question.seq_len, recompute),
    ]
    return int(sum(parts))


def by_kitsune(question: Question) -> int | None:
    """torch-kitsune's `predict_memory` on the model that its own Hugging Face door builds (AutoModel on the meta device)."""
    if not question.text:
        return None
    import torch
    from kitsune.predict import predict_memory
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(question.config)
    model.eval()
    names = {Precision.FP16: "fp16", Precision.BF16: "bf16"}
    optims = {"adafactor": "adafactor", "sgd": "sgd", "adamw_bnb_8bit": "adam8bit"}
    answer = predict_memory(
        model,
        (question.seq_len,),
        question.batch,
        names.get(question.precision, "fp32"),
        optims.get(question.optim, "adamw"),
        True,
    )
    return int(answer.total_bytes)


def by_gpu_estimator(question: Question) -> int | None:
    """gpu-estimator's `GPUEstimator.estimate`, from the number of parameters."""
    if not question.text:
        return None
    from gpu_estimator.estimator import GPUEstimator

    names = {Precision.FP16: "fp16", Precision.BF16: "bf16"}
    answer = GPUEstimator().estimate(
        question.n_params,
        batch_size=question.batch,
        sequence_length=question.seq_len,
        precision=names.get(question.precision, "fp32"),
        optimizer="sgd" if question.optim == "sgd" else "adamw",
        gradient_checkpointing=question.checkpointing,
    )
    return int(answer.total_memory_gb * GIB)


METHODS = (
    Method(
        name="closed formula",
        package=None,
        ask=by_formula,
        has_overhead=False,
        ignores="allocator, temporaries of backward, the head of a classifier; gated and grouped architectures are priced as plain ones",
    ),
    Method(
        name="accelerate",
        package="accelerate",
        ask=by_accelerate,
        has_overhead=False,
        ignores="batch, sequence, optimizer (always Adam), checkpointing, accumulation: it is four times the weights in fp32, and twice in fp16",
    ),
    Method(
        name="llm-analysis",
        package="llm-analysis",
        ask=by_llm_analysis,
        has_overhead=False,
        ignores="accumulation, allocator; counts logits of a language model always and the peak of each part as if at the same moment",
    ),
    Method(
        name="torch-kitsune",
        package="torch-kitsune",
        ask=by_kitsune,
        has_overhead=True,
        ignores="checkpointing, accumulation, Adafactor and 8-bit optimizers (counted with the state of AdamW); it feeds the model real numbers instead of token ids, its two tracers fail on that in silence, and its last resort counts linear layers as if they saw one token per sample",
    ),
    Method(
        name="gpu-estimator",
        package="gpu-estimator",
        ask=by_gpu_estimator,
        has_overhead=True,
        ignores="the architecture (activations are batch x sequence x root of the parameters), accumulation, optimizers but Adam and SGD",
    ),
)
