"""The answer in the form in which it is used: a JSON file, a Python snippet, or command-line flags.

All formats hold the keywords that differ from the installed defaults (and `use_cpu` where the search ran on the CPU). Keywords of the
model (`dtype`, `attn_implementation`) stand beside them: a script whose arguments do not include them refuses them by name, which is better
than training something else than was measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from autofit.errors import UserError
from autofit.problem.arguments import CHECKPOINTING_NAMES, checkpointing_name, explicit_arguments
from autofit.results.export_adapter import adapter_import, adapter_lines, is_adapted, quantization_config
from autofit.results.result import TuneResult
from autofit.results.wording import format_interval, format_speed

OUTPUT_DIR = "out"


class Format(StrEnum):
    """What `autofit export --format` accepts."""

    JSON = "json"
    PYTHON = "python"
    CLI = "cli"


def export(result: TuneResult, fmt: str | Format) -> str:
    """Return the winner in a format, without a newline at the end.

    json: one flat object for `HfArgumentParser.parse_json_file`; add `output_dir` and your own. python: a snippet that
    builds `args`. cli: one line of flags for a script that uses `HfArgumentParser`; it holds no comment, because it
    is also used as `$(autofit export ...)`, so batch size and accumulation are written even where they are the default.

    Args:
        result: what to export.
        fmt: `json`, `python` or `cli`.

    Raises:
        UserError: an unknown format, a value that flags cannot say, or flags for a script that they do not reach.
    """
    try:
        chosen = Format(fmt)
    except ValueError:
        raise UserError(f"unknown format {fmt!r}", hint=f"choose from {', '.join(Format)}") from None
    if chosen is Format.JSON:
        return json.dumps({**arguments(result), **_named_model_arguments(result)}, indent=2, allow_nan=False)
    if chosen is Format.PYTHON:
        return python_snippet(result)
    trouble = flags_trouble(result)
    if trouble is not None:
        raise UserError(trouble, hint="use --format python or --format json, and change the values there")
    return " ".join(cli_flags(result))


def flags_trouble(result: TuneResult) -> str | None:
    """Why flags do not reach the script that was tuned; None when they do, or no script was tuned.

    They do where HfArgumentParser reads its command line, and no code of its own overrides a tuned field.
    """
    if result.spec.workload.script is None:
        return None
    name, facts = result.spec.workload.model, result.model.get("script") or {}
    if facts.get("origin") != "flags":
        where = "in a file" if facts.get("origin") == "file" else "in its code"
        return f"{name} takes no flags of TrainingArguments: it has them {where}"
    said = {"per_device_train_batch_size", "gradient_accumulation_steps", *arguments(result)}
    overridden = [field for field in facts.get("set_in_code") or () if field in said]
    if overridden:
        return f"{name} sets {', '.join(overridden)} in its own code: flags have no effect there"
    return None


def arguments(result: TuneResult) -> dict[str, Any]:
    """Keywords for TrainingArguments, `use_cpu` among them where the answer is for the CPU.

    For a script, also those that take back what it asks for itself.
    """
    own = (result.model.get("script") or {}).get("own") or {}
    cpu = {"use_cpu": True} if result.device.kind == "cpu" and not own.get("use_cpu") else {}
    return {**taken_back(result), **result.arguments, **cpu}


def taken_back(result: TuneResult) -> dict[str, Any]:
    """The winner's values of fields for which the tuned script asks another value; empty where no script was tuned."""
    own = dict((result.model.get("script") or {}).get("own") or {})
    if not own:
        return {}
    own[checkpointing_name(result.argument_defaults)] = any(own.get(name) for name in CHECKPOINTING_NAMES)
    wanted = explicit_arguments(result.best.config, result.argument_defaults)
    wanted["tf32"] = bool(wanted["tf32"])  # a flag cannot say None
    return {name: value for name, value in wanted.items() if name in own and (own[name] or False) != value}


def effective_batch(result: TuneResult) -> str:
    """The exact product in words: `effective batch 64 = 16 per device x 4 accumulation steps`."""
    config = result.best.config
    devices = result.spec.effective_batch // config.effective_batch()
    steps = config.gradient_accumulation_steps
    product = f"{config.per_device_train_batch_size} per device x {steps} accumulation step{'s' if steps != 1 else ''}"
    if devices > 1:
        product += f" x {devices} devices"
    return f"effective batch {config.effective_batch() * devices} = {product}"


def cli_flags(result: TuneResult) -> list[str]:
    """One string per flag with its value, quoted for a shell.

    Every switch has an explicit value: a bare `--tf32` is refused by HfArgumentParser, whose `bool | None` fields want one.

    Raises:
        UserError: a value of None, which no flag can say.
    """
    config = result.best.config
    values = {
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        **arguments(result),
        **_named_model_arguments(result),
    }
    return [_flag(name, value) for name, value in values.items()]


def arguments_call(result: TuneResult, *, output_dir: str = OUTPUT_DIR) -> list[str]:
    """The lines of `TrainingArguments(...)`, or of the user's own class, one keyword a line, the exact product in a comment."""
    keywords = {"output_dir": output_dir, **arguments(result)}
    lines = [f"    {name}={_literal(value)}," for name, value in keywords.items()]
    return [f"{own_class(result)[1]}(", f"    # {effective_batch(result)}", *lines, ")"]


