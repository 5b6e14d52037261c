"""Imports point one way: the parent never loads torch, Optuna lives where the study is, and importing changes nothing."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import autofit
import autofit.errors

ROOT = Path(autofit.__file__).parent
HEAVY = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes")
#: The packages, lowest first: each may import what stands before it, and nothing that stands after.
FLOORS = (
    "problem",
    "devices",
    "memory",
    "trials",
    "beliefs",
    "processes",
    "forecasts",
    "results",
    "study",
    "reports",
    "workload",
    "tracing",
    "children",
    "search",
    "cli",
)
GROUND = ("errors", "files", "kinds", "units")  #: modules below all packages: they import nothing of the package but each other
ROOF = ("", "__main__", "testing")  #: what stands above or beside them
CHILD_SIDE = ("autofit.workload", "autofit.tracing", "autofit.children")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Module name -> syntax tree, for the whole package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def _statements(node: ast.AST, *, inside_functions: bool) -> Iterator[ast.AST]:
    """All nodes that run, without blocks for type checkers, and without function bodies unless asked for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _statements(child, inside_functions=inside_functions)


@functools.cache
def imports(module: str, *, inside_functions: bool = False) -> frozenset[str]:
    """Names of the modules that `module` imports; a module imported from a package counts by its own name."""
    found: set[str] = set()
    for node in _statements(modules()[module], inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules() else node.module)
    return frozenset(found)


def child_side(module: str) -> bool:
    """Whether a module runs in children only."""
    return any(module == p or module.startswith(f"{p}.") for p in CHILD_SIDE)


def floor_of(module: str) -> str:
    """The package that a module belongs to; a module of the ground or the roof is its own."""
    inside = module.removeprefix("autofit").removeprefix(".")
    return next((f for f in FLOORS if f"{inside}.".startswith(f"{f}.")), inside)


PARENT_SIDE = sorted(name for name in modules() if not child_side(name))


