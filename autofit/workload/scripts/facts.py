"""What a script trains, read at its first `train()`: the model's facts, and how its own arguments were set."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

from autofit.errors import ScriptError, UserError
from autofit.problem.arguments import CHECKPOINTING_NAMES, explicit_arguments
from autofit.problem.config import TrialConfig
from autofit.problem.extras import ARGUMENTS
from autofit.problem.script_command import read_script, script_file
from autofit.problem.script_source import trains_often
from autofit.problem.spec import Workload
from autofit.trials.trial import AFTER_SEARCH
from autofit.workload import models
from autofit.workload.data.facts import live_data
from autofit.workload.data.scan import LENGTH
from autofit.workload.evaluation import evaluation_label
from autofit.workload.knobs import weight_dtype
from autofit.workload.objects import LiveObjects
from autofit.workload.scripts.run import Training, run_script
from autofit.workload.scripts.trainer import ignores_optim, long_enough
from autofit.workload.sources import first_line
from autofit.workload.surroundings import training_facts
from autofit.workload.trial import argument_defaults, script_arguments
from autofit.workload.user_arguments import own_class

PLAIN = TrialConfig(
    per_device_train_batch_size=8
)  #: runs everywhere; what the script asked for itself is read, not run


def describe_script(workload: Workload, *, cpu: bool) -> dict[str, Any]:
    """Facts of the script's model as `models.facts` gives them, `weights_dtype`, those of its data and of what is around the model, and under `script`
    those of the script itself.

    Returns:
        `script`: `origin` of its arguments (`flags`, `file`, `code`), `own` (field -> what it asked for), `set_in_code` (fields that an answer may
        name), `own_optimizer`, and `digest` of its file (None where that is not found).

    Raises:
        ScriptError: it does not come to a training; its own traceback is kept.
    """
    found: list[dict[str, Any]] = []
    classes: list[type[TrainingArguments]] = []  # asked for their defaults outside of the script: inside, arguments are replaced

    def note(training: Training) -> None:
        found.append(_facts(training, workload, file))
        classes.append(type(training.trainer.args))

    command = workload.script or ()
    found_file = script_file(command)  # before the script goes elsewhere
    file = None if found_file is None else Path(found_file)
    set_seed(0)
    try:
        run_script(
            command,
            script_arguments(PLAIN, cpu=cpu),
            at_training=note,
        )
    except UserError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise ScriptError(
            f"{workload.model} raised before it trained: {type(error).__name__}: {first_line(error)}",
            traceback=_formatted(error),
        ) from error
    return {**found[0], **own_class(classes[0], cpu=cpu)}


def _facts(training: Training, workload: Workload, file: Path | None) -> dict[str, Any]:
    trainer = training.trainer
    long_enough(trainer.train_dataset, 1)
    arguments = {field.name: getattr(trainer.args, field.name, None) for field in dataclasses.fields(trainer.args)}
    objects = LiveObjects(model=training.model, extra={"arguments": arguments})
    resolved = models.resolve_with(Workload(model=workload.model), objects)
    data = live_data(trainer.train_dataset, length_column=str(getattr(trainer.args, "length_column_name", LENGTH)), ordered=False)
    own_optimizer = ignores_optim(trainer)
    tuned = {*explicit_arguments(PLAIN, argument_defaults()), *CHECKPOINTING_NAMES, "use_cpu"}
    set_in_code = [name for name in training.set_in_code if name in {*tuned, *AFTER_SEARCH, *ARGUMENTS.values()}]
    script = {
        "origin": str(training.taken.origin),
        "own": {name: value for name, value in training.taken.own.items() if name in tuned},
        "set_in_code": set_in_code,
        "own_optimizer": own_optimizer,
        "evaluation": evaluation_of(trainer),
        "digest": None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16],
    }
    return {
        **models.facts(replace(resolved, source="script")),
        **data,
        **_surroundings(trainer, arguments),
        "warnings": [
            *_warnings(training, file, [name for name in set_in_code if name in tuned], own_optimizer=own_optimizer),
            *data.get("warnings", ()),
        ],
        "task": None,
        "seq_len": None,
        "weights_dtype": weight_dtype(training.model),
        "script": script,
    }


def _surroundings(trainer: Trainer, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What the script put around its model, files of arguments that it read included: what is tuned was replaced, and is the same every time. Paths in
    its output directory are not: that is a trial's own."""
    return training_facts(
        {
            "trainer_cls": type(trainer),
            "callbacks": trainer.callback_handler.callbacks,
            "processing_class": trainer.processing_class,
            "data_collator": trainer.data_collator,
            "arguments": arguments,
        },
        own_directory=str(trainer.args.output_dir),
    )


def evaluation_of(trainer: Trainer) -> dict[str, Any] | None:
    """`batch_size` and `data` (a label) of the script's evaluation; None without an evaluation dataset."""
    data = trainer.eval_dataset
    if data is None:
        return None
    return {"batch_size": trainer.args.per_device_eval_batch_size, "data": evaluation_label(data, vars(trainer.args))}


def _warnings(
    training: Training, file: Path | None, set_in_code: list[str], *, own_optimizer: bool
) -> list[str]:
    found = []
    if training.trainers > 1 or (file is not None and trains_often(read_script(str(file)))):
        found.append("the script trains more than once: only its first train() is measured")
    if own_optimizer:
        found.append("the script makes its own optimizer: optim has no effect and is not searched")
    if set_in_code:
        found.append(
            f"the script sets {', '.join(set_in_code)} in its own code: change it there, a flag has no effect"
        )
    if training.redirected:
        found.append(
            f"before it trains, the script saves to {', '.join(training.redirected)}: in trials nothing of it stays"
        )
    if training.spared:
        found.append(f"before it trains, the script removes or renames {', '.join(training.spared)}: in trials it stays")
    if training.shortened:
        found.append("before it trains, the script evaluates: in trials that is done on the first rows only")
    return found


def _formatted(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
