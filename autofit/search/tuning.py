"""The whole way from a question to an answer: `tune` for Python, `run_search` behind it and behind the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.errors import UserError
from autofit.files import check_writable
from autofit.problem.config import parse_precisions
from autofit.problem.extras import parse_tune
from autofit.problem.numerics import named_optim
from autofit.problem.spec import DEFAULT_TOLERANCE, SearchSpec
from autofit.processes.inputs import live_workload, names_of, path_of, sizes_of, whole_number
from autofit.reports.progress import on_stderr
from autofit.results.evaluation import eval_batch_of
from autofit.results.result import TuneResult
from autofit.search.scene import real_scene, replayed_scene
from autofit.search.session import search_in
from autofit.study.study_lock import held
from autofit.trials.landscape import Landscape
from autofit.trials.observer import Observer, Silent
from autofit.units import parse_duration, parse_size

SAMPLERS = ("auto", "tpe", "random", "grid")


def tune(
    model: Any = None,
    *,
    effective_batch: int,
    task: str | None = None,
    seq_len: int | None = None,
    memory: str | int | None = None,
    device: str | None = None,
    precision: Sequence[str] | str | None = None,
    optim: Sequence[str] | str | None = None,
    checkpointing: bool | None = None,
    batch_size: Sequence[int] | int | None = None,
    attn_implementation: str | None = None,
    keep_numerics: bool = False,
    tune: Sequence[str] | str | None = None,
    trials: int | None = None,
    timeout: str | float | None = None,
    trial_timeout: str | float | None = None,
    sampler: str = "auto",
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    study: str | Path | None = None,
    trust_remote_code: bool = False,
    model_init: Callable[[], Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    data_collator: Any = None,
    processing_class: Any = None,
    callbacks: Sequence[Any] | None = None,
    args: Any = None,
    trainer_cls: type | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    quantize: str | None = None,
    show_progress: bool = False,
    observer: Observer | None = None,
    predict: bool = True,
) -> TuneResult:
    """Find the fastest `TrainingArguments` that fit, by running short trials of the real Trainer.

    Args:
        model: hub name, preset, path, transformers config, `nn.Module` / `PreTrainedModel` (never touched: children get
            copies), or a function without arguments that builds one.
        effective_batch: samples per optimizer step. Exact.
        task: `sequence-classification`, `causal-lm`, ...; None = by architecture.
        seq_len: tokens per sample; None = by model.
        memory: bytes of the device that the run may use (`16GiB`), context included; None = what is free, less a margin.
        device: `cuda:0`, `cpu`; None = the first CUDA card, else the CPU.
        precision, optim, checkpointing, batch_size: restrict the space; None = all that the machine can run.
        attn_implementation: `eager`, `sdpa`, ...; None = the library's choice.
        keep_numerics: only search choices that leave the mathematics of training as it is (see `numerics`); the optimizer in `args` is the reference.
        tune: widen the space by `attn`, `compile`, `liger`, `every_n_layers`, `offload`, `pure_bf16` (see `extras`).
        trials, timeout, trial_timeout: budgets; durations in seconds or as `10m`.
        sampler: `auto`, `tpe`, `random` or `grid`.
        seed: of sampler, data and weights.
        tolerance: relative speed difference that does not matter.
        study: journal file to append to and to go on from.
        trust_remote_code: whether the model's own code may run.
        model_init: builds the model in the child (for models too large to send).
        train_dataset, data_collator: used instead of synthetic data.
        eval_dataset: the winner's evaluation on it is tried too, at `args.per_device_eval_batch_size` (or TrainingArguments' default).
        processing_class: tokenizer or processor, for the Trainer's default collator.
        callbacks: reach the Trainer of every trial as copies. `args.output_dir` is a temporary directory there; those that print, report to
            trackers (`transformers.integrations`) or stop early are left out, and nothing is called after the last measured step.
        args: `TrainingArguments` whose other fields are kept.
        trainer_cls, trainer_kwargs: a Trainer subclass and further keywords for it.
        peft_config: a `peft.PeftConfig`: the model is trained through this adapter. A model that is a `PeftModel` already needs none.
        quantize: `4bit` or `8bit`: how bitsandbytes stores the weights under the adapter, for a model given by name or config.
        show_progress: whether stderr gets a line per trial and, on a terminal, what is running now.
        observer: told of every trial instead, to show it in a way of your own.
        predict: whether memory and time are predicted from traces before the first trial (on CUDA devices).

    Returns:
        The answer with its proof; `result.training_arguments(output_dir=...)` is ready to use.

    Raises:
        UserError: an input cannot be used.
        NothingFits: no configuration fits under the limit.
        SearchFailed: the training itself fails in every trial.
    """
    if show_progress and observer is not None:
        raise UserError("show_progress and observer were both given", hint="an observer shows what it wants to itself: leave show_progress out")
    with live_workload(
        model=model,
        model_init=model_init,
        task=task,
        seq_len=seq_len,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        processing_class=processing_class,
        callbacks=callbacks,
        args=args,
        trainer_cls=trainer_cls,
        trainer_kwargs=trainer_kwargs,
        peft_config=peft_config,
        quantize=quantize,
    ) as workload:
        spec = SearchSpec(
            workload=workload,
            effective_batch=effective_batch,
            device=device,
            memory_limit_bytes=None if memory is None else parse_size(memory, what="memory"),
            precisions=parse_precisions(precision),
            optims=names_of(optim),
            checkpointing=None if checkpointing is None else (checkpointing,),
            batch_sizes=sizes_of(batch_size),
            keep_numerics=keep_numerics,
            reference_optim=named_optim(args),
            tune=parse_tune(tune),
            trials=whole_number(trials, "trials"),
            timeout_seconds=None if timeout is None else parse_duration(timeout, what="timeout"),
            trial_timeout_seconds=None
            if trial_timeout is None
            else parse_duration(trial_timeout, what="trial_timeout"),
            sampler=sampler,
            seed=seed,
            tolerance=tolerance,
            eval_batch_size=eval_batch_of(args, eval_dataset),
        )
        with on_stderr(spec) if show_progress else contextlib.nullcontext(observer) as watching:
            result = run_search(spec, study=path_of(study, "study"), observer=watching, predict=predict)
        return result if args is None else replace(result, given=args)


def run_search(
    spec: SearchSpec,
    *,
    study: str | Path | None = None,
    observer: Observer | None = None,
    landscape: Landscape | None = None,
    predict: bool = True,
) -> TuneResult:
    """Search as `spec` says, on the device or on a landscape. See `tune` for what is raised.

    Args:
        spec: the terms.
        study: journal file; None = in memory.
        observer: told of every trial.
        landscape: stands for the device.
        predict: whether memory and time are predicted from traces before the first trial.
    """
    if spec.sampler not in SAMPLERS:
        raise UserError(f"unknown sampler {spec.sampler!r}", hint=f"choose from {', '.join(SAMPLERS)}")
    if study is not None:
        check_writable(study, what="study file")
    observer = observer or Silent()
    scene_of = (
        replayed_scene(spec, landscape, observer, predict=predict)
        if landscape is not None
        else real_scene(spec, observer, predict=predict)
    )
    with held(study), scene_of as scene:
        return search_in(scene, spec, study, observer)
