"""What Python callers pass to `tune` and `estimate`, checked and put into the form that children take."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.errors import UserError
from autofit.problem.adaptation import adaptation_of
from autofit.problem.spec import Workload

#: keywords of a Trainer that every trial gives it
NAMED = ("model", "model_init", "args", "train_dataset", "eval_dataset", "data_collator", "processing_class", "callbacks")


@contextlib.contextmanager
def live_workload(
    *,
    model: Any,
    model_init: Any,
    task: str | None,
    seq_len: Any,
    attn_implementation: str | None,
    trust_remote_code: bool,
    train_dataset: Any,
    data_collator: Any,
    processing_class: Any,
    args: Any,
    trainer_cls: Any,
    trainer_kwargs: Any,
    peft_config: Any,
    quantize: Any,
    eval_dataset: Any = None,
    callbacks: Any = None,
) -> Iterator[Workload]:
    """The workload of what was passed, while the block runs: live objects travel in a private file that ends with it. See `tune` for the arguments.

    Raises:
        UserError: one of them cannot be used.
    """
    check_kinds(
        args=args,
        processing_class=processing_class,
        trainer_cls=trainer_cls,
        data_collator=data_collator,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    objects = {
        "model": None if isinstance(model, str | Path) else model,
        "model_init": model_init,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "data_collator": data_collator,
        "processing_class": processing_class,
        "callbacks": listed(callbacks),
        "trainer_cls": trainer_cls,
        "trainer_arguments": keywords(trainer_kwargs, "trainer_kwargs"),
        "arguments": None,
    }
    with _object_file(objects, args) as path:
        yield Workload(
            model=label_of(model, model_init),
            task=task,
            seq_len=whole_number(seq_len, "seq_len"),
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            objects_path=path,
            adaptation=adaptation_of(peft_config=peft_config, quantize=quantize),
        )


@contextlib.contextmanager
def _object_file(objects: Mapping[str, Any], args: Any) -> Iterator[str | None]:
    """Path of a private file with the live objects while the block runs; None where there are none."""
    if args is None and all(value is None for value in objects.values()):
        yield None
        return
    from autofit.processes.objects import ObjectFile, sent_arguments

    with ObjectFile({**objects, **sent_arguments(args)}) as file:
        yield file.path


def label_of(model: Any, model_init: Any) -> str:
    """The model's name, or what stands for an object."""
    if model is None and model_init is None:
        raise UserError(
            "no model given", hint="pass a name, a path, an nn.Module, a config, or model_init=..."
        )
    if model is not None and model_init is not None:
        raise UserError("model and model_init were both given: only one of them can be the model", hint="leave one of them out")
    if isinstance(model, str | Path):
        return str(model)
    thing = model if model is not None else model_init
    return f"<{getattr(thing, '__name__', type(thing).__name__)}>"


def names_of(value: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Names from a list, or from one string with commas; None stays None."""
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else several(value, "a list of choices")
    cleaned = tuple(dict.fromkeys(str(name).strip() for name in names if str(name).strip()))
    if not cleaned:
        raise UserError("an empty list of choices", hint="leave the option out to search them all")
    return cleaned


def several(value: Any, what: str) -> list[Any]:
    """The values of a list, a tuple or another collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise UserError(f"{what} was expected, got {value!r}")
    return list(value)


def sizes_of(value: Any) -> tuple[Any, ...] | None:
    """Batch sizes from one or several; None stays None."""
    return None if value is None else (value,) if isinstance(value, int) else tuple(several(value, "a batch size or a list of them"))


def listed(callbacks: Any) -> list[Any] | None:
    """The callbacks as a list; None where there are none."""
    hint = "callbacks=[MyCallback()]"
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise UserError(f"callbacks must be a list, got {type(callbacks).__name__}", hint=hint)
    for callback in callbacks or ():
        if not hasattr(callback, "on_train_begin"):
            raise UserError(f"a callback must be a TrainerCallback, got {callback!r}", hint=hint)
    return list(callbacks) if callbacks else None


def keywords(value: Any, what: str) -> dict[str, Any] | None:
    """Keywords for a call; None where there are none."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        raise UserError(f"{what} must be a dict of keywords, got {value!r}")
    for name in value or ():
        if name in NAMED:
            raise UserError(f"{what} holds {name!r}, which trials set themselves", hint=f"pass {name}=... to tune itself")
    return dict(value) if value else None


def path_of(value: Any, what: str) -> str | Path | None:
    """A file's path, or None."""
    if value is not None and not isinstance(value, str | Path):
        raise UserError(f"{what} must be a path, got {value!r}")
    return value


#: a package's class without rows by number -> what to pass instead
NO_ROWS_BY_NUMBER = {
    "pandas.DataFrame": "pass its rows: datasets.Dataset.from_pandas(frame)",
    "torch.DataLoader": "pass the dataset that it loads, and its collate_fn as data_collator",
}


def check_kinds(*, args: Any, processing_class: Any, trainer_cls: Any, data_collator: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Check what can be seen of objects without the libraries that they belong to.

    Raises:
        UserError: one of them is something else, by name.
    """
    if args is not None and (isinstance(args, type) or not dataclasses.is_dataclass(args)):
        raise UserError(f"args must be a TrainingArguments, got {_kind(args)}", hint='args=TrainingArguments(output_dir="out", ...)')
    if isinstance(processing_class, str | bytes | int):
        raise UserError(f"processing_class must be a tokenizer or a processor, got {processing_class!r}", hint="processing_class=AutoTokenizer.from_pretrained(...)")
    if trainer_cls is not None and not (isinstance(trainer_cls, type) and hasattr(trainer_cls, "train")):
        raise UserError(f"trainer_cls must be a subclass of Trainer, got {_kind(trainer_cls)}", hint="trainer_cls=MyTrainer, the class itself")
    if data_collator is not None and not callable(data_collator):
        raise UserError(f"data_collator must be a function of a list of rows, got {_kind(data_collator)}")
    for name, data in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
        if data is None or (name == "eval_dataset" and isinstance(data, dict) and data):
            continue
        if isinstance(data, str | bytes | dict) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
            raise UserError(f"{name} must be a dataset of rows, got {_kind(data)}", hint="pass a datasets.Dataset, a torch Dataset or a list of rows")
        for kind, hint in NO_ROWS_BY_NUMBER.items():
            if any(f"{cls.__module__.partition('.')[0]}.{cls.__name__}" == kind for cls in type(data).__mro__):
                raise UserError(f"{name} must be a dataset of rows, got {_kind(data)}", hint=hint)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def whole_number(value: Any, what: str) -> int | None:
    """A whole number, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{what} must be a whole number, got {value!r}")
    return value
