"""The user's own script in a trial's process, as Python would run it, up to its first `Trainer.train()` and no further.

Arguments are replaced as they are made (`arguments`), writes are kept out of the user's directories (`guard`), and the first training is
handed to the caller, who decides what becomes of it. Then the script is unwound: nothing that stands after `train()` runs. Not covered: a training
that the script starts in another process, and code of its own that catches `BaseException` and goes on computing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from transformers import Trainer, TrainingArguments

import autofit
from autofit.errors import ScriptError, UserError
from autofit.problem.script_command import label, named_outputs, read_script, script_file
from autofit.problem.script_source import output_directories
from autofit.processes.protocol import SCRATCH
from autofit.workload.evaluation import first_rows
from autofit.workload.replacing import replaced
from autofit.workload.scripts.arguments import ArgumentKeeper, Taken
from autofit.workload.scripts.guard import TrainingStopped, WriteGuard
from autofit.workload.scripts.nets import nets
from autofit.workload.scripts.origin import Origin
from autofit.workload.scripts.trainer import noting_optimizer

EARLY_BATCHES = 2  #: of an evaluation that the script runs before it trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The first training of a script, at the moment when it calls `train()`.

    Attributes:
        trainer: as the script built it.
        model: the Trainer's.
        train: the Trainer's own `train`, without arguments: nothing is resumed from.
        taken: its arguments: what the script asked for, and where they came from.
        set_in_code: tuned fields that the script sets by an assignment of its own, so that a flag has no effect.
        trainers: how many Trainers were built so far.
        redirected: directories that the script saved to before the training, and that were spared.
        spared: directories that the script deleted before the training, and that are still there.
        shortened: whether the script evaluated before the training, which was done on the first rows only.
    """

    trainer: Trainer
    model: torch.nn.Module
    train: Callable[[], Any]
    taken: Taken
    set_in_code: tuple[str, ...]
    trainers: int
    redirected: tuple[str, ...]
    spared: tuple[str, ...]
    shortened: bool


