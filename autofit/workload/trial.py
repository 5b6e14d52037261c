"""One trial: the real Trainer on the real TrainingArguments, for as many steps as an honest answer needs; built here, or by the user's script."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

from autofit.errors import ScriptError, UserError
from autofit.problem.arguments import (
    SILENT_ARGUMENTS,
    explicit_arguments,
    overridden,
    refuse_overridden,
    with_own,
)
from autofit.problem.config import PRECISION_FACTS, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.processes.protocol import SCRATCH, TrialOrder
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import LOADER_KNOBS, PREPARATION, SCRIPT_PHASE
from autofit.workload.clock import StepClock, Window
from autofit.workload.data.feed import DataFeed, feed_of, rows_of, uneven_window
from autofit.workload.data.measured import data_facts, epoch_counts, measured_sizes
from autofit.workload.data.worker_rows import refuse_other_rows
from autofit.workload.effects import EffectWitness
from autofit.workload.evaluation import evaluate
from autofit.workload.knobs import KnobWitness, weight_dtype
from autofit.workload.limits import MemoryMeter, meter_for
from autofit.workload.loader import LoaderWatch
from autofit.workload.models import ResolvedModel
from autofit.workload.rest import RestWatch
from autofit.workload.scripts.arguments import NEEDS_EVALUATION
from autofit.workload.scripts.guard import TrainingStopped
from autofit.workload.scripts.run import Training, run_script
from autofit.workload.scripts.trainer import (
    MAKING_OPTIMIZERS,
    SWITCHED_OFF,
    LeaveWhenStopped,
    checkpointing_as_asked,
    ignores_optim,
    make_ready,
    refuse_missing_loss,
    silence,
)
from autofit.workload.subject import Subject, load_subject, subject_of
from autofit.workload.token_count import tokens_per_sample
from autofit.workload.user_arguments import argument_defaults as argument_defaults

RESTING_SHARE = 0.3  #: of a confirmation's time limit, to wait for memory to come to rest
MAX_STEPS = 99_991  #: never reached
#: of a script's training: set when it begins, because the script may compute with its own (schedules, shares of its data)
LENGTH = {"num_train_epochs": 1, "max_steps": MAX_STEPS}
LIBRARIES = ("transformers.", "trl.")  #: their Trainers make the optimizer that `optim` names


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
    with tempfile.TemporaryDirectory(prefix="autofit-trial-", dir=os.environ.get(SCRATCH)) as directory:
        arguments = trial_arguments(
            subject.base_arguments, request, output_dir=directory, cpu=order.device == "cpu", cls=subject.arguments_cls
        )
        refuse_other_arguments(subject, request.config, output_dir=directory, cpu=order.device == "cpu")
        trainer = make_trainer(subject, arguments, request)
        effects = EffectWitness(trainer, request.config)
        witness = KnobWitness(subject.model, order.device, own_optimizer=ignores_optim(trainer), effects=effects)
        loader = LoaderWatch(trainer, rows=rows_of(trainer) if subject.user_data else None, user_data=subject.user_data)
        feed = feed_of(trainer, request.config, user_data=subject.user_data)
        clock = attached_clock(trainer, feed, request, channel, meter, effects)
        trainer.add_callback(LeaveWhenStopped())
        with contextlib.suppress(TrainingStopped):
            trainer.train()
        if not clock.samples.micro:
            raise UserError(f"the training ended after {clock.steps} optimizer steps: too few to measure")
        rows_as_before(trainer, request, channel)
        facts = {**loader.facts(), **data_facts(feed, clock), **effects.compiled.facts(), **evaluated(trainer, request, channel)}
    return _measurement(clock, meter, witness, trainer, subject.built_here, request, facts, feed, loader)


def run_script_trial(order: TrialOrder, channel: Channel) -> Measurement:
    """Run the user's script to its first training, measure that for the window, and unwind the script."""
    request, workload = order.request, Workload.from_json(order.workload)
    channel.enter("setup")
    set_seed(request.seed)
    meter = meter_for(order.device, context_bytes=order.context_bytes)
    meter.limit(request.memory_limit_bytes)
    measured: list[Measurement] = []

    def measure(training: Training) -> None:
        trainer, config, prepared = training.trainer, request.config, time.monotonic() - begin
        channel.enter("trainer")
        make_ready(trainer, training.model, config)
        effects = EffectWitness(trainer, config)
        witness = KnobWitness(training.model, order.device, own_optimizer=ignores_optim(trainer), effects=effects)
        loader = LoaderWatch(trainer, rows=rows_of(trainer), user_data=True)
        feed = feed_of(trainer, config, user_data=True)
        clock = attached_clock(trainer, feed, request, channel, meter, effects)
        trainer.add_callback(LeaveWhenStopped())
        with contextlib.suppress(TrainingStopped):
            training.train()
        if clock.steps < 2 or not clock.samples.micro:
            raise ScriptError(f"the training ended after {clock.steps} optimizer steps: too few to measure")
        rows_as_before(trainer, request, channel)
        facts = {**loader.facts(), **data_facts(feed, clock), **effects.compiled.facts(), **evaluated(trainer, request, channel)}
        facts |= {"weight_dtype": weight_dtype(training.model), PREPARATION: prepared}
        measured.append(_measurement(clock, meter, witness, trainer, False, request, facts, feed, loader))

    channel.enter(SCRIPT_PHASE)
    begin = time.monotonic()
    values = script_arguments(trial_config(request), cpu=order.device == "cpu")
    run_script(workload.script or (), values, at_training=measure, length=LENGTH)
    return measured[0]