def model_line(result: TuneResult) -> str | None:
    """The line that loads the model as it was measured; None where nothing needs to be said, or the model has no name.

    `from_pretrained` keeps the dtype of the checkpoint: one stored in 16 bit needs `dtype="float32"`, or the training is in
    pure 16 bit and neither speed nor memory nor numerics are those that were measured.
    """
    stored = (result.model.get("config") or {}).get("dtype")
    keywords = dict(result.model_arguments)
    if stored not in (None, "float32"):
        keywords.setdefault("dtype", "float32")
    if is_live(result) or not (keywords or is_adapted(result)):
        return None
    if result.spec.workload.trust_remote_code:
        keywords["trust_remote_code"] = True
    listed = [_literal(_hub_name(result)), *(f"{name}={_literal(value)}" for name, value in keywords.items())]
    quantised = quantization_config(result)
    listed += [] if quantised is None else [f"quantization_config={quantised}"]
    return f"{auto_class(result)}.from_pretrained({', '.join(listed)})"


def _hub_name(result: TuneResult) -> str:
    """The model's name; of a bundled configuration the one that the hub has."""
    from autofit.problem.presets import HUB_NAMES

    name = result.spec.workload.model
    return HUB_NAMES[name][0] if result.model.get("source") == "preset" and HUB_NAMES.get(name) else name


def model_lines(result: TuneResult) -> list[str]:
    """The lines that make the model as it was measured; empty where nothing needs to be said, or the model has no name."""
    line = model_line(result)
    return [] if line is None and not is_adapted(result) else [*([f"model = {line}"] if line else []), *adapter_lines(result)]


def model_note(result: TuneResult) -> str | None:
    """What to mind when the model is loaded and made ready, where no line can say it; None when nothing."""
    ready = (w.next_step for w in result.warnings if w.code == "checkpointing_switched_off")
    return "; ".join(filter(None, (_loading_note(result), *ready))) or None


def _loading_note(result: TuneResult) -> str | None:
    if model_line(result) is not None:
        return None
    quantised = quantization_config(result)
    if quantised is not None:
        return f"load your model with quantization_config={quantised}, as in the trials"
    loaded = {name: value for name, value in result.model_arguments.items() if result.model.get(f"weights_{name}") != value}
    if loaded:
        listed = ", ".join(f"{name}={_literal(value)}" for name, value in loaded.items())
        return f"load your model with {listed}, as in the trials"
    if is_live(result) or (result.model.get("config") or {}).get("dtype") == "float32":
        return None
    return 'the trials kept the weights in float32: load a checkpoint that is stored in 16 bit with dtype="float32"'


def python_snippet(result: TuneResult) -> str:
    """A snippet that runs as it stands and leaves `args` (and `model`, where the model needs keywords)."""
    best = result.best
    where = [f"transformers {result.software['transformers']}"] if "transformers" in result.software else []
    where.insert(0, f"{_one_line(result.spec.workload.model)} on {_one_line(result.device.name)}")
    lines = [
        f"# autofit: {format_speed(best.samples_per_second)} samples/s (95 %: {format_interval(best.interval)}), {', '.join(where)}",
    ]
    note = model_note(result)
    if note is not None:
        lines.append(f"# {note}")
    lines += [*import_lines(result), "", *model_lines(result)]
    first, *rest = arguments_call(result)
    return "\n".join([*lines, f"args = {first}", *rest])


def import_lines(result: TuneResult) -> list[str]:
    """What the lines of model and arguments use."""
    module, own = own_class(result)
    names = [] if module else ["TrainingArguments"]
    if model_line(result) is not None:
        names.append(auto_class(result))
        names += ["BitsAndBytesConfig"] if quantization_config(result) is not None else []
    adapter = adapter_import(result)
    lines = [] if adapter is None else [adapter]
    lines += [f"from transformers import {', '.join(sorted(names))}"] if names else []
    if module == "__main__":
        return [*lines, f"# {own} is your own class: it must be defined above"]
    return [*lines, *([f"from {module} import {own}"] if module else [])]


def own_class(result: TuneResult) -> tuple[str | None, str]:
    """(module, name) of the user's own class of arguments; the module is None for the plain one."""
    module, _, name = str(result.model.get("arguments_class") or "").rpartition(".")
    return (module, name) if module else (None, "TrainingArguments")


def auto_class(result: TuneResult) -> str:
    """Name of the transformers class that loads the model for its task; `AutoModel` where no task is known (a recorded grid may name any)."""
    from autofit.problem.task import Task, parse_task

    task = result.model.get("task") or result.spec.workload.task
    if task is None:
        return "AutoModel"
    try:
        return (task if isinstance(task, Task) else parse_task(str(task))).auto_class_name
    except UserError:
        return "AutoModel"


def is_live(result: TuneResult) -> bool:
    """Whether the model was made by the user's own program, and is not something with a name."""
    return result.model.get("source") in ("object", "script")


def _named_model_arguments(result: TuneResult) -> dict[str, Any]:
    """Keywords of the model that a script takes by the same names; one that was tuned as it is loads its model in its own way.

    An adapter is among them: a script that does not know it refuses it, instead of training the whole model with a batch that was found for less.
    """
    if result.spec.workload.script is not None:
        return {}
    adaptation = None if is_live(result) else result.spec.workload.adaptation
    adapter = {} if adaptation is None else {"adapter": adaptation.label()}
    return {**result.model_arguments, **adapter}


def _flag(name: str, value: Any) -> str:
    if value is None:
        raise UserError(
            f"{name}=None cannot be said with a flag", hint="use --format python or --format json"
        )
    text = shlex.quote(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return f"--{name}={text}" if text.startswith("-") else f"--{name} {text}"


def _literal(value: Any) -> str:
    """A Python literal with double quotes, as a formatter would leave it."""
    if isinstance(value, str):
        quoted = repr(value)
        return f'"{quoted[1:-1]}"' if quoted[0] == "'" and '"' not in quoted else quoted
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
