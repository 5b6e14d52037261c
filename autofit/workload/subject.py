"""What a trial trains: a model built from a configuration, or the user's live objects, with data that never runs short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer

from autofit.arguments import model_arguments
from autofit.config import PRECISION_FACTS, Precision, TrialConfig
from autofit.errors import UserError
from autofit.spec import Workload
from autofit.workload import batches, models
from autofit.workload.knobs import weight_dtype as weight_dtype_of

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
        built_here: whether autofit chose the weights' dtype.
    """

    model: nn.Module
    dataset: Callable[[int, int], Dataset[Any]]
    collator: Callable[[list[Any]], Any] | None = None
    trainer_cls: type[Trainer] = Trainer
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    base_arguments: Mapping[str, Any] = field(default_factory=dict)
    built_here: bool = True


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
    resolved = models.resolve(workload)
    objects = resolved.objects
    live = objects is not None and (objects.model is not None or objects.model_init is not None)
    weight_dtype = PRECISION_FACTS[config.precision].weight_dtype
    if live and config.precision is not Precision.PURE_BF16:
        weight_dtype = own_dtype(resolved)
    model = models.build(
        resolved,
        device=device,
        weight_dtype=weight_dtype,
        attn_implementation=model_arguments(config).get("attn_implementation"),
    )
    extra = objects.extra if objects is not None else {}
    given = objects.train_dataset if objects is not None else None
    collator = objects.data_collator if objects is not None else None
    return Subject(
        model=model,
        dataset=_repeated(given) if given is not None else _synthetic(resolved),
        collator=collator if collator is not None or given is not None else batches.collator(resolved, weight_dtype=weight_dtype),
        trainer_cls=extra.get("trainer_cls") or Trainer,
        trainer_arguments=extra.get("trainer_arguments") or {},
        base_arguments=extra.get("arguments") or {},
        built_here=not live,
    )


def own_dtype(resolved: models.ResolvedModel) -> str:
    """dtype of most of a live model's parameters; float32 for one that is still to be built."""
    objects = resolved.objects
    if objects is None or objects.model is None:
        return "float32"
    return weight_dtype_of(objects.model)


def _repeated(data: Any) -> Callable[[int, int], Dataset[Any]]:
    return lambda samples_per_step, seed: RepeatedDataset(data, samples_per_step * STEPS_OF_DATA)


def _synthetic(resolved: models.ResolvedModel) -> Callable[[int, int], Dataset[Any]]:
    return lambda samples_per_step, seed: batches.SyntheticDataset(
        resolved, seq_len=resolved.seq_len, size=samples_per_step * STEPS_OF_DATA, seed=seed
    )
