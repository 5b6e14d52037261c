"""`autofit show`"""

from __future__ import annotations

import click


@click.command("show", short_help="Show the report of a result file again.")
@click.argument("result", type=click.Path())
def command(result: str) -> None:
    """Show the report of RESULT (best.json) again. Runs nothing."""
    from rich.console import Console

    from autofit.report import render
    from autofit.result import load

    render(load(result), Console())
