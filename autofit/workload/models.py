"""From a model's name, or a live object, to a model with random weights on the device.

`resolve` reads configs only; `build` makes the model; `facts` tells the parent what it needs to know, as JSON.
No weights are downloaded: speed and memory do not depend on their values.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from autofit.errors import UserError
from autofit.problem.adaptation import Adaptation
from autofit.problem.config import PRECISION_FACTS, Precision
from autofit.problem.spec import Workload
from autofit.problem.task import Task, parse_task
from autofit.workload import adapters, quantised
from autofit.workload.construct import (
    blamed,
    call_builder,
    in_dtype,
    prepare_config,
    quick,
    set_attention,
    sketch,
    without_adapters,
)
from autofit.workload.data.prepared import Prepared, prepare
from autofit.workload.digests import config_digest, json_able, module_digest
from autofit.workload.extras_facts import extras_facts
from autofit.workload.figures import adapter_figures, config_figures, stored_figures
from autofit.workload.knobs import weight_dtype
from autofit.workload.objects import LiveObjects, load_objects
from autofit.workload.sources import FoundConfig, check_trainable, find_config, remote_code_needed
from autofit.workload.tasks import (
    DEFAULT_TEXT_LENGTH,
    audio_frames,
    check_task,
    default_task,
    has_class,
    sequence_length,
    task_of_class,
)

__all__ = [
    "LiveObjects",
    "ResolvedModel",
    "build",
    "facts",
    "load_objects",
    "model_class",
    "resolve",
    "resolve_with",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """What `build` needs.

    Attributes:
        name: as the user wrote it.
        source: `local`, `cache`, `preset`, `hub` or `object`.
        config: None only for a live module without one; never changed by `build`.
        task: None only for a live module that is not a known head.
        seq_len: tokens per sample (audio: samples; images: patches).
        digest: of the config's values (live modules: of parameter names and shapes).
        trust_remote_code, attn_implementation: as in `Workload`.
        objects: the live objects; None for names.
        adaptation: what is put on the model, and how its weights are stored; None = trained as it is.
        data: the tokenised rows of a named dataset; None = there is none.
    """

    name: str
    source: str
    config: PretrainedConfig | None
    task: Task | None
    seq_len: int
    digest: str
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    objects: LiveObjects | None = None
    adaptation: Adaptation | None = None
    data: Prepared | None = None

    @property
    def auto_class(self) -> Any:
        """The transformers auto class of the task; None without a task."""
        return None if self.task is None else getattr(transformers, self.task.auto_class_name)


def resolve(workload: Workload) -> ResolvedModel:
    """Find the config of `workload.model`, its task and its sequence length. Builds nothing.

    Raises:
        UserError: see `find_config`, `check_task`, `sequence_length` and `load_objects`.
    """
    return resolve_with(workload, load_objects(workload.objects_path) if workload.objects_path else None)


def resolve_with(workload: Workload, objects: LiveObjects | None) -> ResolvedModel:
    """As `resolve`, with the live objects already loaded (None = there are none)."""
    if objects is not None and objects.is_live:
        return _resolve_module(workload, objects)
    if objects is not None and objects.config is not None:
        found = FoundConfig(config=objects.config, source="object")
        check_trainable(objects.config, workload.model)
    else:
        found = find_config(workload.model, trust_remote_code=workload.trust_remote_code)
    config = found.config
    if workload.task is None:
        task = default_task(config)
    else:
        task = parse_task(workload.task)
        check_task(task, config)
    if not workload.trust_remote_code and not has_class(task, config):
        raise remote_code_needed(workload.model)
    data = None if workload.data is None else prepare(workload, task, config)
    config = config if data is None else data.fitted(config)
    return ResolvedModel(
        name=workload.model,
        source=found.source,
        config=config,
        task=task,
        seq_len=sequence_length(workload.seq_len, task, config) if data is None else data.longest(),
        digest=config_digest(config, workload.adaptation),
        trust_remote_code=workload.trust_remote_code,
        attn_implementation=workload.attn_implementation,
        objects=objects,
        adaptation=workload.adaptation,
        data=data,
    )


def _resolve_module(workload: Workload, objects: LiveObjects) -> ResolvedModel:
    """A live module, or a function that builds one: the model itself says what it is."""
    model = objects.model if objects.model is not None else sketch(objects)
    config = getattr(model, "config", None)
    config = config if isinstance(config, PretrainedConfig) else None
    task = (
        parse_task(workload.task) if workload.task else task_of_class(type(without_adapters(model)).__name__)
    )
    if task is not None and config is not None:
        seq_len = sequence_length(workload.seq_len, task, config)
    else:
        seq_len = workload.seq_len or DEFAULT_TEXT_LENGTH
    adapters.refuse_live_quantisation(model, workload.adaptation, objects.extra)
    return ResolvedModel(
        name=workload.model,
        source="object",
        config=config,
        task=task,
        seq_len=seq_len,
        digest=module_digest(model, workload.adaptation),
        objects=objects,
        adaptation=workload.adaptation,
    )


def build(
    resolved: ResolvedModel,
    *,
    device: str,
    weight_dtype: str | None = "float32",
    attn_implementation: str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Return the model on `device`, in training mode, with random weights (live modules keep theirs).

    Args:
        device: a torch device; `meta` gives shapes only. Weights are made there, never moved (live ones are).
        weight_dtype: dtype of the parameters; a config's own dtype is not looked at. None leaves a live module's as they are.
        attn_implementation: overrides the workload's; None = the library's choice.
        compute_dtype: in which quantised layers multiply.

    Returns:
        A `PreTrainedModel`, the user's `nn.Module`, or either under an adapter.

    Raises:
        UserError: the model's class refuses its config (it also does so without any memory, on `meta`).
        Exception: anything else that building raises, out of memory above all, as it is.
    """
    dtype = None if weight_dtype is None else getattr(torch, weight_dtype)
    objects = resolved.objects
    if objects is not None and objects.is_live:
        model = objects.model if objects.model is not None else call_builder(objects, device=device)
        model = torch.nn.Module.to(in_dtype(model, dtype), device)  # transformers' own `to` refuses models in 8 bit, which do move
        inner = without_adapters(model)
        if isinstance(inner, PreTrainedModel):
            prepare_config(inner.config, resolved.task)
            set_attention(inner, attn_implementation or resolved.attn_implementation)
    else:
        construct = functools.partial(_construct, resolved, attn_implementation, dtype, compute_dtype)
        model = blamed(construct, device, f"model {resolved.name!r} cannot be built")
    if resolved.adaptation is not None:
        model = adapters.with_adapter(model, resolved.adaptation, resolved.task)
    return model.train()


