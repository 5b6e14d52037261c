"""Adapters (PEFT) on a model: from words or from the user's own `PeftConfig` to a `PeftModel`, and what a model's adapters are."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autofit.errors import UserError
from autofit.problem.adaptation import DEFAULT_RANK, Adaptation, AdapterKind, peft_config_json
from autofit.problem.task import Task
from autofit.workload.quantised import quantization_of
from autofit.workload.sources import first_line

#: peft's names of tasks: they decide which head is trained in full beside the adapter
TASK_TYPES = {
    Task.CAUSAL_LM: "CAUSAL_LM",
    Task.SEQ2SEQ_LM: "SEQ_2_SEQ_LM",
    Task.SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    Task.TOKEN_CLASSIFICATION: "TOKEN_CLS",
    Task.QUESTION_ANSWERING: "QUESTION_ANS",
}
HEADS_BY_PEFT = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  #: tasks whose head peft trains in full by itself
NEW_HEADS = (Task.IMAGE_CLASSIFICATION, Task.CTC)  #: tasks with a head to train for which peft has no name
MOST_NAMES = 12
RECORDED = ("peft_version", "peft_type", "base_model_name_or_path", "auto_mapping")  #: that peft fills in itself


def with_adapter(model: Any, adaptation: Adaptation, task: Task | None) -> Any:
    """Return `model` under the adapter: frozen, but for the adapter and a head that is new.

    Args:
        model: on its device; it is changed in place, as peft does.
        adaptation: what is wanted.
        task: of the model; None = not known.

    Returns:
        A `PeftModel`.

    Raises:
        UserError: peft is missing, the model has adapters already, or peft refuses (unknown target modules, ...).
    """
    require_peft()
    from peft import get_peft_model

    if is_adapted(model):
        raise UserError(
            f"the model has an adapter already ({type(model).__name__}): a second one cannot be put on it",
            hint="leave the adapter out, or hand over the model without one",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on layers that peft then sets right itself
            adapted = get_peft_model(model, peft_config_of(adaptation, model, task))
    except (ValueError, TypeError, KeyError, AttributeError, re.error) as error:
        raise UserError(f"peft refuses the adapter: {first_line(error)}", hint=_targets_hint(model)) from error
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise UserError("the adapter leaves nothing to train", hint="leave inference_mode=True out of its peft_config")
    return adapted


def as_adapted(model: nn.Module, adaptation: Adaptation, task: Task | None) -> Any:
    """A live model as it will be trained, to be looked at: under the adapter, on a copy without memory. `model` itself stays as it is.

    Raises:
        UserError: see `with_adapter`.
    """
    tensors = [*model.parameters(), *model.buffers()]
    try:
        return with_adapter(copy.deepcopy(model, {id(t): _emptied(t) for t in tensors}), _cheap(adaptation), task)
    except UserError:
        raise
    except Exception:  # an adapter that reads the weights; where that was not the reason, it is raised again here
        return with_adapter(copy.deepcopy(model, {id(t): _shared(t) for t in tensors}), _cheap(adaptation), task)


def sketch_adapted(make: Callable[[], nn.Module], adaptation: Adaptation, task: Task | None) -> Any:
    """As `as_adapted`, of what a function makes: it is made for this alone, and a copy could fail, as that of a module with a lock does.

    Raises:
        UserError: see `with_adapter`.
    """
    model = make()
    known: dict[int, Any] = {id(t): _emptied(t) for t in [*model.parameters(), *model.buffers()]}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = known[id(tensor)]
    try:
        return with_adapter(model, _cheap(adaptation), task)
    except UserError:
        raise
    except Exception:  # as above
        return with_adapter(make(), _cheap(adaptation), task)


def _emptied(tensor: Any) -> Any:
    """The tensor without its memory; a quantised one on the same memory, because peft asks how it is stored."""
    if type(tensor) is torch.Tensor:
        return torch.empty_like(tensor, device="meta")
    if type(tensor) is nn.Parameter:
        return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
    return _shared(tensor)


def _shared(tensor: Any) -> Any:
    """A parameter of its own kind on the same memory; a buffer itself."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    again = torch.Tensor._make_subclass(type(tensor), tensor.data, tensor.requires_grad)
    vars(again).update(vars(tensor))
    return again


def _cheap(adaptation: Adaptation) -> Adaptation:
    """Without initial values that are computed from the weights (PiSSA's decompositions take minutes, OLoRA changes the weights themselves): a look at
    an adapter needs its shapes alone."""
    config = json.loads(adaptation.peft_config or "{}")
    if not isinstance(config.get("init_lora_weights"), str):
        return adaptation
    return dataclasses.replace(adaptation, peft_config=json.dumps({**config, "init_lora_weights": True}))


