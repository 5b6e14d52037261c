"""One trial: the real Trainer on the real TrainingArguments, for as many steps as an honest answer needs; built here, or by the user's script."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Mapping
from enum import Enum
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from autofit.arguments import explicit_arguments
from autofit.config import PRECISION_FACTS, TrialConfig
from autofit.errors import ScriptError
from autofit.measurement import Measurement
from autofit.protocol import SCRATCH, TrialOrder
from autofit.runner import TrialRequest
from autofit.spec import Workload
from autofit.worker import Channel
from autofit.workload.clock import StepClock, Window
from autofit.workload.knobs import KnobWitness
from autofit.workload.limits import MemoryMeter, meter_for
from autofit.workload.script import Training, run_script
from autofit.workload.script_guard import TrainingStopped
from autofit.workload.script_trainer import LeaveWhenStopped, ignores_optim, make_ready
from autofit.workload.subject import Subject, load_subject

MAX_STEPS = 100_000
#: What a trial must not do, whatever the user's own arguments say: write, report, evaluate, or stop early for another reason.
TRIAL_ARGUMENTS: Mapping[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "num_train_epochs": 1,
    "logging_first_step": False,
    "eval_on_start": False,
    "enable_jit_checkpoint": False,
    "resume_from_checkpoint": None,
}


def answer_trial(payload: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Run the ordered trial and return its `Measurement` as JSON. Out of memory and everything else is raised."""
    order = TrialOrder.from_json(payload)
    run = run_trial if Workload.from_json(order.workload).script is None else run_script_trial
    return run(order, channel).to_json()


def run_trial(order: TrialOrder, channel: Channel) -> Measurement:
    """Build the model, train it for the window, and read every counter."""
    request, workload = order.request, Workload.from_json(order.workload)
    channel.enter("setup")
    set_seed(request.seed)
    meter = meter_for(order.device, context_bytes=order.context_bytes)
    meter.limit(request.memory_limit_bytes)
    channel.enter("model")
    subject = load_subject(workload, request.config, device="cpu" if order.device == "cpu" else "cuda:0")
    channel.enter("trainer")
    clock = StepClock(window_of(request), enter=_announcer(channel), on_warm=meter.mark_warm)
    with tempfile.TemporaryDirectory(prefix="autofit-trial-", dir=os.environ.get(SCRATCH)) as directory:
        arguments = trial_arguments(
            subject.base_arguments, request, output_dir=directory, cpu=order.device == "cpu"
        )
        trainer = make_trainer(subject, arguments, request)
        witness = KnobWitness(subject.model, order.device)
        clock.attach(trainer)
        trainer.train()
    return _measurement(clock, meter, witness, trainer, subject.built_here, request.config)


def run_script_trial(order: TrialOrder, channel: Channel) -> Measurement:
    """Run the user's script to its first training, measure that for the window, and unwind the script."""
    request, workload = order.request, Workload.from_json(order.workload)
    channel.enter("setup")
    set_seed(request.seed)
    meter = meter_for(order.device, context_bytes=order.context_bytes)
    meter.limit(request.memory_limit_bytes)
    measured: list[Measurement] = []

    def measure(training: Training) -> None:
        trainer, config = training.trainer, request.config
        channel.enter("trainer")
        make_ready(trainer, training.model, config)
        clock = StepClock(window_of(request), enter=_announcer(channel), on_warm=meter.mark_warm)
        witness = KnobWitness(training.model, order.device, own_optimizer=ignores_optim(trainer))
        clock.attach(trainer)
        trainer.add_callback(LeaveWhenStopped())
        with contextlib.suppress(TrainingStopped):
            training.train()
        if clock.steps < 2 or not clock.samples.micro:
            raise ScriptError(f"the training ended after {clock.steps} optimizer steps: too few to measure")
        measured.append(_measurement(clock, meter, witness, trainer, False, config))

    channel.enter("script")
    values = script_arguments(trial_config(request), cpu=order.device == "cpu")
    run_script(workload.script or (), values, at_training=measure)
    return measured[0]


def script_arguments(config: TrialConfig, *, cpu: bool) -> dict[str, Any]:
    """What is replaced in a script's own TrainingArguments; its seed and all that is not named here stay."""
    defaults = argument_defaults()
    arguments = {**explicit_arguments(config, defaults), **TRIAL_ARGUMENTS, "max_steps": MAX_STEPS}
    if cpu:
        arguments["use_cpu"] = True
    return {name: value for name, value in arguments.items() if name in defaults}


def window_of(request: TrialRequest) -> Window:
    """How long the trial runs. A confirmation runs two optimizer steps at full accumulation, at least."""
    return Window(
        optimizer_steps=request.optimizer_steps,
        seconds=0.0 if request.full_length else request.window_seconds,
    )


def trial_config(request: TrialRequest) -> TrialConfig:
    """What is run: accumulation `min(2, target)` is the shortest form that holds every resident of memory (gradients persist
    from the second micro-step on); a confirmation runs the target."""
    config = request.config
    if request.full_length:
        return config
    return config.but(gradient_accumulation_steps=min(2, config.gradient_accumulation_steps))


def trial_arguments(
    base: Mapping[str, Any], request: TrialRequest, *, output_dir: str, cpu: bool
) -> TrainingArguments:
    """The user's arguments with the configuration's knobs, and without side effects."""
    defaults = argument_defaults()
    arguments = {**base, **explicit_arguments(trial_config(request), defaults), **TRIAL_ARGUMENTS}
    arguments |= {"output_dir": output_dir, "max_steps": MAX_STEPS, "seed": request.seed}
    if cpu:
        arguments["use_cpu"] = True
    return TrainingArguments(**{name: value for name, value in arguments.items() if name in defaults})


def argument_defaults() -> dict[str, Any]:
    """Name -> default of every field of the installed TrainingArguments; enums as their values, factories called."""
    defaults = {}
    for field in dataclasses.fields(TrainingArguments):
        if not field.init:
            continue
        value = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        defaults[field.name] = value.value if isinstance(value, Enum) else value
    return defaults


def make_trainer(subject: Subject, arguments: TrainingArguments, request: TrialRequest) -> Trainer:
    """The user's Trainer class (or the plain one) on the subject, silent."""
    size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    trainer = subject.trainer_cls(
        model=subject.model,
        args=arguments,
        train_dataset=subject.dataset(size, request.seed),
        data_collator=subject.collator,
        **subject.trainer_arguments,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _announcer(channel: Channel):  # type: ignore[no-untyped-def]
    """Send phases while nothing is measured (the first ten are before the end of the first steps), then only note them."""
    sent = 0

    def enter(phase: str) -> None:
        nonlocal sent
        sent += 1
        channel.enter(phase, send=sent <= 10)

    return enter


def _measurement(
    clock: StepClock,
    meter: MemoryMeter,
    witness: KnobWitness,
    trainer: Trainer,
    built_here: bool,
    config: TrialConfig,
) -> Measurement:
    facts: dict[str, Any] = {**witness.facts(trainer, config, built_here=built_here), **meter.facts()}
    facts["autocast"] = PRECISION_FACTS[config.precision].autocast_dtype
    return Measurement(
        micro_step_seconds=tuple(clock.samples.micro),
        fetch_seconds=tuple(clock.samples.fetch),
        update_seconds=tuple(clock.samples.update),
        memory=meter.read(),
        optimizer_steps=clock.steps,
        skipped_steps=clock.skipped,
        losses=tuple(clock.losses),
        tokens_per_sample=statistics.fmean(clock.tokens) if clock.tokens else None,
        facts=facts,
    )
