"""`autofit search`"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autofit.cli.options import (
    budget_options,
    refuse_with_replay,
    script_of,
    space_options,
    spec_of,
    workload_of,
    workload_options,
)
from autofit.cli.sections import SectionedCommand
from autofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.results.result import Warning
    from autofit.trials.landscape import Landscape


@click.command("search", cls=SectionedCommand, short_help="Find the fastest configuration that fits.")
@workload_options
@space_options
@budget_options
@click.option(
    "--study", type=click.Path(), metavar="FILE", help="Optuna journal to append to and to go on from."
)
@click.option(
    "--output", type=click.Path(), default="best.json", show_default=True, metavar="FILE", help="The result."
)
@click.option(
    "--replay",
    type=click.Path(),
    metavar="LANDSCAPE",
    help="Search on a recorded grid instead of the device.",
)
@click.option(
    "--predict/--no-predict", default=True, help="Trace memory and time before the first trial (CUDA)."
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- python SCRIPT ...]")
def command(
    output: str, study: str | None, replay: str | None, predict: bool, script: tuple[str, ...], **values: Any
) -> None:
    """Run short trials of the real Trainer and write the fastest configuration that fits.

    Behind -- stands your own command line, to tune a script that builds a Trainer, as it is.

    \b
      autofit search --model bert-large-uncased --effective-batch 64
      autofit search --model gpt2 --effective-batch 32 --memory 16GiB --timeout 10m
      autofit search --effective-batch 64 -- python train.py --its --own --flags
    """
    from autofit.files import check_writable
    from autofit.trials.landscape import Landscape

    check_writable(output, what="output file")
    read = {"--study": study, "--replay": replay, "--dataset": values.get("dataset"), **{word: word for word in script}}
    for name, path in read.items():
        if path is not None and _same_file(path, output):
            raise UserError(f"{name} and --output name the same file", hint="give them different names")
    if script and replay is not None:
        raise UserError("--replay and a script were both given", hint="a recorded grid needs no script")
    if replay is not None:
        refuse_with_replay(values)
    landscape = Landscape.load(replay) if replay is not None else None
    if landscape is not None:
        _refuse_other(landscape, values)
        if values.get("effective_batch") is None:
            values["effective_batch"] = landscape.effective_batch
        values["model"] = values.get("model") or str(landscape.spec.get("model") or "recorded")
    spec = spec_of(values, script_of(script, values) if script else workload_of(values))

    from autofit.cli.console import AnswerConsole
    from autofit.reports.progress import on_stderr
    from autofit.reports.report import render
    from autofit.search.tuning import run_search

    with on_stderr(spec) as observer:
        result = run_search(spec, study=study, observer=observer, landscape=landscape, predict=predict)
    result = replace(result, warnings=tuple(_named(warning, output) for warning in result.warnings))
    try:
        result.save(output)
    finally:  # a search is not run in vain because a disk is full
        render(result, AnswerConsole())
    click.echo(f"written: {output}", err=True)


def _refuse_other(landscape: Landscape, values: Mapping[str, Any]) -> None:
    """A recorded grid answers for what it was recorded of."""
    for option, name in (("--model", "model"), ("--task", "task"), ("--seq-len", "seq_len")):
        recorded, asked = landscape.spec.get(name), values.get(name)
        if recorded is not None and asked is not None and recorded != asked:
            raise UserError(f"the landscape was recorded with {option} {recorded}, not {asked}", hint=f"leave {option} out")


def _named(warning: Warning, output: str) -> Warning:
    """The warning, speaking of the file that was written."""
    step = warning.next_step
    return warning if step is None else replace(warning, next_step=step.replace("best.json", output))


def _same_file(one: str, other: str) -> bool:
    from pathlib import Path

    return Path(one).resolve() == Path(other).resolve()