def script_arguments(config: TrialConfig, *, cpu: bool) -> dict[str, Any]:
    """What is replaced in a script's own TrainingArguments; its seed, its length and all that is not named here stay."""
    defaults = argument_defaults()
    arguments = {**explicit_arguments(config, defaults), **SILENT_ARGUMENTS}
    if cpu:
        arguments["use_cpu"] = True
    return {name: value for name, value in arguments.items() if name in defaults and name not in LENGTH}


def window_of(request: TrialRequest) -> Window:
    """How long the trial runs. A confirmation runs two optimizer steps at full accumulation; where memory is short, until its use has come to rest."""
    if request.full_length:
        return Window(optimizer_steps=request.optimizer_steps, seconds=0.0, resting_seconds=RESTING_SHARE * (request.timeout_seconds or math.inf))
    return Window(optimizer_steps=request.optimizer_steps, seconds=request.window_seconds)


def trial_config(request: TrialRequest) -> TrialConfig:
    """What is run: accumulation `min(2, target)` is the shortest form that holds every resident of memory (gradients persist
    from the second micro-step on); a confirmation runs the target."""
    config = request.config
    if request.full_length:
        return config
    return config.but(gradient_accumulation_steps=min(2, config.gradient_accumulation_steps))


def trial_arguments(
    base: Mapping[str, Any],
    request: TrialRequest,
    *,
    output_dir: str,
    cpu: bool,
    cls: type[TrainingArguments] = TrainingArguments,
) -> TrainingArguments:
    """The user's arguments, of their own class, with the configuration's knobs, and without side effects."""
    defaults = argument_defaults(cls)
    arguments = {**with_own(base, explicit_arguments(trial_config(request), defaults)), **SILENT_ARGUMENTS}
    arguments |= {"output_dir": output_dir, "max_steps": MAX_STEPS, "seed": request.seed}
    if arguments.get("lr_scheduler_type") in NEEDS_EVALUATION:
        arguments["lr_scheduler_type"] = "constant"
    if cpu:
        arguments["use_cpu"] = True
    made = cls(**{name: value for name, value in arguments.items() if name in defaults})
    if "gradient_accumulation_steps" in overridden(made, arguments):  # of the class's own: a trial runs as much of it as is asked for
        made.gradient_accumulation_steps = arguments["gradient_accumulation_steps"]
    return made


def refuse_other_arguments(subject: Subject, config: TrialConfig, *, output_dir: str, cpu: bool) -> None:
    """Refuse a class of arguments that makes something else of `config`, at its whole accumulation.

    Raises:
        UserError: it overrides a field that is tuned.
    """
    cls = subject.arguments_cls
    if cls is not TrainingArguments:
        asked = explicit_arguments(config, argument_defaults(cls))
        more = {"use_cpu": True} if cpu else {}
        refuse_overridden(cls(**{**subject.base_arguments, **asked, **more, "output_dir": output_dir}), asked)


def make_trainer(subject: Subject, arguments: TrainingArguments, request: TrialRequest) -> Trainer:
    """The user's Trainer class (or the plain one) on the subject, silent."""
    size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    given = {
        "eval_dataset": subject.eval_dataset,
        "processing_class": subject.processing_class,
        "callbacks": list(subject.callbacks),
    }
    trainer = subject.trainer_cls(
        model=subject.model,
        args=arguments,
        train_dataset=subject.dataset(size, request.seed),
        data_collator=subject.collator,
        **{name: value for name, value in given.items() if value is not None and value != []},
        **subject.trainer_arguments,
    )
    refuse_nothing_trained(trainer)
    checkpointing_as_asked(trainer, trainer.model, request.config)
    silence(trainer)
    refuse_missing_loss(trainer)
    return trainer


def refuse_nothing_trained(trainer: Trainer) -> None:
    """Check that a step will change the model.

    Raises:
        UserError: every parameter is frozen, or the user's own optimizer holds those of something else.
    """
    model, optimizer = trainer.model, trainer.optimizer
    assert model is not None
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise UserError(
            f"{type(model).__name__} has nothing to train: all of its parameters are frozen",
            hint="load an adapter with PeftModel.from_pretrained(..., is_trainable=True), or set requires_grad on what is to be trained",
        )
    if optimizer is not None and all(id(p) not in trained for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "the optimizer in trainer_kwargs trains no parameter of the model: it was made for another, or for one without its adapter",
            hint='make it of the model that is handed over, or pass trainer_kwargs={"optimizer_cls_and_kwargs": (cls, {"lr": ...})}',
        )


