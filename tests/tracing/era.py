"""The software of January 2022, as far as it held other tensors than today's.

Each difference is a documented property of those versions (torch 1.10, transformers 4.15) and a switch without a number: softmax saved its
input as well as its output; BERT always added an fp32 mask; CUDA autocast ran gelu in fp32; `zero_grad` zeroed; Adam went parameter by
parameter; cuBLAS had no workspace in the caching allocator.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForSequenceClassification
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autofit.memory.events import Trace
from autofit.problem.config import Precision
from autofit.tracing import optimizers
from autofit.tracing.loop import TrainingLoop
from autofit.tracing.record import build_model, trace_step
from autofit.tracing.settings import Batch, StepSettings, StepSubject
from autofit.tracing.tracer import StorageTracer

aten = torch.ops.aten
ATTENTION = "eager_of_2022"
QUANTISATION_BLOCK = 2048  # of the first 8-bit optimizers


class SoftmaxSavingItsInput(torch.autograd.Function):
    """Before torch 1.11 the backward of softmax took the input's tensor, not its dtype."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        to_float = torch.is_autocast_enabled("cuda") and scores.dtype == torch.float16
        probabilities = aten._softmax(scores, -1, to_float)
        ctx.save_for_backward(scores, probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        scores, probabilities = ctx.saved_tensors
        return aten._softmax_backward_data(grad, probabilities, -1, scores.dtype)


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """Attention as BERT wrote it then, with the mask of fp32 zeros that it never left out."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(query.shape[0], 1, 1, key.shape[2], device=query.device)
    probabilities = nn.functional.dropout(
        SoftmaxSavingItsInput.apply(scores), p=dropout, training=module.training
    )
    return torch.matmul(probabilities, value).permute(0, 2, 1, 3).contiguous(), None


class GeluInFp32(nn.Module):
    """gelu was on CUDA autocast's fp32 list."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x.float() if torch.is_autocast_enabled("cuda") else x)


class AdamByParameter(torch.optim.Optimizer):
    """transformers' own AdamW: a Python loop over parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6), value=-1e-5)


class EightBitAdam(torch.optim.Optimizer):
    """State layout of the first bitsandbytes: blocks of 2048, embeddings included; its kernels allocate nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            small = parameter.numel() < 4096
            dtype = torch.float32 if small else torch.uint8
            for name in ("one", "two") if not state else ():
                state[name] = torch.zeros_like(parameter, dtype=dtype)
                blocks = 0 if small else -(-parameter.numel() // QUANTISATION_BLOCK)
                state[f"largest {name}"] = torch.zeros(blocks, device=parameter.device)


class EraLoop(TrainingLoop):
    """The loop with the optimizers and the `zero_grad` of the day."""

    zeroes = True

    def make_optimizer(self) -> torch.optim.Optimizer:
        name = str(self.settings.arguments["optim"])
        by_name = {"adamw_torch": AdamByParameter, "adamw_bnb_8bit": EightBitAdam}
        groups = optimizers.parameter_groups(self.model, self.arguments)
        return by_name[name](groups) if name in by_name else super().make_optimizer()

    def reset_gradients(self) -> None:
        self.model.zero_grad(set_to_none=not self.zeroes)


class LaterLoop(EraLoop):
    """torch 2: gradients are dropped."""

    zeroes = False


def bert_large(attention: str) -> nn.Module:
    """The model of both tables."""
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def _of_2022() -> nn.Module:
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, eager_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_args, **_kwargs: None)
    model: Any = bert_large(ATTENTION)
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = GeluInFp32()
    return model


def _batch(size: int, length: int) -> Batch:
    return {
        "input_ids": torch.zeros(size, length, dtype=torch.long),
        "labels": torch.zeros(size, dtype=torch.long),
        "attention_mask": torch.ones(size, length, dtype=torch.long),
    }


def trace_row(row: dict[str, Any], *, era: bool) -> Trace:
    """Trace one row of a founding table: with the software of January 2022, or (`era=False`) of torch 2 with eager attention."""
    batch = row["per_device_train_batch_size"]
    settings = StepSettings(
        batch=batch,
        seq_len=512,
        arguments={
            "optim": {"adamw": "adamw_torch"}.get(row["optim"], row["optim"]),
            "activation_checkpointing": row["gradient_checkpointing"],
        },
        precision=Precision(row["precision"]),
        accumulation=min(2, row["gradient_accumulation_steps"]),
        capability=(7, 0),
        padded=not era,  # a mask that hides something is applied
        costs=False,
    )

    def make(mode: FakeTensorMode) -> StepSubject:
        model = build_model(mode, "cuda", _of_2022 if era else functools.partial(bert_large, "eager"))
        return StepSubject(model=model, make_batch=functools.partial(_batch, batch, 512))

    def run(subject: StepSubject, how: StepSettings, tracer: StorageTracer) -> None:
        if era:
            tracer.card = None
        tracer.birth_orders = {}  # dropout made its result before its mask
        (EraLoop if era else LaterLoop)(subject, how, tracer).run()

    return trace_step(make, settings, run)
