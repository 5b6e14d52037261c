"""The evaluation of a trial: the real `Trainer.evaluate()` on the longest rows, for a few batches, as between two steps of a training.

What it gathers is counted where it piles up, in the containers of `evaluation_loop`, so that `prediction_loss_only`, `preprocess_logits_for_metrics`,
`include_for_metrics` and `batch_eval_metrics` need no rules of ours. Not covered: `predict` and generation beyond what `evaluate()` itself does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer
from transformers import trainer as trainer_module

from autofit.errors import UserError
from autofit.processes.exception_report import describe_exception
from autofit.processes.failure import Evidence, classify_exception
from autofit.trials.trial import Reason
from autofit.workload.data.facts import lengths_digest
from autofit.workload.data.scan import MOST_SECONDS, is_map_style, lengths_of
from autofit.workload.digests import digest_of
from autofit.workload.loader import batch_size_of
from autofit.workload.sources import first_line

BATCHES = 3  #: tried: one alone, one beside what another left behind, and one more
CONTAINER = "EvalLoopContainer"
SETTINGS = ("eval_accumulation_steps", "eval_do_concat_batches")  #: no part of what makes a training another one


class Head(IterableDataset[Any]):
    """The first `rows` rows of a stream."""

    def __init__(self, stream: Any, rows: int) -> None:
        self._stream, self._rows = stream, rows

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._rows)


def evaluate(trainer: Trainer) -> dict[str, Any]:
    """Evaluate a few batches of the longest rows and say what was gathered; out of memory and all else is raised.

    Args:
        trainer: after some optimizer steps; one without an `eval_dataset` evaluates on its training data.

    Returns:
        `batch`, `batches`, `rows` (of the largest whole evaluation set; None for a stream), `longest`, `gathered_bytes_per_row`,
        `loss_only` (nothing but the loss is kept), `concatenates`, `accumulation_steps` (as the user has it), `metric_error` (of
        `compute_metrics`, or of an `evaluate` of the user's own after its loop, on these rows), `seconds`.

    Raises:
        UserError: the Trainer's own loader gives batches of another size.
    """
    args = trainer.args
    given = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    sets = given if isinstance(given, Mapping) else {"": given}
    batch = args.eval_batch_size
    stands_in = trainer.eval_dataset is None  # for a set that may have any number of rows
    picked = {name: longest_rows(data, batch * BATCHES, name=name, repeats=stands_in) for name, data in sets.items()}
    heap = Heap()
    problems: list[str] = []
    quiet = metrics_that_do_not_raise(trainer, problems.append)
    begin = time.perf_counter()
    with quiet, a_loader_for_each_set(trainer), as_in_training(trainer):
        for data, _ in picked.values():
            with heap.watched(min(batch, count(data) or batch)), errors_after_the_loop(trainer, problems.append):
                trainer.evaluate(eval_dataset=data)
    return {
        "batch": batch,
        "batches": heap.batches,
        "rows": max((n for data in sets.values() if (n := count(data)) is not None), default=None),
        "longest": max((n for _, n in picked.values() if n is not None), default=None),
        "gathered_bytes_per_row": heap.bytes_per_row,
        "loss_only": trainer.compute_metrics is None or bool(args.prediction_loss_only),
        "concatenates": bool(getattr(args, "eval_do_concat_batches", True)),
        "accumulation_steps": args.eval_accumulation_steps,
        "metric_error": problems[0] if problems else None,
        "seconds": time.perf_counter() - begin,
    }


class Heap:
    """Counts what `evaluation_loop` keeps.

    Attributes:
        batches: most batches of which something was kept (the loss at least).
        bytes_per_row: of the largest batch.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.bytes_per_row = 0.0

    @contextlib.contextmanager
    def watched(self, batch: int) -> Iterator[None]:
        """Count while the block evaluates one set, `batch` rows at a time; without effect where the installed Trainer keeps its results elsewhere."""
        original = getattr(trainer_module, CONTAINER, None)
        if original is None:
            yield
            return
        added: dict[int, list[int]] = {}

        class Watched(original):  # type: ignore[misc, valid-type]
            def add(self, tensors: Any) -> None:
                added.setdefault(id(self), []).append(nested_bytes(tensors))
                super().add(tensors)

        setattr(trainer_module, CONTAINER, Watched)
        try:
            yield
        finally:
            setattr(trainer_module, CONTAINER, original)
            self.batches = max([self.batches, *(len(sizes) for sizes in added.values())])
            self.bytes_per_row = max(self.bytes_per_row, sum(max(sizes) for sizes in added.values()) / batch)


def nested_bytes(tensors: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and mappings."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, Mapping):
        return sum(nested_bytes(value) for value in tensors.values())
    return sum(nested_bytes(value) for value in tensors) if isinstance(tensors, list | tuple) else 0


@contextlib.contextmanager
def metrics_that_do_not_raise(trainer: Trainer, say: Callable[[str], None]) -> Iterator[None]:
    """Let an error of `compute_metrics` be said and not end the evaluation: it saw a few rows only. Out of memory still does."""
    compute = trainer.compute_metrics
    if compute is None:
        yield
        return

    def careful(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute(*args, **kwargs)
        except Exception as error:  # the user's own code may raise anything
            if ran_out_of_memory(error):
                raise
            say(f"{type(error).__name__}: {first_line(error)}")
            return {}

    trainer.compute_metrics = careful
    try:
        yield
    finally:
        trainer.compute_metrics = compute


@contextlib.contextmanager
def errors_after_the_loop(trainer: Trainer, say: Callable[[str], None]) -> Iterator[None]:
    """As `metrics_that_do_not_raise`, for an `evaluate` of the user's own that goes on with the results: they are of a few rows only."""
    ended, loop = False, trainer.evaluation_loop

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal ended
        ended = False
        found = loop(*args, **kwargs)
        ended = True
        return found

    trainer.evaluation_loop = noted  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        if not ended or ran_out_of_memory(error):
            raise
        say(f"{type(error).__name__}: {first_line(error)}")
    finally:
        trainer.evaluation_loop = loop  # type: ignore[method-assign]


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says, by its type or its wording, that memory ran out, or may have."""
    evidence = Evidence(device_kind="cuda" if torch.cuda.is_initialized() else "cpu", limit_set=True)
    return classify_exception(describe_exception(error), evidence).reason in (Reason.OUT_OF_MEMORY, Reason.SUSPECTED_OUT_OF_MEMORY)


@contextlib.contextmanager
def a_loader_for_each_set(trainer: Trainer) -> Iterator[None]:
    """Have every set get a loader of its own, in batches as asked for: persistent workers would serve the first set again.

    Raises:
        UserError: a loader's batches are of another size, so that what is seen says nothing of the batch that was asked for.
    """
    persistent, trainer.args.dataloader_persistent_workers = trainer.args.dataloader_persistent_workers, False
    make, asked = trainer.get_eval_dataloader, trainer.args.eval_batch_size

    def checked(*args: Any, **kwargs: Any) -> Any:
        loader = make(*args, **kwargs)
        given = batch_size_of(loader)
        if given not in (None, asked):
            raise UserError(
                f"{type(trainer).__name__}.get_eval_dataloader gives batches of {given} rows, whatever per_device_eval_batch_size says",
                hint="use self.args.eval_batch_size there",
            )
        return loader

    trainer.get_eval_dataloader = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        trainer.args.dataloader_persistent_workers = persistent
        trainer.get_eval_dataloader = make  # type: ignore[method-assign]


@contextlib.contextmanager
def as_in_training(trainer: Trainer) -> Iterator[None]:
    """Let the Trainer evaluate as it does between two steps, where `fp16_full_eval` and `bf16_full_eval` leave the weights as they are: that needs more."""
    kept, trainer.is_in_train = trainer.is_in_train, True
    try:
        yield
    finally:
        trainer.is_in_train = kept


def longest_rows(data: Any, wanted: int, *, name: str = "", repeats: bool = False) -> tuple[Any, int | None]:
    """The `wanted` longest rows of a dataset, longest first, and the length of the longest (None: unknown). A stream gives its first rows.

    Args:
        data: one evaluation set.
        wanted: rows.
        name: of the set, where there are several.
        repeats: whether rows come again where there are fewer than are wanted; a stream ends all the same.

    Raises:
        UserError: the dataset is empty, or raises when a row is read.
    """
    if not is_map_style(data):
        return Head(data, wanted), None
    lengths, wanted = lengths_of(data, what=f"evaluation {name}".strip()), wanted if repeats else min(wanted, len(data))
    order = [i % len(data) for i in range(wanted)] if lengths is None else lengths.longest_batch(wanted)
    longest = None if lengths is None else int(lengths.inputs.max())
    return _picked(data, order), longest


def first_rows(data: Any, wanted: int) -> Any:
    """The first `wanted` rows of a dataset, or of each in a mapping of them."""
    if isinstance(data, Mapping):
        return {name: first_rows(one, wanted) for name, one in data.items()}
    if not is_map_style(data):
        return Head(data, wanted)
    return data if len(data) <= wanted else _picked(data, range(wanted))


def _picked(data: Any, rows: Sequence[int]) -> Any:
    """Some rows of a map-style dataset; one of the datasets library keeps its columns and formats."""
    select = getattr(data, "select", None)
    if type(data).__module__.startswith("datasets.") and callable(select):
        return select(list(rows), keep_in_memory=True)
    return Subset(data, list(rows))


def data_label(data: Any) -> str:
    """Which data it is, in a few words: its kind, and how many rows it has."""
    if isinstance(data, Mapping):
        return ", ".join(f"{name}: {data_label(one)}" for name, one in data.items())
    rows = count(data)
    return f"{type(data).__name__} of {'unknown length' if rows is None else f'{rows} rows'}"


def evaluation_label(data: Any, settings: Mapping[str, Any]) -> str:
    """`data_label` with a digest of what else decides about the memory of an evaluation: another one is not answered from its record.

    Args:
        data: the evaluation dataset, or a mapping of several.
        settings: of the user's TrainingArguments.
    """
    sets, told, end = data if isinstance(data, Mapping) else {"": data}, list[tuple[str, str | None]](), time.monotonic() + MOST_SECONDS
    for name, one in sets.items():  # the rows of many sets take no longer than those of one: the evaluation reads them when it is tried
        told.append((str(name), _lengths_digest(one, str(name)) if time.monotonic() < end else None))
    return f"{data_label(data)}, {digest_of([told, [str(settings.get(name)) for name in SETTINGS]])}"


def _lengths_digest(data: Any, name: str) -> str | None:
    """Of the lengths of all rows; None where they are not all known, and for rows that cannot be read, which the evaluation will say."""
    try:
        lengths = lengths_of(data, what=f"evaluation {name}".strip())
    except Exception:  # rows may hold anything, and nobody may ever ask for an evaluation
        return None
    return lengths_digest(lengths, ordered=False) if lengths is not None and lengths.complete else None


def count(data: Any) -> int | None:
    """Rows of a dataset; None for streams."""
    try:
        return len(data)
    except TypeError:
        return None
