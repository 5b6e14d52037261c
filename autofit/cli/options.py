"""Options that several commands share, and what they parse to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from autofit.cli.data_options import BESIDE_DATASET, DATA_OPTIONS, data_source_of, given
from autofit.errors import UserError
from autofit.problem.adaptation import adaptation_of
from autofit.problem.spec import DEFAULT_TOLERANCE, SearchSpec, Workload
from autofit.units import parse_duration, parse_size

F = TypeVar("F", bound=Callable[..., Any])
SCRIPT_DECIDES = {
    "--model": "model",
    "--task": "task",
    "--seq-len": "seq_len",
    "--attn": "attn",
    "--trust-remote-code": "trust_remote_code",
    "--dataset": "dataset",
    "--adapter": "adapter",
    "--adapter-rank": "adapter_rank",
    "--adapter-target": "adapter_target",
    "--quantize": "quantize",
    **{flag: name for name, flag in BESIDE_DATASET.items()},
}  #: flag -> name of what a script says itself
RECORDED = {
    **{flag: name for flag, name in SCRIPT_DECIDES.items() if flag not in ("--model", "--task", "--seq-len", "--trust-remote-code")},
    "--tune": "tune",
    "--eval-batch-size": "eval_batch_size",
    "--device": "device",
}  #: flag -> name of what a recorded grid cannot be asked for
CHECKPOINTING = {"on": (True,), "off": (False,), "both": None}


class Size(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """`16GiB`, `16GB` or bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_size(value, what=_flag(param))


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """`90s`, `10m`, `1h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration(value, what=_flag(param))


class Names(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A list with commas."""

    name = "a,b"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        if not names:
            raise UserError(f"{_flag(param)} is empty", hint="leave it out, or name one")
        return names


