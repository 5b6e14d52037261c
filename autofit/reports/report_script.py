"""How the answer gets into the user's script: flags for the very command line that was tuned, or lines to change."""

from __future__ import annotations

import shlex

from autofit.problem.script_command import shown
from autofit.results.export import arguments_call, cli_flags, flags_trouble, own_class
from autofit.results.result import TuneResult


def usage(result: TuneResult) -> tuple[str, list[str], list[str]]:
    """How to use the answer: a sentence, the words of a command line (empty where flags do not reach the script), and lines to change.

    Flags stand behind the command's own: HfArgumentParser lets the last one of a name decide.
    """
    command = result.spec.workload.script or ()
    if flags_trouble(result) is None:
        return "add the flags at the end to your command line:", [shown(command), *cli_flags(result)], []
    facts = result.model.get("script") or {}
    if facts.get("origin") == "file":
        named = [word for word in command if word.endswith((".json", ".yaml", ".yml"))]
        where = shlex.quote(named[0]) if named else "the file of its arguments"
        return f"change these in {where} (values of {own_class(result)[1]}):", [], _changed(result)
    return f"change these lines of {own_class(result)[1]} in {result.spec.workload.model}:", [], _changed(result)


def _changed(result: TuneResult) -> list[str]:
    """The keywords, one a line, without the call around them."""
    return [line for line in arguments_call(result)[1:-1] if not line.lstrip().startswith("output_dir=")]