@dataclass
class _Run:
    """One run of a script."""

    name: str
    keeper: ArgumentKeeper
    guard: WriteGuard
    at_training: Callable[[Training], None]
    length: Mapping[str, Any]
    trainers: list[Trainer] = field(default_factory=list)
    handled: bool = False
    shortened: bool = False
    error: BaseException | None = None

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        build, train, evaluate = Trainer.__init__, Trainer.train, Trainer.evaluate

        @functools.wraps(build)
        def hooked_build(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            given = kwargs.get("args", args[1] if len(args) > 1 else None)
            if isinstance(given, TrainingArguments):
                self.keeper.hold(given)
            build(trainer, *args, **kwargs)
            self.trainers.append(trainer)

        @functools.wraps(train)
        def hooked_train(trainer: Trainer, *args: Any, **kwargs: Any) -> NoReturn:
            if not self.handled:
                self.handled = True
                self._hand_over(trainer, functools.partial(train, trainer))
            raise TrainingStopped

        @functools.wraps(evaluate)
        def hooked_evaluate(trainer: Trainer, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = trainer.eval_dataset if eval_dataset is None else eval_dataset
            if not self.handled and not isinstance(given, str) and given is not None:
                short = first_rows(given, EARLY_BATCHES * trainer.args.eval_batch_size)
                try:
                    found = evaluate(trainer, short, *args, **kwargs)
                except (MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception:  # metrics over all references, loaders that want the dataset itself: then all of it
                    return evaluate(trainer, eval_dataset, *args, **kwargs)
                self.shortened = True
                return found
            return evaluate(trainer, eval_dataset, *args, **kwargs)

        create = noting_optimizer(Trainer.create_optimizer)
        hooks = {"__init__": hooked_build, "train": hooked_train, "evaluate": hooked_evaluate, "create_optimizer": create}
        with contextlib.ExitStack() as stack:
            for name, hook in hooks.items():
                stack.enter_context(replaced(Trainer, name, hook))
            yield

    def _hand_over(self, trainer: Trainer, train: Callable[[], Any]) -> None:
        self.keeper.hold(trainer.args)
        assert trainer.model is not None  # Trainer refuses to be built without one
        training = Training(
            trainer=trainer,
            model=trainer.model,
            train=train,
            taken=self.keeper.of(trainer.args),
            set_in_code=tuple(sorted(self.keeper.set_later)),
            trainers=len(self.trainers),
            redirected=tuple(self.guard.redirected),
            spared=tuple(self.guard.spared),
            shortened=self.shortened,
        )
        self.keeper.set_for_good(trainer.args, self.length)
        try:
            self.at_training(training)
        except TrainingStopped:
            raise
        except BaseException as error:
            self.error = error  # the script may swallow it, and must not hide it
            raise
        finally:
            self.guard.seal()

    def why_untrained(self) -> ScriptError:
        """The error for a script that came to its end without a training."""
        if not self.trainers:
            hint = "script mode tunes scripts that build a transformers.Trainer and call its train() in the same process"
            return ScriptError(f"{self.name} ended without building a Trainer", hint=hint)
        args = self.trainers[-1].args
        asked = self.keeper.of(args).origin is Origin.FLAGS and not args.do_train
        hint = (
            "does its command line lack --do_train?"
            if asked
            else "a trial measures the first train() of a script"
        )
        return ScriptError(f"{self.name} built a Trainer and ended without calling train()", hint=hint)


def run_script(
    command: Sequence[str],
    values: Mapping[str, Any],
    *,
    at_training: Callable[[Training], None],
    length: Mapping[str, Any] | None = None,
) -> None:
    """Run the script until its first training has been handled.

    Args:
        command: what stands behind `python`.
        values: fields of TrainingArguments and their values.
        at_training: called once, at the first `train()`; may raise `TrainingStopped` out of the training itself.
        length: more of them, set when the training begins: until then the script reads its own.

    Raises:
        ScriptError: it ended, or called `sys.exit`, without a training.
        BaseException: what the script, or `at_training`, raised, with the script's own part of the traceback.
    """
    file = None if command[0] == "-m" else os.path.abspath(command[0])  # before the script goes elsewhere
    with tempfile.TemporaryDirectory(
        prefix="autofit-trial-", ignore_cleanup_errors=True, dir=os.environ.get(SCRATCH)
    ) as directory:
        guard = WriteGuard(directory, () if file is None else (os.path.dirname(file),))
        for output in (*named_outputs(command), *_written_outputs(command)):  # the script may touch them before its arguments are made
            guard.keep(output)
        keeper = ArgumentKeeper(values, directory, on_output=guard.keep, typed=command[2 if command[0] == "-m" else 1 :])
        run = _Run(name=label(command), keeper=keeper, guard=guard, at_training=at_training, length=length or {})
        failure: BaseException | None = None
        try:
            with guard.active(nets), keeper.active(), run.hooks():
                _execute(command)
        except TrainingStopped:
            pass
        except BaseException as error:
            failure = error
        failure = run.error if run.handled else failure
        if isinstance(failure, SystemExit) and not run.handled:
            raise ScriptError(
                f"{run.name} called sys.exit({_status(failure)}) before it trained"
            ) from failure
        if failure is not None:
            raise failure.with_traceback(_own_part(failure.__traceback__, file))
        if not run.handled:
            raise run.why_untrained()


def _written_outputs(command: Sequence[str]) -> list[str]:
    """Directories that the script's text names as outputs; none of what is not readable."""
    file = script_file(command)
    try:
        return [] if file is None else output_directories(read_script(file))
    except UserError:
        return []  # running it will say what is wrong


def _execute(command: Sequence[str]) -> None:
    """As `python COMMAND` does: argv, the search path, `__main__`, no standard input."""
    sys.stdin = _NoInput()
    name = command[0]
    if name == "-m":
        _set_search_path(os.getcwd())
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(name)
        _set_search_path(os.path.dirname(os.path.realpath(path)))
        sys.argv = list(command)
        runpy.run_path(path, run_name="__main__")


def _set_search_path(first: str) -> None:
    """What Python would search: the script's directory first, and nothing that only autofit's own command added."""
    ours = ("", os.path.dirname(sys.executable))
    home = str(Path(autofit.__file__).parent.parent)
    rest = [entry for entry in sys.path if entry not in ours]
    if "" in sys.path and home == os.getcwd() and home not in rest:
        rest.append(home)  # autofit itself was found through it
    sys.path[:] = rest if os.environ.get("PYTHONSAFEPATH") else [first, *rest]


class _NoInput(io.TextIOBase):
    """Standard input that says what is wrong with reading it, instead of an end of file."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def read(self, size: int | None = -1, /) -> str:
        raise EOFError("the script reads standard input, which a trial does not have")

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise EOFError("the script reads standard input, which a trial does not have")


def _status(request: SystemExit) -> str:
    return "" if request.code is None else repr(request.code)


def _own_part(trace: TracebackType | None, script: str | None) -> TracebackType | None:
    """The traceback from the script's first line on (None: of a module): the frames above it are ours and runpy's."""
    current = trace
    while current is not None:
        code = current.tb_frame.f_code
        if code.co_filename == script or (
            script is None and current.tb_frame.f_globals.get("__name__") == "__main__"
        ):
            return current
        current = current.tb_next
    return trace
