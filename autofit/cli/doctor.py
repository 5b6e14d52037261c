"""`autofit doctor`"""

from __future__ import annotations

import click

INDENT = " " * 12  #: as wide as the first column


@click.command("doctor", short_help="Say what this machine can search, and why not the rest.")
@click.option("--device", metavar="cuda:0|cpu", help="The device to look at; the first card when left out.")
def command(device: str | None) -> None:
    """Say what this machine can search, and why not the rest. Runs no training."""
    from rich.console import Console

    from autofit.results.wording import wrapped
    from autofit.search.examination import examine

    console = Console()
    for line in examine(device):
        shown = wrapped(line, console.width, hanging=INDENT) if console.is_terminal else [line]  # for grep, a fact is a line
        click.echo("\n".join(shown))
