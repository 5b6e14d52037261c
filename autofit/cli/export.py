"""`autofit export`"""

from __future__ import annotations

import click


@click.command("export", short_help="Print the winner as JSON, Python or command-line flags.")
@click.argument("result", type=click.Path())
@click.option(
    "--format", "fmt", type=click.Choice(("json", "python", "cli")), default="json", show_default=True
)
def command(result: str, fmt: str) -> None:
    """Print the winner of RESULT (best.json) in a form that can be used as it is."""
    from autofit.results.export import export
    from autofit.results.result import load

    click.echo(export(load(result), fmt).rstrip("\n"))
