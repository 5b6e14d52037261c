"""`autofit estimate`"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from autofit.cli.options import CHECKPOINTING, Names, Size, workload_of, workload_options
from autofit.cli.sections import SectionedCommand
from autofit.errors import UserError

if TYPE_CHECKING:
    from autofit.devices.target import Target
    from autofit.problem.spec import Workload


@click.command("estimate", cls=SectionedCommand, short_help="Predict peak memory, for any card, without a GPU.")
@workload_options
@click.option("--batch-size", type=int, metavar="N", help="Per-device batch; 8 when left out.")
@click.option(
    "--effective-batch",
    type=int,
    metavar="N",
    help="Samples per optimizer step; the batch size when left out.",
)
@click.option("--precision", type=Names(), metavar="bf16", help="fp32, tf32, bf16, fp16, pure_bf16.")
@click.option(
    "--checkpointing",
    type=click.Choice(tuple(CHECKPOINTING)),
    help="Gradient checkpointing; off when left out.",
)
@click.option("--optim", type=Names(), metavar="NAME", help="Optimizer by TrainingArguments' name.")
@click.option("--gpu", metavar="NAME", help="A card: T4, V100-16GB, RTX 3090, A100-80GB, H100, ...")
@click.option(
    "--memory", type=Size(), metavar="SIZE", help="Device memory to use; all of the card when left out."
)
@click.option("--padded", is_flag=True, help="Batches hold padding, so that attention needs a mask.")
@click.option(
    "--max-batch", is_flag=True, help="Largest batch for every precision x checkpointing x optimizer."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    batch_size: int | None,
    effective_batch: int | None,
    precision: tuple[str, ...] | None,
    checkpointing: str | None,
    optim: tuple[str, ...] | None,
    gpu: str | None,
    memory: int | None,
    padded: bool,
    max_batch: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Predict the peak memory of a training, for a card that need not be here. Nothing is run on it.

    \b
      autofit estimate --model bert-large-uncased --batch-size 8 --precision bf16 --gpu RTX-3090
      autofit estimate --model gpt2-xl --gpu A100-80GB --max-batch
    """
    from autofit.cli.console import AnswerConsole
    from autofit.devices.target import target_of
    from autofit.forecasts import estimation
    from autofit.problem.config import parse_precisions
    from autofit.reports.estimate_report import render_estimate

    workload = workload_of(values)
    target = target_of(gpu, memory)
    precisions = parse_precisions(precision)
    if max_batch:
        if batch_size is not None:
            raise UserError(
                "--max-batch finds the batch size: --batch-size cannot be given with it",
                hint="leave one of them out",
            )
        choices = {
            "effective_batch": effective_batch,
            "precisions": precisions,
            "optims": optim,
            "checkpointing": CHECKPOINTING[checkpointing or "both"],
            "padded": padded,
        }
        _print_largest(workload, target, choices, as_json=as_json)
        return
    config = estimation.config_of(
        batch_size=batch_size,
        effective_batch=effective_batch,
        precision=_one(precision, "--precision") or "fp32",
        checkpointing=_switch(checkpointing),
        optim=_one(optim, "--optim") or "adamw_torch_fused",
    )
    answer = estimation.estimate_all(workload, [config], target, padded=padded)[0]
    if as_json:
        click.echo(json.dumps(answer.to_json(), indent=2))
    else:
        render_estimate(answer, AnswerConsole())


def _print_largest(workload: Workload, target: Target, choices: dict[str, Any], *, as_json: bool) -> None:
    """The largest batch of every class; `choices` are keywords of `largest_batches`."""
    from autofit.cli.console import AnswerConsole
    from autofit.forecasts import largest
    from autofit.reports.estimate_report import render_largest

    if sys.stderr.isatty():
        click.echo("tracing every precision, checkpointing and optimizer: this can take minutes", err=True)
    found = largest.largest_batches(workload, target, **choices)
    if as_json:
        click.echo(json.dumps(largest.largest_json(found, target), indent=2))
    else:
        render_largest(found, target, AnswerConsole())


def _one(names: tuple[str, ...] | None, flag: str) -> str | None:
    if names is None:
        return None
    if len(names) > 1:
        raise UserError(
            f"{flag} takes one value here, got {','.join(names)}", hint="with --max-batch it takes several"
        )
    return names[0]


def _switch(checkpointing: str | None) -> bool:
    if checkpointing == "both":
        raise UserError("--checkpointing both is for --max-batch", hint="say on or off")
    return checkpointing == "on"
