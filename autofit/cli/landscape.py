"""`autofit landscape`"""

from __future__ import annotations

from typing import Any

import click

from autofit.cli.options import Duration, space_options, spec_of, workload_of, workload_options
from autofit.cli.sections import SectionedCommand


@click.command("landscape", cls=SectionedCommand, short_help="Record an exhaustive grid, to replay searches on.")
@workload_options
@space_options
@click.option(
    "--timeout", type=Duration(), metavar="1h", help="Stop after this time; the same command goes on."
)
@click.option(
    "--window", type=Duration(), default="1s", show_default=True, help="Measured time per configuration."
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each configuration; more even out a noisy machine.",
)
@click.option(
    "--output",
    type=click.Path(),
    default="grid.json",
    show_default=True,
    metavar="FILE",
    help="The landscape.",
)
def command(output: str, timeout: float | None, window: float, rounds: int, **values: Any) -> None:
    """Run every legal configuration and write raw samples and memory. Goes on where an existing FILE stops."""
    from autofit.files import check_writable
    from autofit.search.recording import record_landscape

    check_writable(output, what="output file")
    spec = spec_of(values, workload_of(values))
    landscape = record_landscape(
        spec,
        output,
        timeout_seconds=timeout,
        window_seconds=window,
        rounds=rounds,
        say=lambda text: click.echo(text, err=True),
    )
    fitting = sum(point.measurement is not None for point in landscape.points)
    click.echo(f"{output}: {len(landscape.points)} configurations, {fitting} fit")
