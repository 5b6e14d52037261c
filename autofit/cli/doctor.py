"""`autofit doctor`"""

from __future__ import annotations

import click


@click.command("doctor", short_help="Say what this machine can search, and why not the rest.")
@click.option("--device", metavar="cuda:0|cpu", help="The device to look at; the first card when left out.")
def command(device: str | None) -> None:
    """Say what this machine can search, and why not the rest. Runs no training."""
    from autofit.examination import examine

    for line in examine(device):
        click.echo(line)
