"""The command line: `autofit search | estimate | show | export | confirm | doctor | landscape`.

stdout carries the answer, stderr progress and complaints. Exit codes: 0 an answer, 2 a user's mistake, 3 nothing fits, 1 our bug.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence

import click

from autofit import __version__
from autofit.errors import AutofitError, NothingFits, ScriptError, SearchFailed
from autofit.units import format_bytes

INTERRUPTED = 130
GOING_ON = {
    "search": "with --study FILE the same command goes on where it stopped",
    "landscape": "the same command goes on where it stopped",
}  #: command -> what to do when it was interrupted
FULL = (errno.ENOSPC, errno.EDQUOT)  #: of a disk, whoever writes to it
COMMANDS = ("search", "estimate", "show", "export", "confirm", "doctor", "landscape")


class _LazyGroup(click.Group):
    """Imports a command's module when it is called; `--help` imports the short ones only for their first line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        from importlib import import_module

        command: click.Command = import_module(f"autofit.cli.{name}").command
        return command


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="autofit")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Find the fastest Hugging Face Trainer configuration that fits in memory, by measuring it.

    \b
      autofit search --model bert-large-uncased --effective-batch 64
      autofit show best.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is gone; under nohup it may be
            signal.signal(signal.SIGHUP, _interrupt)
    try:
        status = cli.main(
            args=None if arguments is None else list(arguments), prog_name="autofit", standalone_mode=False
        )
    except click.ClickException as error:
        complain(error.format_message().rstrip("."), hint=_usage_hint(error))
        status = 2
    except AutofitError as error:
        _explain(error)
        status = error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
        complain("interrupted before there was an answer", hint=GOING_ON.get(command))
        status = INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()
        status = 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        _leave_stdout()
        complain(f"{error.strerror}{f': {error.filename}' if error.filename else ''}", hint="free some, or write to another disk")
        status = 2
    sys.exit(status if isinstance(status, int) else 0)


def _leave_stdout() -> None:
    """Have what is still to be written there go nowhere, so that the interpreter's last flush is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str, *, hint: str | None = None) -> None:
    """Write one line that says what was wrong, and one that says what to do."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    if hint:
        click.echo(f"hint: {' '.join(hint.split())}", err=True)


def _explain(error: AutofitError) -> None:
    if isinstance(error, SearchFailed | ScriptError) and error.traceback:
        click.echo(error.traceback.rstrip(), err=True)
    message = error.message
    if isinstance(error, NothingFits) and error.shortfall_bytes is not None:
        message += f"; at least {format_bytes(error.shortfall_bytes)} are missing"
    complain(message, hint=error.hint)


def _usage_hint(error: click.ClickException) -> str | None:
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "autofit"
        return f"{path} --help lists what is understood"
    return None


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
