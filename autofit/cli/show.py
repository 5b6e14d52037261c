"""`autofit show`"""

from __future__ import annotations

import click


@click.command("show", short_help="Show the report of a result file again.")
@click.argument("result", type=click.Path())
@click.option("--all", "everything", is_flag=True, help="Every trial, also in long tables.")
def command(result: str, everything: bool) -> None:
    """Show the report of RESULT (best.json) again. Runs nothing."""
    from autofit.cli.console import AnswerConsole
    from autofit.reports.report import TRIAL_ROWS, render
    from autofit.results.result import load

    render(load(result), AnswerConsole(), trial_rows=None if everything else TRIAL_ROWS)