def package_of(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("module", PARENT_SIDE)
def test_a_parent_side_module_imports_neither_torch_nor_what_runs_in_children(module: str) -> None:
    assert not {name for name in imports(module) if package_of(name) in HEAVY}
    assert not {name for name in imports(module) if child_side(name)}


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_from_its_own_floor_and_those_below(module: str) -> None:
    """In functions too: an import that is put off is an arrow all the same."""
    own = floor_of(module)
    assert own in (*FLOORS, *GROUND, *ROOF), f"{module} stands nowhere: name its package in FLOORS"
    if own in ROOF:
        return
    below = {*GROUND, "", *FLOORS[: FLOORS.index(own) + 1]} if own in FLOORS else {*GROUND}
    above = {n for n in imports(module, inside_functions=True) if n in modules() and floor_of(n) not in below}
    assert above == set()


def test_optuna_is_imported_only_where_the_study_is() -> None:
    users = {
        name
        for name in modules()
        if any(package_of(found) == "optuna" for found in imports(name, inside_functions=True))
    }
    assert {floor_of(name) for name in users} == {"study"}


def test_only_what_runs_in_children_imports_torch_or_transformers_at_all() -> None:
    allowed = {
        # A parent that builds the user's TrainingArguments, and a worker that proves that its threads work.
        "autofit.results.result",
    }
    users = {
        name
        for name in modules()
        if any(package_of(found) in HEAVY for found in imports(name, inside_functions=True))
    }
    assert {name for name in users if not child_side(name)} <= allowed


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(imports(module)):
                if name in modules():
                    visit(name, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_every_module_says_what_it_is() -> None:
    silent = [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def run(program: str, *arguments: str) -> str:
    """stdout of a fresh interpreter that runs `program`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(program: str, *arguments: str) -> set[str]:
    """Top-level packages that are loaded when `program` has run."""
    ending = "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    return set(json.loads(run(textwrap.dedent(program) + ending, *arguments).splitlines()[-1]))


def test_importing_the_package_loads_next_to_nothing() -> None:
    assert loaded("import autofit").isdisjoint({*HEAVY, "optuna", "numpy", "click", "rich"})


def test_the_commands_help_loads_no_library_that_trains_or_searches() -> None:
    program = """
        import contextlib
        from autofit.cli import main
        with contextlib.suppress(SystemExit):
            main(["--help"])
    """
    assert loaded(program).isdisjoint({*HEAVY, "optuna", "numpy"})


def test_all_parent_side_modules_together_load_neither_torch_nor_transformers() -> None:
    program = """
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    assert loaded(program, *PARENT_SIDE).isdisjoint(HEAVY)


def test_importing_changes_nothing_in_the_process() -> None:
    program = """
        import importlib, json, logging, os, signal, sys, threading, warnings
        for name in ("numpy", "optuna", "click", "rich.console", "cloudpickle"):  # what they do is theirs
            importlib.import_module(name)

        def state():
            return {
                "environment": dict(os.environ),
                "signals": [repr(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
                "timer": signal.getitimer(signal.ITIMER_REAL),
                "warnings": [repr(f) for f in warnings.filters],
                "logging": [logging.root.level, repr(logging.root.handlers), logging.root.manager.disable],
                "optuna": logging.getLogger("optuna").level,
                "path": list(sys.path),
                "directory": os.getcwd(),
                "hooks": [repr(sys.excepthook), repr(sys.unraisablehook), repr(threading.excepthook)],
                "threads": threading.active_count(),
                "recursion": sys.getrecursionlimit(),
                "streams": [repr(sys.stdout), repr(sys.stderr)],
                "umask": os.umask(os.umask(0o22)) and None,
            }

        before = state()
        for name in sys.argv[1:]:
            importlib.import_module(name)
        import autofit
        for name in autofit.__all__:
            getattr(autofit, name)
        after = state()
        print(json.dumps([key for key in before if before[key] != after[key]]))
    """
    assert json.loads(run(program, *PARENT_SIDE)) == []


class TestPublicNames:
    def test_they_are_sorted_and_each_once(self) -> None:
        assert autofit.__all__ == sorted(set(autofit.__all__))

    def test_each_is_there_and_listed(self) -> None:
        for name in autofit.__all__:
            assert getattr(autofit, name).__name__ == name
            assert name in dir(autofit)

    def test_what_the_contract_names_is_there(self) -> None:
        assert {"TuneResult", "load", "tune"} <= set(autofit.__all__)

    def test_every_error_is_there(self) -> None:
        errors = {n for n, value in vars(autofit.errors).items() if isinstance(value, type)}
        assert errors <= set(autofit.__all__)

    def test_a_type_checker_sees_the_same_names(self) -> None:
        seen: set[str] = set()
        for node in modules()["autofit"].body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                seen |= {
                    alias.name
                    for line in node.body
                    if isinstance(line, ast.ImportFrom)
                    for alias in line.names
                }
        assert seen == set(autofit.__all__)

    def test_a_name_that_is_not_there_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="module 'autofit' has no attribute 'tuen'"):
            autofit.tuen  # noqa: B018

    def test_the_version_is_the_distributions(self) -> None:
        text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
        assert f'\nversion = "{autofit.__version__}"\n' in text

    def test_types_are_shipped(self) -> None:
        assert (ROOT / "py.typed").exists()


def test_exit_codes_are_those_of_the_contract() -> None:
    codes = {
        name: value.exit_code
        for name, value in vars(autofit.errors).items()
        if isinstance(value, type) and issubclass(value, autofit.errors.AutofitError)
    }
    assert codes == {
        "AutofitError": 1,
        "FileFormatError": 2,
        "NothingFits": 3,
        "ScriptError": 2,
        "SearchFailed": 1,
        "StudyError": 2,
        "UserError": 2,
        "WorkerError": 1,
    }
