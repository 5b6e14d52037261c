"""From a `TraceRequest` to a model on the fake device, batches, and settings."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    Trainer,
    default_data_collator,
)
from transformers.utils.generic import find_labels

from autofit.errors import UserError
from autofit.memory.request import TraceRequest, TraceUnavailable
from autofit.problem.adaptation import AdapterKind
from autofit.problem.arguments import explicit_arguments, model_arguments, with_own
from autofit.problem.config import PRECISION_FACTS, Precision
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.tracing import quantised
from autofit.tracing.record import build_model
from autofit.tracing.settings import Batch, StepSettings, StepSubject
from autofit.workload import adapters, batches, models
from autofit.workload.data.collators import collator_of
from autofit.workload.data.facts import worst_rows
from autofit.workload.objects import LiveObjects
from autofit.workload.quantised import CLASSES, compute_dtype, without_adapters
from autofit.workload.subject import in_precision
from autofit.workload.trial import argument_defaults

OWN_KERNELS = ("flash_attention", "flex_attention")
_PLAIN_PARAMETERS = (nn.Parameter, Tensor)
_OF_EVALUATION = ("compute_metrics", "preprocess_logits_for_metrics")  #: arguments of a Trainer that training does not look at
QUANTISED = "quantised layers run kernels of bitsandbytes, whose memory is known under LoRA on a CUDA device only"


def settings_of(request: TraceRequest, *, costs: bool = True, smooth: bool = False) -> StepSettings:
    """How the step of `request` is trained; `costs` and `smooth` as in `StepSettings`."""
    resolved = resolve(request.workload)
    config = request.config.but(
        per_device_train_batch_size=request.batch, gradient_accumulation_steps=request.accumulation
    )
    defaults = argument_defaults()
    base = {k: v for k, v in (_extra(resolved).get("arguments") or {}).items() if k in defaults}
    arguments = with_own(base, explicit_arguments(config, defaults))
    asked = {"max_grad_norm": request.max_grad_norm, "label_smoothing_factor": request.label_smoothing_factor}
    arguments |= asked | {name: value for name, value in (*base.items(), *config.extra) if name in asked}
    return StepSettings(
        batch=request.batch,
        seq_len=request.seq_len or resolved.seq_len,
        arguments=arguments,
        precision=config.precision,
        accumulation=request.accumulation,
        capability=request.capability,
        padded=request.padded,
        device_type=request.device_type,
        costs=costs,
        smooth=smooth,
    )


def subject_of(request: TraceRequest) -> Callable[[FakeTensorMode], StepSubject]:
    """What makes the model and the batches of `request` under a fake mode."""
    resolved = resolve(request.workload)

    def make(mode: FakeTensorMode) -> StepSubject:
        model = fake_model(mode, resolved, request)
        return StepSubject(model=model, make_batch=functools.partial(_like, host_batch(resolved, request, model)))

    return make


def resolve(workload: Workload) -> models.ResolvedModel:
    """`models.resolve`, remembered: a process answers many questions about one model."""
    return _resolve(json.dumps(workload.to_json(), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _resolve(workload: str) -> models.ResolvedModel:
    return models.resolve(Workload.from_json(json.loads(workload)))


def fake_model(mode: FakeTensorMode, resolved: models.ResolvedModel, request: TraceRequest) -> nn.Module:
    """The model of `resolved` with all parameters and buffers on the fake device of `mode`.

    Raises:
        TraceUnavailable: a live model whose weights are not plain tensors.
    """
    adaptation = resolved.adaptation
    quantization = None if adaptation is None else adaptation.quantization
    if adaptation is not None and quantization is not None and (adaptation.adapter is not AdapterKind.LORA or request.device_type != "cuda"):
        raise TraceUnavailable(QUANTISED)
    weight_dtype = models.dtype_to_build(resolved, request.config.precision)
    attention = model_arguments(request.config).get(
        "attn_implementation", request.workload.attn_implementation
    )
    if attention is not None and attention.startswith(OWN_KERNELS):
        raise TraceUnavailable(f"{attention} runs kernels of its own, which have no fake counterpart")
    options: dict[str, Any] = {"weight_dtype": weight_dtype, "attn_implementation": attention}
    objects = resolved.objects
    live = objects is not None and objects.is_live
    if not live and resolved.adaptation is None:
        make = functools.partial(models.build, resolved, device=request.device_type, **options)
        model = build_model(mode, request.device_type, make)
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.device.type != request.device_type for tensor in tensors):
            with mode:  # legacy constructors (`torch.Tensor(n)`) make CPU tensors; the Trainer moves them
                replace_tensors(model, request.device_type)
        return model
    if objects is not None and objects.model is not None:
        replace_tensors(objects.model, "meta")  # frees the weights; the copy is what a trace may change
        copied = replace(objects, model=copy.deepcopy(objects.model))
        model = models.build(replace(resolved, objects=copied), device="meta", **options)
    else:
        try:
            model = models.build(resolved, device="meta", **options)
        except UserError:  # a function that moves or reads tensors cannot run without them
            if not live:
                raise
            model = models.build(resolved, device="cpu", **options)
    if adaptation is not None and quantization is not None:
        kept = adapters.trained_in_full(without_adapters(model), adaptation, resolved.task)
        quantised.store(model, quantization, compute=compute_dtype(request.config.precision), kept=kept)
    with mode:
        replace_tensors(model, request.device_type)
    return model  # type: ignore[no-any-return]


def replace_tensors(model: nn.Module, device: str) -> None:
    """Put an empty tensor of the same shape, layout and dtype on `device` in the place of each parameter and buffer.

    Shared parameters stay shared.

    Raises:
        TraceUnavailable: a parameter of a special class, as quantised weights are.
    """
    replaced: dict[int, Tensor] = {}

    def substitute(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            if not isinstance(tensor, FakeTensor) and type(tensor) not in _PLAIN_PARAMETERS:
                raise TraceUnavailable(QUANTISED if type(tensor).__name__ in CLASSES else f"weights of class {type(tensor).__name__} have no fake kernels")
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            replaced[id(tensor)] = empty
        return replaced[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = substitute(tensor)  # type: ignore[assignment]


def host_batch(resolved: models.ResolvedModel, request: TraceRequest, model: nn.Module) -> Batch:
    """One real batch on the CPU, from the user's dataset or made up; only its shapes and dtypes are used.

    Args:
        resolved, request: what is trained.
        model: whose `forward` says which columns the Trainer keeps.

    Raises:
        TraceUnavailable: the user's batches are no mapping.
    """
    objects, data = resolved.objects, resolved.data
    rows = data.rows() if data is not None else objects.train_dataset if objects is not None else None
    if rows is not None:
        picked = [rows[i] for i in worst_rows(rows, request.batch)]
        if data is not None:
            batch = (collator_of(data, None) or default_data_collator)(picked)
        else:
            assert objects is not None
            batch = _collator(objects)([_columns(row, model, objects) for row in picked])
        if not isinstance(batch, Mapping):
            raise TraceUnavailable("the collator returns no mapping")
        if len(picked) == request.batch:
            return dict(batch)
        return dict(tree_map_only(Tensor, lambda value: value[: request.batch] if value.shape[:1] == (len(picked),) else value, dict(batch)))
    weight_dtype = PRECISION_FACTS[request.config.precision].weight_dtype
    batch = batches.make_batch(
        resolved, request.batch, request.seq_len, weight_dtype=weight_dtype, padded=request.padded
    )
    if request.label_smoothing_factor and resolved.task is Task.SEQ2SEQ_LM:
        # As DataCollatorForSeq2Seq does: under label smoothing the model does not see the labels.
        batch["decoder_input_ids"] = batch["labels"].clone()
    return batch


def _collator(objects: LiveObjects) -> Callable[[list[Any]], Any]:
    """The user's own, else what the Trainer takes: one that pads where there is a tokenizer."""
    processing = objects.extra.get("processing_class")
    if objects.data_collator is not None:
        own: Callable[[list[Any]], Any] = objects.data_collator
        return own
    if isinstance(processing, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return DataCollatorWithPadding(processing)  # type: ignore[arg-type]  # as the Trainer does
    return default_data_collator


def _columns(row: Any, model: nn.Module, objects: LiveObjects) -> Any:
    """A row as the Trainer hands it to the collator: without the columns that the model's `forward` does not take."""
    arguments = objects.extra.get("arguments") or {}
    if not isinstance(row, Mapping) or not arguments.get("remove_unused_columns", True):
        return row
    inner = without_adapters(model)
    known = {*inspect.signature(inner.forward).parameters, "label", "label_ids", *find_labels(type(inner))}
    kept = {name: value for name, value in row.items() if name in {*known, *(arguments.get("label_names") or ())}}
    return kept or row


def _like(host: Batch) -> Batch:
    found: Batch = tree_map_only(Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype), host)
    return found


