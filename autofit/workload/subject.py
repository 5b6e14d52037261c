"""What a trial trains: a model built from a configuration, or the user's live objects, with data that never runs short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from autofit.errors import UserError
from autofit.problem.arguments import model_arguments
from autofit.problem.config import PRECISION_FACTS, Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.workload import batches, models
from autofit.workload.construct import as_dtype
from autofit.workload.data.collators import collator_of
from autofit.workload.knobs import weight_dtype as weight_dtype_of
from autofit.workload.quantised import compute_dtype
from autofit.workload.user_arguments import class_of

STEPS_OF_DATA = 512  #: optimizer steps that a dataset holds before it starts over: an epoch's end never falls into a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What goes into the Trainer.

    Attributes:
        model: on the device, in training dtype.
        dataset: (samples per optimizer step, seed) -> a dataset that is long enough.
        collator: None = the Trainer's default.
        trainer_cls: the user's class or `transformers.Trainer`.
        trainer_arguments: further keywords of its constructor.
        base_arguments: keywords of the user's own TrainingArguments that are kept.
        arguments_cls: the class of those.
        built_here: whether autofit chose the weights' dtype.
        eval_dataset: the user's own; None = there is none.
        processing_class: the user's tokenizer or processor.
        callbacks: the user's own.
        user_data: whether data or collator are the user's.
    """

    model: nn.Module
    dataset: Callable[[int, int], Dataset[Any]]
    collator: Callable[[list[Any]], Any] | None = None
    trainer_cls: type[Trainer] = Trainer
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    base_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments_cls: type[TrainingArguments] = TrainingArguments
    built_here: bool = True
    eval_dataset: Any = None
    processing_class: Any = None
    callbacks: Sequence[Any] = ()
    user_data: bool = False


class RepeatedDataset(Dataset[Any]):
    """A map-style dataset repeated to `length` rows.

    Args:
        dataset: at least one row.
        length: rows to present.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        if len(dataset) == 0:
            raise UserError("the training dataset is empty", hint="give at least one sample")
        self._dataset, self._length = dataset, length
        self.rows = len(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if index >= self._length:
            raise IndexError(index)  # ends a loop over the dataset, as samplers by length run one
        return self._dataset[index % len(self._dataset)]


def load_subject(workload: Workload, config: TrialConfig, *, device: str) -> Subject:
    """Build or unpickle what `workload` names, for `config`.

    Raises:
        UserError: the model cannot be built, or there is no data for it.
    """
    return subject_of(models.resolve(workload), config, device=device)


def subject_of(resolved: models.ResolvedModel, config: TrialConfig, *, device: str) -> Subject:
    """As `load_subject`, of what is resolved already; a live model is used itself."""
    objects = resolved.objects
    live = objects is not None and (objects.model is not None or objects.model_init is not None)
    weight_dtype = PRECISION_FACTS[config.precision].weight_dtype
    model = models.build(
        resolved,
        device=device,
        weight_dtype=models.dtype_to_build(resolved, config.precision),
        attn_implementation=model_arguments(config).get("attn_implementation"),
        compute_dtype=compute_dtype(config.precision),
    )
    if live:
        weight_dtype = weight_dtype_of(model)
    extra = objects.extra if objects is not None else {}
    given = objects.train_dataset if objects is not None else None
    collator = objects.data_collator if objects is not None else None
    if resolved.data is not None:
        given, collator = resolved.data.rows(), collator_of(resolved.data, model)
    return Subject(
        model=model,
        dataset=_repeated(given) if given is not None else _synthetic(resolved),
        collator=collator if collator is not None or given is not None else batches.collator(resolved, weight_dtype=weight_dtype),
        trainer_cls=extra.get("trainer_cls") or Trainer,
        trainer_arguments=in_precision(extra.get("trainer_arguments") or {}, config.precision),
        base_arguments=extra.get("arguments") or {},
        arguments_cls=class_of(extra),
        built_here=not live,
        eval_dataset=extra.get("eval_dataset"),
        processing_class=extra.get("processing_class"),
        callbacks=tuple(extra.get("callbacks") or ()),
        user_data=given is not None or collator is not None,
    )


def _repeated(data: Any) -> Callable[[int, int], Dataset[Any]]:
    """The user's data as it is: Trainer classes look at what kind it is, and a `DataFeed` repeats its epochs."""
    return lambda samples_per_step, seed: data


def lengthened(data: Any, length: int) -> Any:
    """Data repeated to `length` rows where it has fewer; streams and data without a length as they are."""
    stream = isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__")
    if stream or len(data) >= length:
        return data
    if is_huggingface(data) and callable(getattr(data, "select", None)):
        rows = len(data)  # `select` keeps columns, formats and batched reading
        return data.select([i % rows for i in range(length)], keep_in_memory=True)
    return RepeatedDataset(data, length)


def is_huggingface(data: Any) -> bool:
    """Whether `data` is one of the datasets library's own."""
    return type(data).__module__.startswith("datasets.")


def in_precision(keywords: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Keywords of the Trainer with models among them (a reference model) in the dtype of the trained one."""
    if precision is not Precision.PURE_BF16:
        return dict(keywords)
    return {k: as_dtype(v, torch.bfloat16) if isinstance(v, nn.Module) else v for k, v in keywords.items()}


def _synthetic(resolved: models.ResolvedModel) -> Callable[[int, int], Dataset[Any]]:
    return lambda samples_per_step, seed: batches.SyntheticDataset(
        resolved, seq_len=resolved.seq_len, size=samples_per_step * STEPS_OF_DATA, seed=seed
    )
