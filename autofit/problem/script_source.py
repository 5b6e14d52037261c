"""What the text of a user's script tells before it runs: whether it trains more than once, where it writes to, and what it sets in the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

#: variables that libraries read when they are imported, which in a child is before the script begins
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "CUBLAS_", "NVIDIA_TF32_")
#: options and fields that name what is written to, in scripts of all kinds
OUTPUT_NAME = re.compile(
    r"-{0,2}([\w-]*[_-])?(out|outputs?|save|checkpoints?|ckpts?|results?|logs?|logging)([_-]?(dir|directory|path|folder|root))?", re.IGNORECASE
)
OPTIONS = ("add_argument", "option", "Option")  #: functions that take an option's names and its default: argparse's, click's, typer's


def early_environment(tree: ast.Module, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of `READ_AT_IMPORT` that a script sets at its top level to plain text: `os.environ[...] = ...`, `setdefault` and `update`.

    Args:
        tree: of the script.
        environ: decides what `setdefault` leaves.
    """
    found: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                _keep(found, target.slice, statement.value)
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not _is_environ(call.func.value):
            continue
        if call.func.attr == "setdefault" and len(call.args) == 2 and _text(call.args[0]) not in {**environ, **found}:
            _keep(found, call.args[0], call.args[1])
        elif call.func.attr == "update":
            for keyword in call.keywords:
                _keep(found, ast.Constant(keyword.arg), keyword.value)
            for given in call.args:
                if isinstance(given, ast.Dict):
                    for key, value in zip(given.keys, given.values):
                        _keep(found, key, value)
    return found


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _keep(found: dict[str, str], key: ast.expr | None, value: ast.expr) -> None:
    name, text = _text(key), _text(value)
    if name is not None and text is not None and name.startswith(READ_AT_IMPORT):
        found[name] = text


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def output_directories(tree: ast.Module) -> list[str]:
    """Directories that a script's text gives to its arguments (`TrainingArguments("out")`, `output_dir=OUT`), plainly or by a name that such a value is
    given to; and the defaults of options, fields and parameters that are named as outputs are."""
    named: dict[str, set[str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    named.setdefault(target.id, set()).add(_text(node.value))
    found = [text for node in ast.walk(tree) for name, value in _defaults(node) if OUTPUT_NAME.fullmatch(name) and (text := _text(value))]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [k.value for k in node.keywords if k.arg == "output_dir"]
        if _name(node.func).endswith(("Arguments", "Config")):
            given += node.args[:1]
        for value in given:
            values = named.get(value.id, set()) if isinstance(value, ast.Name) else {_text(value)}
            found += sorted(text for text in values if text)
    return list(dict.fromkeys(found))


def _defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, default) of what a node declares: an option of a command line, a field of a class, parameters of a function."""
    if isinstance(node, ast.Call) and _name(node.func) in OPTIONS:
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        yield from ((name, default) for name in map(_text, node.args) if name is not None)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        value = node.value
        if isinstance(value, ast.Call):  # field(default="out"), typer.Option("out")
            value = next((k.value for k in value.keywords if k.arg == "default"), value.args[0] if value.args else None)
        yield node.target.id, value
    elif isinstance(node, ast.arguments):
        named = [*node.posonlyargs, *node.args]
        given = [*zip(reversed(named), reversed(node.defaults)), *zip(node.kwonlyargs, node.kw_defaults)]
        for parameter, value in given:
            if isinstance(value, ast.Call) and value.args:
                value = value.args[0]
            yield parameter.arg, value


def trains_often(tree: ast.Module) -> bool:
    """Whether a script seems to train more than once: `train()` is called on trainers several times, of which one run may see more than one, or hidden
    in a search for hyperparameters."""
    searches = any(isinstance(node, ast.Attribute) and node.attr == "hyperparameter_search" for node in ast.walk(tree))
    return searches or any(_trainings(scope.body) > 1 for scope in [tree, *_functions(tree)]) or (
        sum(map(_makes, ast.walk(tree))) > 1 and sum(map(_trains, ast.walk(tree))) > 1
    )


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _trainings(statements: Sequence[ast.stmt]) -> int:
    """The most calls of a trainer's `train()` that one run of these statements makes; those of functions defined there not counted."""
    count = 0
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If):
            count += max(_trainings(statement.body), _trainings(statement.orelse))
        elif isinstance(statement, ast.For | ast.While):
            count += 2 * _trainings(statement.body)
        elif isinstance(statement, ast.With | ast.AsyncWith):
            count += _trainings(statement.body)
        elif isinstance(statement, ast.Try):
            count += max([_trainings([*statement.body, *statement.orelse]), *(_trainings(h.body) for h in statement.handlers)])
            count += _trainings(statement.finalbody)
        else:
            count += sum(map(_trains, ast.walk(statement)))
    return count


def _trains(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "train" and "trainer" in ast.unparse(function.value).lower()


def _makes(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func).endswith("Trainer")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