def makes_own_optimizer(resolved: ResolvedModel) -> bool:
    """Whether the Trainer of the live objects makes its own optimizer, whatever `optim` says. Where only that tells it is built, on the CPU, around
    the model itself: call this last."""
    extra = {} if resolved.objects is None else resolved.objects.extra
    given = extra.get("trainer_arguments") or {}
    if (given.get("optimizers") or (None, None))[0] is not None or given.get("optimizer_cls_and_kwargs") is not None:
        return True
    makes = (getattr(extra.get("trainer_cls") or Trainer, name) for name in MAKING_OPTIMIZERS)
    if all(method.__module__.startswith(LIBRARIES) for method in makes):
        return False
    config = TrialConfig(per_device_train_batch_size=1)
    with tempfile.TemporaryDirectory(prefix="autofit-", dir=os.environ.get(SCRATCH)) as directory:
        try:
            subject = subject_of(resolved, config, device="cpu")
            request = TrialRequest(config=config)
            arguments = trial_arguments(subject.base_arguments, request, output_dir=directory, cpu=True, cls=subject.arguments_cls)
            return ignores_optim(make_trainer(subject, arguments, request))
        except Exception:  # the user's own code, outside of a training: trials will say what is wrong with it, if anything is
            return False


def rows_as_before(trainer: Trainer, request: TrialRequest, channel: Channel) -> None:
    """Check that processes of the loader which the search would add read what the training process reads.

    Raises:
        UserError: they read other rows.
    """
    workers = dict(request.config.extra).get(LOADER_KNOBS[0])
    if workers and not request.evaluate:  # the winner that is evaluated has passed
        channel.enter("loader")
        refuse_other_rows(trainer.train_dataset, int(workers))


def evaluated(trainer: Trainer, request: TrialRequest, channel: Channel) -> dict[str, Any]:
    """What an evaluation after the last step says, under its own name; empty where none was ordered."""
    if not request.evaluate:
        return {}
    channel.enter("evaluate")
    try:
        return {"evaluation": evaluate(trainer)}
    finally:
        channel.phase = "evaluate"  # the clock's hooks have named others meanwhile


def attached_clock(
    trainer: Trainer,
    feed: DataFeed,
    request: TrialRequest,
    channel: Channel,
    meter: MemoryMeter,
    effects: EffectWitness,
) -> StepClock:
    """The clock of a trial on its Trainer, fed by `feed`: uneven data begins with the longest batch, and needs several batches."""
    window = window_of(request)
    whole = request.full_length or request.optimizer_steps is not None
    if feed.may_differ and not whole:
        window = uneven_window(window)
    clock = StepClock(
        window,
        enter=_announcer(channel),
        on_warm=meter.mark_warm,
        prelude_steps=feed.prelude_steps(trainer),
        settle_steps=0 if feed.uneven and whole else 1,
        busy=effects.busy,
        at_rest=RestWatch(meter, request.memory_limit_bytes),
    )
    feed.attach(trainer, lambda: clock.in_prelude)
    clock.attach(trainer)
    return clock


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
    request: TrialRequest,
    more: Mapping[str, Any],
    feed: DataFeed,
    loader: LoaderWatch,
) -> Measurement:
    config = request.config
    facts: dict[str, Any] = {**more, **witness.facts(trainer, config, built_here=built_here), **meter.facts()}
    facts["asked"]["per_device_train_batch_size"], facts["seen"]["per_device_train_batch_size"] = loader.batch_size()
    accumulation = trial_config(request).gradient_accumulation_steps
    # Data that ends within a step makes it shorter, and no other.
    seen = max(clock.accumulated, int(trainer.args.gradient_accumulation_steps))
    facts["asked"]["gradient_accumulation_steps"], facts["seen"]["gradient_accumulation_steps"] = accumulation, seen
    facts["checkpointing_switched_off"] = SWITCHED_OFF in vars(trainer)
    facts["autocast"] = PRECISION_FACTS[config.precision].autocast_dtype
    return Measurement(
        micro_step_seconds=tuple(clock.samples.micro),
        fetch_seconds=tuple(clock.samples.fetch),
        update_seconds=tuple(clock.samples.update),
        memory=meter.read(),
        optimizer_steps=clock.steps,
        skipped_steps=clock.skipped,
        losses=tuple(clock.losses),
        tokens_per_sample=tokens_per_sample(epoch_counts(feed, clock)),
        facts=facts,
        sizes=measured_sizes(feed, clock),
    )
