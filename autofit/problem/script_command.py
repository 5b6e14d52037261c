"""The user's own command line, `python train.py --lr 1e-4` or `python -m pkg.train`: understood, checked, and said again.

Parent side: the script is read, never run. A command is kept as Python's command line has it after the interpreter.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import shlex
import shutil
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

from autofit.errors import UserError
from autofit.problem.script_source import OUTPUT_NAME

EXAMPLE = "autofit search --effective-batch 64 -- python train.py --its --own --flags"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "accelerate", "deepspeed")
HARMLESS = ("-u", "-B", "-s", "-E", "-O", "-OO")  #: options of the interpreter that a trial need not repeat
HIDDEN = "***"  #: stands for a secret in files
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_SECRET = re.compile(
    r"--?(?!([\w-]*[_-])?(pad|eos|bos|unk|mask|sep|cls|image|video|audio|special|stop|start|end|label)[_-]?token$)[\w-]*(token|password|secret|api[_-]?key)",
    re.IGNORECASE,
)


def parse_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command without its interpreter: `("train.py", "--lr", "1e-4")` or `("-m", "pkg.train")`.

    Args:
        words: what stands behind `--`.

    Raises:
        UserError: not a Python script, several processes, another interpreter, or a file that is missing or not Python.
    """
    check_program(words)
    rest = list(words)
    if _PYTHON.fullmatch(os.path.basename(rest[0])):
        _check_interpreter(rest.pop(0))
        while rest and rest[0] in HARMLESS:
            rest.pop(0)
    if not rest or rest[0] == "-":
        raise UserError(
            "python reads its program from standard input here: a script's name is missing", hint=EXAMPLE
        )
    if rest[0] == "-m":
        if len(rest) < 2 or not all(part.isidentifier() for part in rest[1].split(".")):
            raise UserError("python -m needs the name of a module", hint="python -m package.train")
        if any(rest[1] == name or rest[1].startswith(f"{name}.") for name in LAUNCHING_MODULES):
            raise UserError(f"{rest[1]} starts several processes: script mode tunes one", hint=EXAMPLE)
    elif rest[0].startswith("-"):
        raise UserError(f"the option {rest[0]!r} of python cannot be used here", hint=EXAMPLE)
    else:
        read_script(rest[0])
    return tuple(rest)


def check_program(words: Sequence[str]) -> None:
    """Check that the words begin as a Python command does: others are more likely a slip in the options before it.

    Raises:
        UserError: no word, a launcher of several processes, or something else.
    """
    if not words:
        raise UserError("no script given", hint=EXAMPLE)
    program = os.path.basename(words[0])
    if program in LAUNCHERS:
        raise UserError(f"{program} starts several processes: script mode tunes one", hint=EXAMPLE)
    if not _PYTHON.fullmatch(program) and not program.endswith(".py"):
        raise UserError(
            f"{words[0]!r} belongs to no option, and is no Python command",
            hint=f"--model names a model; a script stands behind --: {EXAMPLE}",
        )


def read_script(path: str) -> ast.Module:
    """The syntax tree of the script.

    Raises:
        UserError: missing, unreadable, or not Python.
    """
    if os.path.isdir(path):
        raise UserError(
            f"script {path!r} is a directory", hint="give the path of a file, or python -m package.module"
        )
    try:
        with tokenize.open(path) as handle:
            return ast.parse(handle.read(), filename=path)
    except FileNotFoundError:
        raise UserError(
            f"script {path!r} does not exist", hint=f"relative paths start at {os.getcwd()}"
        ) from None
    except OSError as error:
        raise UserError(f"script {path!r} cannot be read: {error.strerror or error}") from None
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise UserError(
            f"script {path!r} is not Python {sys.version_info[0]}.{sys.version_info[1]}: {error.msg}{where}"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # null bytes, or bytes that are not of the declared encoding
        raise UserError(f"script {path!r} is not Python: {error}") from None


def script_file(command: Sequence[str]) -> str | None:
    """The file that the command runs; of a module where it is found without an import, None where it is not."""
    if command[0] != "-m":
        return os.path.abspath(command[0])
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    *packages, _ = parts = command[1].split(".")
    for end, _ in enumerate(packages, 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), places)
        places = None if spec is None else spec.submodule_search_locations
        if places is None:
            return None
    spec = importlib.machinery.PathFinder.find_spec(command[1], places)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{command[1]}.__main__", spec.submodule_search_locations)
    return None if spec is None else spec.origin


def named_outputs(command: Sequence[str]) -> list[str]:
    """Directories that the command line names as outputs (`--output_dir X`, `--save-path=X`, ...), before the script has said what it makes of them."""
    found = []
    for word, following in zip(command, [*command[1:], ""]):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name.startswith("-") and OUTPUT_NAME.fullmatch(name) and value and not value.startswith("-"):
            found.append(value)
    return found


def label(command: Sequence[str]) -> str:
    """The script's name for tables and files."""
    return command[1] if command[0] == "-m" else os.path.basename(command[0])


def shown(command: Sequence[str]) -> str:
    """The command as it is typed."""
    return shlex.join(["python", *command])


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """The command with tokens and passwords blotted out, for files that others may read."""
    kept: list[str] = []
    for word in command:
        name, equals, value = word.partition("=")
        if kept and _SECRET.fullmatch(kept[-1]) and not word.startswith("-"):
            kept.append(HIDDEN)
        elif equals and value and _SECRET.fullmatch(name):
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(word)
    return tuple(kept)


def _check_interpreter(word: str) -> None:
    """Refuse a named interpreter of another installation: trials run under this one."""
    if os.sep not in word:
        return
    found = shutil.which(word)
    if found is None:
        raise UserError(f"the interpreter {word!r} does not exist")
    if Path(found).parent.resolve() != Path(sys.executable).parent.resolve():
        raise UserError(
            f"the script runs under {word}, but autofit is installed for {sys.executable}",
            hint=f"{word} -m pip install autofit-trainer",
        )
