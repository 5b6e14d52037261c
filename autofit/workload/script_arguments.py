"""The arguments of a script under trial: replaced in every TrainingArguments as it is made, and held until the training begins.

Replacing them inside `__post_init__` leaves everything that is derived there (autocast dtype, device, enums, aliases) to the library itself, and a script
that reads its arguments back reads what is run. What the script had asked for is kept beside it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from autofit.workload.replacing import replaced

#: schedulers that refuse arguments without an evaluation, which a trial does not run; the speed of a step does not depend on them
NEEDS_EVALUATION = ("reduce_lr_on_plateau", "greedy")
DERIVED = ("mixed_precision", "gradient_checkpointing", "gradient_checkpointing_kwargs", "lr_scheduler_type")


class Origin(StrEnum):
    """Where a script's TrainingArguments come from."""

    FLAGS = "flags"  #: HfArgumentParser on the command line
    FILE = "file"  #: HfArgumentParser on a JSON or YAML file
    CODE = "code"  #: a call in the code


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

    Args:
        values: field -> value, by the names of the installed TrainingArguments.
        directory: instead of the output directory.
        on_output: told of every directory that the script meant to write to.
    """

    def __init__(
        self, values: Mapping[str, Any], directory: str, *, on_output: Callable[[str], None]
    ) -> None:
        self._values = {**values, "output_dir": directory}
        self._directory, self._on_output = directory, on_output
        self._taken: list[Taken] = []
        self._parsing: Origin = Origin.CODE
        self.set_later: set[str] = set()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace fields while the block runs."""
        parse = {"parse_args_into_dataclasses": Origin.FLAGS, "parse_dict": Origin.FILE}
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                replaced(TrainingArguments, "__post_init__", self._hooked(TrainingArguments.__post_init__))
            )
            for name, origin in parse.items():
                stack.enter_context(
                    replaced(HfArgumentParser, name, self._noting(getattr(HfArgumentParser, name), origin))
                )
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
                setattr(args, name, value)

    def of(self, args: TrainingArguments) -> Taken:
        """What is known of `args`; a copy counts as what was made last."""
        return next((t for t in self._taken if t.args is args), self._taken[-1])

    def _hooked(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def post_init(args: TrainingArguments) -> None:
            own = {
                name: plain(getattr(args, name)) for name in (*self._values, *DERIVED) if hasattr(args, name)
            }
            origin = self._parsing
            if (
                own["output_dir"] == self._directory and self._taken
            ):  # a copy of arguments that were changed already
                own, origin = self._taken[-1].own, self._taken[-1].origin
            elif own["output_dir"] is not None:
                self._on_output(str(own["output_dir"]))
            for name, value in self._values.items():
                setattr(args, name, value)
            if str(plain(args.lr_scheduler_type)) in NEEDS_EVALUATION:
                args.lr_scheduler_type = "linear"  # type: ignore[assignment]  # a name is what the field takes
            original(args)
            held = {name: getattr(args, name) for name in (*self._values, *DERIVED) if hasattr(args, name)}
            self._taken.append(Taken(args=args, own=own, origin=origin, held=held))

        return post_init

    def _noting(self, parse: Callable[..., Any], origin: Origin) -> Callable[..., Any]:
        @functools.wraps(parse)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._parsing = origin
            try:
                return parse(*args, **kwargs)
            finally:
                self._parsing = Origin.CODE

        return noted


def plain(value: Any) -> Any:
    """An enum's value; anything else itself."""
    return value.value if isinstance(value, Enum) else value
