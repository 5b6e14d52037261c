"""The arguments of a script under trial: replaced in every TrainingArguments as it is made, and held until the training begins.

Replacing them inside `__post_init__` leaves everything that is derived there (autocast dtype, device, enums, aliases) to the library itself, and a script
that reads its arguments back reads what is run. What the script had asked for is kept beside it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainingArguments

from autofit.errors import ScriptError
from autofit.workload.replacing import replaced
from autofit.workload.scripts.origin import Origin, origin_of

#: schedulers that refuse arguments without an evaluation, which a trial does not run; the speed of a step does not depend on them
NEEDS_EVALUATION = ("reduce_lr_on_plateau", "greedy")
#: as a trial has them, all together or all but one, in no arguments but a copy of replaced ones
SILENT = ("save_strategy", "eval_strategy", "logging_strategy", "disable_tqdm")
MARK = "_autofit_taken"  #: in the instance, so that it goes along with a copy
LIBRARIES = ("transformers.trainer", "transformers.integrations", "accelerate", "trl.", "peft.", "dataclasses", "autofit.")  #: whose assignments are not the script's
FIELDS = frozenset(field.name for field in fields(TrainingArguments))
DERIVED = ("mixed_precision", "gradient_checkpointing", "gradient_checkpointing_kwargs", "lr_scheduler_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One TrainingArguments that was changed.

    Attributes:
        args: the object.
        own: what the script had asked for, by field.
        origin: where it came from.
        held: field -> the value it has to keep.
    """

    args: TrainingArguments
    own: dict[str, Any]
    origin: Origin
    held: dict[str, Any]


class ArgumentKeeper:
    """Replaces fields of every TrainingArguments that is made while it is active.

    A copy of replaced arguments (`deepcopy`, `dataclasses.replace`, `TrainingArguments(**other.to_dict())`, one loaded from a file) asks for what its
    original asked for, but for the fields that the script gave it anew.

    Args:
        values: field -> value, by the names of the installed TrainingArguments.
        directory: instead of the output directory.
        on_output: told of every directory that the script meant to write to.
        typed: words of the script's command line.
    """

    def __init__(
        self, values: Mapping[str, Any], directory: str, *, on_output: Callable[[str], None], typed: Sequence[str] = ()
    ) -> None:
        self._values = {**values, "output_dir": directory}
        self._directory, self._on_output, self._typed = directory, on_output, tuple(typed)
        self._taken: list[Taken] = []
        self._writing = False
        self.set_later: set[str] = set()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace fields while the block runs."""
        with contextlib.ExitStack() as stack:
            for name, hook in (("__post_init__", self._hooked), ("__setattr__", self._watched)):
                stack.enter_context(replaced(TrainingArguments, name, hook(getattr(TrainingArguments, name))))
            yield

    def hold(self, args: TrainingArguments) -> None:
        """Put back what the script changed in `args` after they were made, and note it as set in its code."""
        if not any(taken.args is args for taken in self._taken):
            args.__post_init__()  # unpickled, or copied: they were never seen here
        taken = self.of(args)
        for name, value in taken.held.items():
            found = getattr(args, name, None)
            if found != value:
                if name in self._values and name != "output_dir":
                    self.set_later.add(name)
                    taken.own[name] = plain(found)
                if name == "output_dir":
                    self._on_output(str(found))
                with self._ours():
                    setattr(args, name, value)

    def set_for_good(self, args: TrainingArguments, values: Mapping[str, Any]) -> None:
        """Set fields that the script no longer reads."""
        with self._ours():
            for name, value in values.items():
                setattr(args, name, value)

    def of(self, args: TrainingArguments) -> Taken:
        """What is known of `args`."""
        return next((t for t in self._taken if t.args is args), None) or self._original(args) or self._taken[-1]

    def _original(self, args: TrainingArguments) -> Taken | None:
        """Of what `args` are a copy; None of arguments that the script made itself."""
        mark = vars(args).get(MARK)
        if isinstance(mark, int) and mark < len(self._taken):
            return self._taken[mark]
        alike = {n for n, v in self._values.items() if plain(getattr(args, n, None)) == plain(v)}
        silent = "disable_tqdm" in alike and len(alike.intersection(SILENT)) >= len(SILENT) - 1  # one may have been given anew
        copied = silent or self._inside(args.output_dir)
        return self._taken[-1] if self._taken and copied else None

    def _inside(self, output_dir: str | None) -> bool:
        """Whether it lies in the trial's own directory."""
        return output_dir is not None and Path(self._directory) in (Path(output_dir), *Path(output_dir).parents)

    def _hooked(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def post_init(args: TrainingArguments) -> None:
            refuse_distributed(args)
            own = {
                name: plain(getattr(args, name)) for name in (*self._values, *DERIVED) if hasattr(args, name)
            }
            copied, origin = self._original(args), origin_of(sys._getframe(1), self._typed)
            if copied is not None:
                given = {name: value for name, value in own.items() if value != plain(copied.held.get(name))}
                own, origin = {**copied.own, **given}, copied.origin
                self.set_later.update(name for name in given if name in self._values and name != "output_dir")
            if args.output_dir is not None and not self._inside(args.output_dir):
                self._on_output(str(args.output_dir))
            with self._ours():
                self._replace(args)
                original(args)
            held = {name: getattr(args, name) for name in (*self._values, *DERIVED) if hasattr(args, name)}
            vars(args)[MARK] = len(self._taken)
            self._taken.append(Taken(args=args, own=own, origin=origin, held=held))

        return post_init

    def _replace(self, args: TrainingArguments) -> None:
        if plain(args.eval_strategy) not in ("no", None):
            args.do_eval = True  # as the library would derive it
        for name, value in self._values.items():
            setattr(args, name, value)
        if str(plain(args.lr_scheduler_type)) in NEEDS_EVALUATION:
            args.lr_scheduler_type = "constant"  # type: ignore[assignment]  # a name is what the field takes

    def _watched(self, original: Callable[..., None]) -> Callable[..., None]:
        """An assignment by the script counts as one also where the value is what runs anyway: a flag would have no effect."""

        @functools.wraps(original)
        def set_attribute(args: TrainingArguments, name: str, value: Any) -> None:
            original(args, name, value)
            if self._writing or name not in FIELDS or name == "output_dir":
                return
            frame = sys._getframe(1)
            made = MARK in vars(args)
            others = LIBRARIES if made else (*LIBRARIES, "transformers.")
            if (made or not _is_generated(frame)) and not frame.f_globals.get("__name__", "").startswith(others):
                self.set_later.add(name)
                if made:  # else it is read when they are
                    self.of(args).own[name] = plain(value)

        return set_attribute

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        before, self._writing = self._writing, True
        try:
            yield
        finally:
            self._writing = before


def refuse_distributed(args: TrainingArguments) -> None:
    """Script mode is a world of one process.

    Raises:
        ScriptError: DeepSpeed or FSDP are asked for.
    """
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise ScriptError(f"the script trains with {name}: script mode tunes one process without it")


def _is_generated(frame: FrameType) -> bool:
    """Whether it is the `__init__` that a dataclass has by itself, which sets what it is given."""
    return frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>"


def plain(value: Any) -> Any:
    """An enum's value; anything else itself."""
    return value.value if isinstance(value, Enum) else value