class Numbers(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Whole numbers with commas."""

    name = "n,m"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in str(value).split(",") if part.strip()))
        except ValueError:
            raise UserError(f"{_flag(param)} takes whole numbers with commas, got {value!r}") from None
        if not numbers:
            raise UserError(f"{_flag(param)} is empty", hint="leave it out to search all")
        return numbers


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order given."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


workload_options = options(
    click.option("--model", metavar="NAME|PATH", help="Hub name, preset, directory or config file."),
    click.option("--task", help="sequence-classification, causal-lm, ...; by architecture when left out."),
    click.option("--seq-len", type=int, metavar="N", help="Tokens per sample."),
    click.option("--attn", metavar="NAME", help="Attention implementation: eager, sdpa, ..."),
    click.option("--trust-remote-code", is_flag=True, help="Let the model's own Python code run."),
    click.option("--adapter", metavar="lora|dora|ia3", help="Train an adapter (peft) on the frozen model."),
    click.option("--adapter-rank", type=int, metavar="N", help="Rank of a LoRA or DoRA adapter; 16 when left out."),
    click.option(
        "--adapter-target", type=Names(), metavar="a,b", help="Modules that get the adapter, or all-linear; peft's choice when left out."
    ),
    click.option("--quantize", metavar="4bit|8bit", help="Store the frozen weights in 4 or 8 bit (bitsandbytes)."),
    *DATA_OPTIONS,
)
space_options = options(
    click.option("--effective-batch", type=int, metavar="N", help="Samples per optimizer step, exactly."),
    click.option(
        "--memory",
        type=Size(),
        metavar="SIZE",
        help="Device memory to use (16GiB); what is free when left out.",
    ),
    click.option("--device", metavar="cuda:0|cpu", help="Where to run; the first card when left out."),
    click.option("--precision", type=Names(), metavar="bf16,fp16", help="fp32, tf32, bf16, fp16, pure_bf16."),
    click.option("--optim", type=Names(), metavar="a,b", help="Optimizers by TrainingArguments' names."),
    click.option(
        "--checkpointing",
        type=click.Choice(tuple(CHECKPOINTING)),
        default="both",
        show_default=True,
        help="Gradient checkpointing.",
    ),
    click.option("--batch-size", type=Numbers(), metavar="8,16", help="Per-device batch sizes to consider."),
    click.option(
        "--keep-numerics", is_flag=True, help="Only choices that leave the mathematics of training as it is."
    ),
    click.option(
        "--tune",
        type=Names(),
        metavar="a,b",
        help="Widen the space: attn, compile, liger, every_n_layers, offload, pure_bf16.",
    ),
    click.option("--trial-timeout", type=Duration(), metavar="2m", help="Longest time for one trial; the confirmation has as long as its steps need."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of data, model and sampler."),
)
budget_options = options(
    click.option("--trials", type=int, metavar="N", help="Most trials to run."),
    click.option("--timeout", type=Duration(), metavar="10m", help="Longest time for the search, from its first trial on."),
    click.option(
        "--sampler",
        type=click.Choice(("auto", "tpe", "random", "grid")),
        default="auto",
        show_default=True,
        help="What proposes trials: auto is the cost model, the others are Optuna's.",
    ),
    click.option(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        show_default=True,
        help="Relative speed difference that does not matter.",
    ),
    click.option(
        "--eval-batch-size",
        type=int,
        metavar="N",
        help="Also try whether the winner's evaluation fits at N samples per step.",
    ),
)


def workload_of(values: dict[str, Any]) -> Workload:
    """The workload that the options name.

    Raises:
        UserError: no model.
    """
    if not values.get("model"):
        raise UserError(
            "no model given",
            hint="name one, e.g. --model bert-base-uncased (autofit doctor lists the presets), or give a script: -- python train.py",
        )
    return Workload(
        model=values["model"],
        task=values.get("task"),
        seq_len=values.get("seq_len"),
        trust_remote_code=values.get("trust_remote_code", False),
        attn_implementation=values.get("attn"),
        data=data_source_of(values),
        adaptation=adaptation_of(
            adapter=values.get("adapter"),
            rank=values.get("adapter_rank"),
            target=values.get("adapter_target"),
            quantize=values.get("quantize"),
        ),
    )


def refuse_with_replay(values: dict[str, Any]) -> None:
    """Check that nothing is asked for that a replay would have to run.

    Raises:
        UserError: it is, by the option's name.
    """
    for flag, name in RECORDED.items():
        if given(values, name):
            what = "evaluation" if name == "eval_batch_size" else "run but its own"
            raise UserError(f"--replay and {flag} were both given: a recorded grid holds no {what}", hint="leave one of them out")


def script_of(command: tuple[str, ...], values: dict[str, Any]) -> Workload:
    """The workload that is the user's own script.

    Raises:
        UserError: not a Python script, or an option that describes a model beside it.
    """
    from autofit.problem.script_command import check_program, label, parse_command

    check_program(command)
    for flag, name in SCRIPT_DECIDES.items():
        if given(values, name):
            raise UserError(
                f"{flag} and a script were both given: the script makes its own model and data", hint=f"leave {flag} out"
            )
    script = parse_command(command)
    return Workload(model=label(script), script=script)


def spec_of(values: dict[str, Any], workload: Workload) -> SearchSpec:
    """The search that the options ask for.

    Raises:
        UserError: no effective batch, or a value out of range.
    """
    from autofit.problem.config import parse_precisions
    from autofit.problem.extras import parse_tune

    if values.get("effective_batch") is None:
        raise UserError(
            "no effective batch given",
            hint="say how many samples an optimizer step sees, e.g. --effective-batch 64",
        )
    return SearchSpec(
        workload=workload,
        effective_batch=values["effective_batch"],
        device=values.get("device"),
        memory_limit_bytes=values.get("memory"),
        precisions=parse_precisions(values.get("precision")),
        optims=values.get("optim"),
        checkpointing=CHECKPOINTING[values.get("checkpointing") or "both"],
        batch_sizes=values.get("batch_size"),
        keep_numerics=bool(values.get("keep_numerics")),
        tune=parse_tune(values.get("tune")),
        trials=values.get("trials"),
        timeout_seconds=values.get("timeout"),
        trial_timeout_seconds=values.get("trial_timeout"),
        sampler=values.get("sampler") or "auto",
        seed=values.get("seed") or 0,
        tolerance=values.get("tolerance", DEFAULT_TOLERANCE),
        eval_batch_size=values.get("eval_batch_size"),
    )


def _flag(param: click.Parameter | None) -> str:
    return param.opts[-1] if param is not None and param.opts else "the value"