def dtype_to_build(resolved: ResolvedModel, precision: Precision) -> str | None:
    """dtype of the weights under `precision`; None for a live module, which keeps its own unless pure_bf16 is asked for."""
    live = resolved.objects is not None and resolved.objects.is_live
    if live and precision is not Precision.PURE_BF16:
        return None
    return PRECISION_FACTS[precision].weight_dtype


def model_class(resolved: ResolvedModel) -> type:
    """The class that `build` returns an instance of. Builds on `meta` only where the class is the model's own code."""
    if resolved.task is None or not has_class(resolved.task, resolved.config) or resolved.trust_remote_code:
        return type(build(resolved, device="meta"))
    found = resolved.auto_class._model_mapping[type(resolved.config)]
    return cast("type", found[0] if isinstance(found, tuple) else found)


def _construct(
    resolved: ResolvedModel,
    attn_implementation: str | None,
    dtype: torch.dtype | None,
    compute_dtype: torch.dtype,
    device: str,
) -> PreTrainedModel:
    config = copy.deepcopy(resolved.config)
    if config is None or resolved.task is None:
        raise UserError(f"model {resolved.name!r} cannot be built without a config and a task")
    config.architectures = config.architectures or []  # the auto classes iterate over it
    prepare_config(config, resolved.task)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": resolved.trust_remote_code}
    attention = attn_implementation or resolved.attn_implementation
    if attention is not None:
        options["attn_implementation"] = attention
    make = functools.partial(resolved.auto_class.from_config, config, **options)
    adaptation = resolved.adaptation
    with torch.device(device), quick(device):
        if adaptation is not None and adaptation.quantization is not None:
            kept = functools.partial(adapters.trained_in_full, adaptation=adaptation, task=resolved.task)
            return quantised.build_quantised(make, adaptation.quantization, device=device, compute=compute_dtype, kept=kept)
        model: PreTrainedModel = make()
    return model


def _positions(resolved: ResolvedModel) -> dict[str, int]:
    """`positions`: of a sample of audio in the transformer's blocks, behind the convolutions; empty where a token is a position."""
    if resolved.task is not Task.CTC or resolved.config is None or resolved.seq_len is None:
        return {}
    return {"positions": audio_frames(resolved.seq_len, resolved.config)}


def facts(resolved: ResolvedModel) -> dict[str, Any]:
    """What the parent needs to know of the model, as JSON. Counts parameters on `meta`; tied ones count once.

    Returns:
        `name`, `source`, `task`, `seq_len`, `digest`, `warnings`, `class`, `n_params`, `n_trainable_params`,
        `hidden_size`, `num_layers`, `num_heads`, `vocab_size`, `max_positions`, `tie_word_embeddings`,
        `supports_gradient_checkpointing`, `supports_sdpa`, `attn_implementation`, `config`; None where the model
        does not say. `adapter` (peft's name), `quantization`, `weights_bytes` and `weights_dtype`: as it is trained.
    """
    objects = resolved.objects
    if objects is not None and objects.is_live:
        adaptation = resolved.adaptation
        if objects.model is not None:
            model = objects.model if adaptation is None else adapters.as_adapted(objects.model, adaptation, resolved.task)
        else:
            make = functools.partial(sketch, objects)
            model = make() if adaptation is None else adapters.sketch_adapted(make, adaptation, resolved.task)
    else:
        model = build(resolved, device="meta")
    config = resolved.config
    parameters = list(model.parameters())
    return {
        "name": resolved.name,
        "source": resolved.source,
        "task": None if resolved.task is None else str(resolved.task),
        "seq_len": resolved.seq_len,
        **_positions(resolved),
        "digest": resolved.digest,
        "warnings": [],
        "class": type(without_adapters(model)).__name__,
        **adapter_figures(model, resolved.adaptation, resolved.task),
        "weights_dtype": weight_dtype(model) if objects is not None and objects.is_live else "float32",
        **stored_figures(model, resolved.adaptation, resolved.task),
        "n_params": sum(quantised.count(p) for p in parameters),
        "n_trainable_params": sum(p.numel() for p in parameters if p.requires_grad),
        **config_figures(config),
        "supports_gradient_checkpointing": bool(getattr(model, "supports_gradient_checkpointing", False)),
        "supports_sdpa": bool(getattr(model, "_supports_sdpa", False)),
        "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "config": None if config is None else json_able(config.to_dict()),
        "extras": extras_facts(model, None if objects is None else objects.extra.get("arguments")),
    }
