"""`autofit confirm`"""

from __future__ import annotations

import click

from autofit.cli.options import Duration
from autofit.errors import NothingFits, SearchFailed, UserError
from autofit.units import format_bytes, format_seconds


@click.command("confirm", short_help="Run the winner for many steps at full length.")
@click.argument("result", type=click.Path())
@click.option(
    "--steps", type=int, default=500, show_default=True, metavar="N", help="Optimizer steps to run."
)
@click.option("--timeout", type=Duration(), metavar="1h", help="Longest time for the run.")
def command(result: str, steps: int, timeout: float | None) -> None:
    """Run the winner of RESULT (best.json) for N optimizer steps at full accumulation and longest length.

    Exit code 0: it survived; 3: it ran out of memory.
    """
    from autofit.results.result import load
    from autofit.results.wording import format_percent, format_speed
    from autofit.search.confirmation import confirm
    from autofit.trials.trial import Reason

    if steps < 2:
        raise UserError(
            f"--steps must be at least 2, got {steps}", hint="optimizer state appears with the first step"
        )
    answer = load(result)
    outcome = confirm(
        answer, steps=steps, timeout_seconds=timeout, say=lambda text: click.echo(text, err=True)
    )
    if outcome.failure is not None:
        text = f"{answer.best.config.label()} did not survive {steps} steps: {outcome.failure.message}"
        if outcome.outcome.value == "infeasible":
            raise NothingFits(text, hint="search again with a smaller --memory, which leaves a larger margin")
        if outcome.failure.reason is Reason.TIMEOUT:
            raise UserError(f"{format_seconds(outcome.seconds)} were too short for {steps} steps", hint="give it more --timeout, or fewer --steps")
        raise SearchFailed(text, traceback=outcome.failure.traceback or "")
    assert outcome.measurement is not None
    config, memory = answer.best.config, outcome.measurement.memory
    speed = outcome.measurement.samples_per_second(
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    change = speed / answer.best.samples_per_second - 1
    click.echo(
        f"{config.label()} survived {outcome.measurement.optimizer_steps} optimizer steps in {format_seconds(outcome.seconds)}"
    )
    click.echo(f"speed: {format_speed(speed)} samples/s ({format_percent(change)} against the search)")
    needed = memory.needed_bytes
    if needed is not None:
        click.echo(f"memory: {format_bytes(needed)} of {format_bytes(answer.memory_limit_bytes)}")