def require_peft() -> None:
    """Check that peft is there.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapters need peft, which is not installed", hint="pip install peft")


def peft_config_of(adaptation: Adaptation, model: Any, task: Task | None) -> Any:
    """The `PeftConfig` that is meant."""
    from peft import IA3Config, LoraConfig, PeftConfig

    if adaptation.peft_config is not None:
        return PeftConfig.from_peft_type(**json.loads(adaptation.peft_config))
    options: dict[str, Any] = {"task_type": TASK_TYPES.get(task) if task is not None else None}
    if adaptation.target is not None:
        everything = adaptation.target == ("all-linear",)
        options["target_modules"] = "all-linear" if everything else list(adaptation.target)
        if adaptation.adapter is AdapterKind.IA3:
            options["feedforward_modules"] = []
    if task in NEW_HEADS:
        options["modules_to_save"] = heads(model) or None
    if adaptation.adapter is AdapterKind.IA3:
        return IA3Config(**options)
    return LoraConfig(r=adaptation.rank or DEFAULT_RANK, use_dora=adaptation.adapter is AdapterKind.DORA, **options)


def config_words(config: Any) -> dict[str, Any]:
    """`class` and `options` of a `PeftConfig`, those that differ from its defaults, as JSON: what a user has to write down."""
    own = json.loads(peft_config_json(config))
    try:
        usual = json.loads(peft_config_json(type(config)()))
    except (ValueError, TypeError):  # AdaLoRA has no config of defaults alone
        usual = {field.name: field.default for field in dataclasses.fields(config)}
    return {"class": type(config).__name__, "options": {k: v for k, v in own.items() if v != usual.get(k) and k not in RECORDED}}


def is_adapted(model: Any) -> bool:
    """Whether the model is a `PeftModel`, or a transformers model that has loaded an adapter itself."""
    return adapter_type(model) is not None


def adapter_type(model: Any) -> str | None:
    """peft's name of the active adapter (`LORA`, `IA3`, ...); None without one."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    kind = next(iter(configs.values())).peft_type
    return str(getattr(kind, "value", kind))


def heads(model: nn.Module) -> list[str]:
    """Children beside the body that hold parameters: the heads of a transformers model."""
    body = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]


def trained_in_full(model: nn.Module, adaptation: Adaptation, task: Task | None) -> list[str]:
    """Modules that are trained beside the adapter, and so cannot be quantised: what the user's config names, or the head of a task that has a new one."""
    if adaptation.peft_config is not None:
        config = json.loads(adaptation.peft_config)
        new = heads(model) if config.get("task_type") in HEADS_BY_PEFT else []
        return list(dict.fromkeys([*(config.get("modules_to_save") or ()), *new]))
    return [] if task in (None, Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.MASKED_LM) else heads(model)


def _targets_hint(model: nn.Module) -> str:
    """Names of linear layers that could be a target."""
    kinds = (nn.Linear, Conv1D)
    names = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})
    shown = ", ".join(name for name in names[:MOST_NAMES] if not name.isdigit())
    return f"its linear layers are called {shown}; --adapter-target all-linear takes them all but the head" if shown else "see peft's documentation"


def refuse_live_quantisation(model: nn.Module, adaptation: Adaptation | None, extra: Mapping[str, Any]) -> None:
    """Check a live model: it is quantised by its owner, and then it needs an adapter.

    Args:
        model: as it was handed over.
        adaptation: what is to be put on it.
        extra: the other live objects; TRL's Trainers take a `peft_config` and put the adapter on themselves.

    Raises:
        UserError: it is to be quantised here, or is quantised and nothing on it can be trained.
    """
    if adaptation is not None and adaptation.quantization is not None:
        raise UserError(
            "quantize works for models that autofit builds from a name or a config",
            hint="load your model with a BitsAndBytesConfig, put an adapter on it, and hand that over",
        )
    quantization = quantization_of(model)
    to_come = adaptation is not None or (extra.get("trainer_arguments") or {}).get("peft_config") is not None
    if quantization is not None and not is_adapted(model) and not to_come:
        raise UserError(
            f"the model is quantised to {quantization} and has no adapter: weights that are whole numbers cannot be trained",
            hint="put an adapter on it, or pass peft_config=LoraConfig(...)",
        )


def kept_in_float32(model: Any, dtype: torch.dtype) -> frozenset[str]:
    """Names of parameters and buffers that peft leaves in float32 on a model in `dtype`: it is asked, on a copy without memory.

    A head that is trained in full is not among them, but prompts are: those peft makes in float32, and casts where they are used.
    """
    known: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")
        known[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    try:
        copied = copy.deepcopy(model, known)
    except (TypeError, RuntimeError):  # a module that holds a lock, or a tensor that was computed: what is trained is the adapter, for most
        return frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    cast_adapter = getattr(getattr(copied, "base_model", None), "_cast_adapter_dtype", None)
    if cast_adapter is not None:
        for name in copied.peft_config:
            cast_adapter(adapter_name=name)
    named = dict([*copied.named_parameters(), *copied.named_buffers()])
    return frozenset(name for name, t in named.items() if t.dtype == torch.float32 or name.startswith("prompt_encoder."))
