"""`autofit confirm`"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autofit.cli.options import Duration
from autofit.errors import AutofitError, NothingFits, SearchFailed, UserError
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autofit.trials.runner import TrialResult


@click.command("confirm", short_help="Run the winner for many steps at full length.")
@click.argument("result", type=click.Path())
@click.option(
    "--steps", type=int, default=500, show_default=True, metavar="N", help="Optimizer steps to run."
)
@click.option("--timeout", type=Duration(), metavar="1h", help="Longest time for the run.")
def command(result: str, steps: int, timeout: float | None) -> None:
    """Run the winner of RESULT (best.json) for N optimizer steps at full accumulation, the longest batches first.

    Exit code 0: it survived; 3: it ran out of memory; 1: it failed for another reason.
    """
    from autofit.results.result import load
    from autofit.results.wording import format_interval, format_percent, format_speed
    from autofit.search.confirmation import confirm

    if steps < 2:
        raise UserError(
            f"--steps must be at least 2, got {steps}", hint="optimizer state appears with the first step"
        )
    answer = load(result)
    outcome = confirm(
        answer, steps=steps, timeout_seconds=timeout, say=lambda text: click.echo(text, err=True)
    )
    if outcome.failure is not None:
        raise _not_survived(answer.best.config.label(), steps, outcome)
    assert outcome.measurement is not None
    config, memory = answer.best.config, outcome.measurement.memory
    split = {name: getattr(config, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    speed = outcome.measurement.samples_per_second(**split)
    change, interval = speed / answer.best.samples_per_second - 1, outcome.measurement.interval(**split)
    click.echo(
        f"{config.label()} survived {outcome.measurement.optimizer_steps} optimizer steps in {format_seconds(outcome.seconds)}"
    )
    click.echo(f"speed: {format_speed(speed)} samples/s (95 %: {format_interval(interval)}; {format_percent(change)} against the search)")
    needed = memory.needed_bytes
    if needed is not None:
        click.echo(f"memory: {format_bytes(needed)} of {format_bytes(answer.memory_limit_bytes)}")


def _not_survived(label: str, steps: int, outcome: TrialResult) -> AutofitError:
    """The error for a run that did not come to its end, by what ended it."""
    from autofit.beliefs.predict import MEMORY_REASONS
    from autofit.trials.trial import Outcome, Reason

    failure = outcome.failure
    assert failure is not None
    text = f"{label} did not survive {steps} steps: {failure.message}"
    if failure.reason in MEMORY_REASONS:
        return NothingFits(text, hint="search again with a smaller --memory, which leaves a larger margin")
    if failure.reason is Reason.TIMEOUT:
        return UserError(f"{format_seconds(outcome.seconds)} were too short for {steps} steps", hint="give it more --timeout, or fewer --steps")
    if failure.refused:
        return UserError(failure.message, hint=failure.hint)
    unsound = "memory is not the cause: look at the loss, the learning rate and the data of this training"
    hint = unsound if outcome.outcome is Outcome.INFEASIBLE else None
    return SearchFailed(text, traceback=failure.traceback or failure.log_tail or "", hint=hint)