def trainer_of(request: TraceRequest) -> tuple[type[Trainer], dict[str, Any]] | None:
    """The Trainer class to run and its further constructor arguments; None where they are none of the user's own, so that our loop does as it does."""
    extra = _extra(resolve(request.workload))
    cls = extra.get("trainer_cls") or Trainer
    if any(base.__module__.startswith("trl.") for base in cls.__mro__):
        raise TraceUnavailable("TRL's Trainers prepare data and loss in their own way: their memory is learned from trials")
    given = dict(extra.get("trainer_arguments") or {})
    if (given.get("optimizers") or (None,))[0] is not None:
        raise TraceUnavailable("the optimizer is an object of its own, whose parameters are not those of a trace")
    if cls is Trainer and not any(value is not None for name, value in given.items() if name not in _OF_EVALUATION):
        return None
    cast = torch.bfloat16 if request.config.precision is Precision.PURE_BF16 else None
    copies = {name: _copied(value, cast) if isinstance(value, nn.Module) else value for name, value in given.items()}
    own = in_precision(copies, request.config.precision)
    processing = extra.get("processing_class")
    return cls, own if processing is None else {"processing_class": processing, **own}


def _copied(module: nn.Module, cast: torch.dtype | None) -> nn.Module:
    """A module over the same weights, for one trace to move: the next finds the original where it was. Weights to be `cast` get memory that nothing is
    written to, which costs none."""
    weights: dict[int, Any] = {}
    for p in module.parameters():
        known = p.detach() if cast is None or not p.is_floating_point() else torch.empty_like(p, dtype=cast)
        weights[id(p)] = nn.Parameter(known, requires_grad=p.requires_grad)
    return copy.deepcopy(module, weights)


def _extra(resolved: models.ResolvedModel) -> dict[str, Any]:
    return {} if resolved.objects is None else dict(resolved.objects.extra)
