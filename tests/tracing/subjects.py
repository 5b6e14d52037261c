"""Small models of many architectures, and the real CPU run that a trace is compared with."""

from __future__ import annotations

import bisect
import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.memory.events import Kind, Trace
from autofit.memory.trace_builder import TraceBuilder
from autofit.tracing.loop import TrainingLoop
from autofit.tracing.record import build_model
from autofit.tracing.settings import Batch, StepSettings, StepSubject
from autofit.tracing.tracer import StorageTracer

_SCRATCH_KERNELS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::mkldnn_convolution",
    "aten::convolution_backward",
)
VOCAB, WIDTH, LAYERS, HEADS, LABELS = 512, 64, 2, 4, 2
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 130,
}
_GQA = {**_TEXT, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to build one small model, and what its batches hold."""

    config: str
    head: str
    options: dict[str, Any]
    labels: str = "tokens"  # tokens, classes
    inputs: str = "text"  # text, image, audio

    def model(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.head)(config)

    def batch(self, size: int, length: int) -> Batch:
        shape = (size, length) if self.labels == "tokens" else (size,)
        labels = torch.ones(shape, dtype=torch.long)
        if self.inputs == "audio":
            return {"input_values": torch.ones(size, 100 * length), "labels": torch.ones(size, 8, dtype=torch.long)}
        if self.inputs == "image":
            return {"pixel_values": torch.ones(size, 3, 32, 32), "labels": labels}
        mask = torch.ones(size, length, dtype=torch.long)
        tokens = torch.ones(size, length, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        # As DataCollatorForSeq2Seq does: under label smoothing the model does not see the labels.
        return {**batch, "decoder_input_ids": tokens.clone()} if self.config == "T5Config" else batch


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture(
        config="BertConfig", head="BertForSequenceClassification", options=_TEXT, labels="classes"
    ),
    "roberta": Architecture(
        config="RobertaConfig", head="RobertaForSequenceClassification", options=_TEXT, labels="classes"
    ),
    "distilbert": Architecture(
        config="DistilBertConfig",
        head="DistilBertForSequenceClassification",
        options={
            "vocab_size": VOCAB,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 2 * WIDTH,
        },
        labels="classes",
    ),
    "gpt2": Architecture(
        config="GPT2Config",
        head="GPT2LMHeadModel",
        options={
            "vocab_size": VOCAB,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 130,
        },
    ),
    "opt": Architecture(
        config="OPTConfig",
        head="OPTForCausalLM",
        options={**_TEXT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
    ),
    "llama": Architecture(config="LlamaConfig", head="LlamaForCausalLM", options=_GQA),
    "qwen2": Architecture(config="Qwen2Config", head="Qwen2ForCausalLM", options=_GQA),
    "falcon": Architecture(config="FalconConfig", head="FalconForCausalLM", options=_TEXT),  # indexes by a list
    "gemma": Architecture(config="GemmaConfig", head="GemmaForCausalLM", options={**_GQA, "head_dim": 16}),
    "mixtral": Architecture(config="MixtralConfig", head="MixtralForCausalLM", options={**_GQA, "num_local_experts": 4}),
    "qwen3_moe": Architecture(
        config="Qwen3MoeConfig",
        head="Qwen3MoeForCausalLM",
        options={**_GQA, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH // 2, "output_router_logits": True},
    ),
    "t5": Architecture(
        config="T5Config",
        head="T5ForConditionalGeneration",
        options={
            "vocab_size": VOCAB,
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 2 * WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
    ),
    "wav2vec2": Architecture(
        config="Wav2Vec2Config",
        head="Wav2Vec2ForCTC",
        options={
            "vocab_size": 32,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * WIDTH,
            "conv_dim": (WIDTH,) * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
        },
        inputs="audio",
    ),
    "vit": Architecture(
        config="ViTConfig",
        head="ViTForImageClassification",
        options={
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * WIDTH,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": LABELS,
        },
        labels="classes",
        inputs="image",
    ),
}


def make_subject(
    architecture: Architecture, *, batch: int, length: int, device: str
) -> Callable[[FakeTensorMode], StepSubject]:
    """For `trace_step`: the model on a fake device."""

    def make(mode: FakeTensorMode) -> StepSubject:
        model = build_model(mode, device, architecture.model)
        return StepSubject(model=model, make_batch=functools.partial(architecture.batch, batch, length))

    return make


def settings_for(*, batch: int, length: int, **options: Any) -> StepSettings:
    """Settings with a private output directory."""
    arguments = {"output_dir": tempfile.gettempdir(), **options.pop("arguments", {})}
    return StepSettings(batch=batch, seq_len=length, arguments=arguments, **options)


def real_peak(architecture: Architecture, settings: StepSettings, *, batch: int, length: int) -> int:
    """Peak bytes over the loaded model of the same loop on real CPU tensors, from the allocator's own events."""
    torch.manual_seed(0)
    model = architecture.model()
    subject = StepSubject(model=model, make_batch=functools.partial(architecture.batch, batch, length))
    idle = StorageTracer(
        TraceBuilder(), device_type="none", answer_scalars=False
    )  # never entered: watches nothing
    loop = TrainingLoop(subject, settings, idle)
    loop.load()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        loop.train()
    events = profile.profiler.kineto_results.events()
    if settings.autocast_dtype is not None:
        return max(itertools.accumulate(_without_scratch(events)))
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in memory))


def _without_scratch(events: list[Any]) -> list[int]:
    """Signed bytes of the allocator's events in order, without what oneDNN's 16-bit products take and give back at once."""
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    kernels = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e in events
        if e.name().startswith(_SCRATCH_KERNELS)
    )
    starts = [start for start, _ in kernels]
    kept: list[int] = []
    skip = False
    for event, following in itertools.zip_longest(memory, memory[1:]):
        if skip:
            skip = False
            continue
        nearest = bisect.bisect_right(starts, event.start_ns()) - 1
        inside = nearest >= 0 and event.start_ns() <= kernels[nearest][1]
        if inside and following is not None and event.nbytes() == -following.nbytes() > 0:
            skip = True
            continue
        kept.append(event.nbytes())
    return kept


def traced_peak(trace: Trace) -> int:
    """Peak bytes over the loaded model, in a trace."""
    level = peak = 0
    loaded = {k for k in range(len(trace.sizes)) if trace.operator(k) in ("parameter", "buffer")}
    for event in trace.events:
        if event >= 0 and event not in loaded:
            level += trace.sizes[event]
            peak = max(peak, level)
        elif event < 0 and ~event not in loaded:
            level -= trace.sizes[~event]
    return peak


def model_bytes(trace: Trace) -> int:
    """Bytes of parameters."""
    return sum(n for n, kind in zip(trace.sizes, trace.kinds) if kind is Kind.WEIGHTS)
