"""The answer of a search, as data: computed from the records alone, so that anyone can recompute it from the file.

File: `{"schema": "autofit/result", "version": 1, "best", "baselines", "speedup", "spec", "device", "software", "trials", "warnings", "cost"}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.devices.device import Device
from autofit.errors import FileFormatError, UserError
from autofit.files import read_json_object, write_json
from autofit.kinds import check_kinds
from autofit.problem.arguments import (
    CHECKPOINTING_NAMES,
    KNOWN_DEFAULTS,
    explicit_arguments,
    model_arguments,
    refuse_overridden,
    training_arguments,
    with_own,
)
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.numerics import changes
from autofit.problem.spec import SearchSpec
from autofit.results.evaluation import Evaluation
from autofit.results.result_parts import Baseline as Baseline
from autofit.results.result_parts import Cost as Cost
from autofit.results.result_parts import Warning as Warning
from autofit.results.result_parts import check_parts
from autofit.trials.estimates import Estimate as Estimate
from autofit.trials.estimates import break_even_hours as break_even_hours
from autofit.trials.estimates import by_config as by_config
from autofit.trials.estimates import estimate_of as estimate_of
from autofit.trials.estimates import estimates as estimates
from autofit.trials.estimates import recast
from autofit.trials.trial import TrialRecord

if TYPE_CHECKING:
    from transformers import TrainingArguments

SCHEMA, VERSION = "autofit/result", 1
FIGURES: Mapping[str, Callable[[Estimate], float | None]] = {
    "samples/s": lambda e: e.samples_per_second,
    "tokens/s": lambda e: e.tokens_per_second,
    "bytes": lambda e: e.memory.needed_bytes,
}  #: of an estimate, that a file repeats
ALIKE = 0.01  #: relative: a figure in a file that is further from its trials is none of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The answer and its proof.

    Attributes:
        best: the winner.
        confirmed: whether it ran at full accumulation and longest length.
        tied: configurations that the play-off did not separate from the winner, with their estimates; of those as fast in the mean the winner
            keeps the mathematics of training, if any does, and is the fastest, or needs the least memory at a speed that is surely as good.
        settled: whether the play-off went on until no other was faster by more than the tolerance, or to its last round; else it was cut off.
        baselines: `defaults` and `hand_recipe`.
        speedup: ratio of throughput over each baseline; None where the baseline has none.
        spec, device, software: under which conditions.
        memory_limit_bytes: enforced in every trial.
        trials: every record.
        removals: choices that are not in the space: `{"knob", "value", "reason"}`.
        untested: reason -> how many configurations were not run for it.
        stopped: why the search ended, one sentence.
        certificate: the sampler's statement about what was left, with the closest contenders; None when it has none.
        data: lengths of the rows, the one that decided the memory, padding (see `data_result`); empty for made-up data.
        warnings: see `Warning`.
        cost: see `Cost`.
        argument_defaults: of the installed TrainingArguments, to write down only what differs.
        evaluation: whether the winner's evaluation fits too; None when it was not tried.
        given: the user's own live arguments, whose class and other fields `training_arguments` keeps; not written to files.
        reference_optim: the optimizer whose mathematics the user trains with; others are marked where they change it.
        soundness: what the soundness check measured, see `checking.summary`; `skipped` says why it did not; empty = nothing had to be checked.
    """

    best: Estimate
    confirmed: bool
    baselines: Mapping[str, Baseline]
    speedup: Mapping[str, float | None]
    spec: SearchSpec
    device: Device
    software: Mapping[str, str]
    memory_limit_bytes: int
    trials: tuple[TrialRecord, ...]
    cost: Cost
    tied: tuple[Estimate, ...] = ()
    removals: tuple[Mapping[str, str], ...] = ()
    untested: Mapping[str, int] = field(default_factory=dict)
    stopped: str = ""
    certificate: Mapping[str, Any] | None = None
    warnings: tuple[Warning, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    argument_defaults: Mapping[str, Any] = field(default_factory=dict)
    reference_optim: str = KNOWN_DEFAULTS["optim"]
    soundness: Mapping[str, Any] = field(default_factory=dict)
    given: Any = field(default=None, repr=False, compare=False)
    evaluation: Evaluation | None = None
    settled: bool = True

    def __str__(self) -> str:
        """The answer on one line; `autofit show` prints the report of a saved one."""
        return f"fastest that fits: {self.best.config.label()}, {self.best.samples_per_second:.4g} samples/s"

    def __repr__(self) -> str:
        """What a notebook shows: all of the fields fill pages."""
        return f"<TuneResult: {self}>"

    def changes(self, config: TrialConfig) -> tuple[str, ...]:
        """Every way in which `config` changes the mathematics of the user's training; empty when it keeps it."""
        found = changes(
            config,
            reference=self.reference_optim,
            weights_dtype=self.model.get("weights_dtype"),
            adapter=self.model.get("adapter") is not None,
        )
        recast = self.recast.get(config.precision)
        return found if recast is None else (*found, f"in {config.precision} trials the training's own code stored the weights in {recast}")

    @property
    def recast(self) -> dict[Precision, str]:
        """Precisions in whose trials the user's code stored the weights in 16 bit, which only `pure_bf16` asks for."""
        return recast(self.trials, self.model.get("weights_dtype"))

    @property
    def fastest_kept(self) -> Estimate | None:
        """The fastest measured configuration that keeps the mathematics; None when none was measured."""
        known = [e for e in estimates(self.trials).values() if not self.changes(e.config)]
        return max(known, key=lambda e: e.samples_per_second, default=None)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of the winner's TrainingArguments that differ from the installed defaults, those of its evaluation among them."""
        tried = self.evaluation.arguments if self.evaluation is not None else {}
        needed = self.evaluation.must_change if self.evaluation is not None else {}
        evaluation = {k: v for k, v in tried.items() if k in needed or v != self.argument_defaults.get(k)}
        return {**training_arguments(self.best.config, self.argument_defaults), **evaluation}

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keywords that the winner needs in `from_pretrained`; empty for most."""
        asked = self.spec.workload.attn_implementation
        return {**({"attn_implementation": asked} if asked else {}), **model_arguments(self.best.config)}

    def training_arguments(self, output_dir: str, **more: Any) -> TrainingArguments:
        """Return ready `transformers.TrainingArguments`: of the user's own class, with its other fields, where live `args` were tuned.

        A result that was loaded from a file knows their class by name only, and returns plain `TrainingArguments` with every tuned value
        written out; TRL's Trainers take those too.

        Args:
            output_dir: as TrainingArguments wants it.
            more: further keywords (learning_rate, ...). The tuned ones cannot be overridden.

        Raises:
            UserError: a keyword would override a tuned one, or the user's own class does.
        """
        tuned = {*explicit_arguments(self.best.config, self.argument_defaults), *CHECKPOINTING_NAMES}
        tuned |= set(self.evaluation.must_change) if self.evaluation is not None else set()
        clash = sorted(tuned & set(more))
        if clash:
            raise UserError(
                f"{', '.join(clash)} was tuned and cannot be set again",
                hint="build TrainingArguments from result.arguments",
            )
        cpu = {"use_cpu": True} if self.device.kind == "cpu" else {}
        explicit = {**explicit_arguments(self.best.config, self.argument_defaults), **self.arguments}
        if self.given is not None:
            from autofit.processes.objects import kept_arguments

            cls: type[TrainingArguments] = type(self.given)
            made = cls(**{**with_own(kept_arguments(self.given), explicit), **cpu, **more, "output_dir": output_dir})
            refuse_overridden(made, explicit)
            return made
        from transformers import TrainingArguments

        own_class = self.model.get("arguments_class") is not None  # its defaults are not those of the class below
        return TrainingArguments(output_dir=output_dir, **{**cpu, **(explicit if own_class else self.arguments), **more})

    def to_json(self) -> dict[str, Any]:
        """The result as the file holds it."""
        best = {
            **self.best.to_json(),
            "training_arguments": self.arguments,
            "model_arguments": self.model_arguments,
            "effective_batch": self.best.config.effective_batch(),
            "confirmed": self.confirmed,
            "tied_with": [estimate.to_json() for estimate in self.tied],
            "settled": self.settled,
        }
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "best": best,
            "baselines": {name: baseline.to_json() for name, baseline in self.baselines.items()},
            "speedup": dict(self.speedup),
            "spec": self.spec.to_json(),
            "device": self.device.to_json(),
            "software": dict(self.software),
            "model": dict(self.model),
            "data": dict(self.data),
            "memory_limit_bytes": self.memory_limit_bytes,
            "trials": [{**record.to_json(), "changes": list(self.changes(record.config))} for record in self.trials],
            "numerics": self._numerics_json(),
            "soundness": dict(self.soundness),
            "removals": [dict(removal) for removal in self.removals],
            "untested": dict(self.untested),
            "stopped": self.stopped,
            "certificate": dict(self.certificate) if self.certificate is not None else None,
            "warnings": [asdict(warning) for warning in self.warnings],
            "cost": {**asdict(self.cost), "break_even_hours": dict(self.cost.break_even_hours)},
            "argument_defaults": dict(self.argument_defaults),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
        }

    def _numerics_json(self) -> dict[str, Any]:
        kept = self.fastest_kept
        return {
            "reference_optim": self.reference_optim,
            "winner_changes": list(self.changes(self.best.config)),
            "fastest_kept": None if kept is None else kept.to_json(),
        }

    def save(self, path: str | Path) -> None:
        """Write the result file in one step."""
        write_json(path, self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuneResult:
        """Inverse of `to_json`.

        Raises:
            FileFormatError: another schema, a newer version, or a field that cannot be read.
        """
        if data.get("schema") != SCHEMA:
            raise FileFormatError(
                f"not a result file: schema is {data.get('schema')!r}", hint=f"a result says {SCHEMA!r}"
            )
        version = data.get("version")
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise FileFormatError(f"result version {version!r} is not readable here", hint="upgrade autofit")
        try:
            check_parts(data)
            result = cls(
                best=Estimate.from_json(data["best"]),
                confirmed=data["best"]["confirmed"],
                tied=tuple(Estimate.from_json(e) for e in data["best"]["tied_with"]),
                settled=data["best"].get("settled", True),
                baselines={name: Baseline.from_json(b) for name, b in data["baselines"].items()},
                speedup=data["speedup"],
                spec=SearchSpec.from_json(data["spec"]),
                device=Device.from_json(data["device"]),
                software=data["software"],
                model=data["model"],
                data=data.get("data") or {},
                memory_limit_bytes=data["memory_limit_bytes"],
                trials=tuple(TrialRecord.from_json(t) for t in data["trials"]),
                removals=tuple(data["removals"]),
                untested=data["untested"],
                stopped=data["stopped"],
                certificate=data["certificate"],
                warnings=tuple(Warning(**w) for w in data["warnings"]),
                cost=Cost(**data["cost"]),
                argument_defaults=data["argument_defaults"],
                evaluation=Evaluation.from_json(data["evaluation"]) if data.get("evaluation") else None,
                soundness=data.get("soundness") or {},
                reference_optim=(data.get("numerics") or {}).get("reference_optim") or KNOWN_DEFAULTS["optim"],
            )
            check_kinds(result)
            _check_best(result)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, UserError) as error:
            raise FileFormatError(
                f"the result file cannot be read: {error!r}", hint="was it edited by hand?"
            ) from None
        return result


def _check_best(result: TuneResult) -> None:
    """Raise ValueError where the winner is none of the trials, has another effective batch than was asked for, or a figure is not what the trials say."""
    config, wanted = result.best.config, result.spec.effective_batch
    if config.effective_batch() != wanted:
        raise ValueError(f"best.config has effective batch {config.effective_batch()}, the search was for {wanted}")
    known = estimates(result.trials)
    if config.key() not in known:
        raise ValueError(f"best.config ({config.label()}) is none of the trials that completed")
    measured = [b.estimate for b in result.baselines.values() if b.estimate is not None]
    for told in (result.best, *result.tied, *measured):
        found = known.get(told.config.key())
        for what, of in FIGURES.items():
            said, true = of(told), None if found is None else of(found)
            if said != true and not (said and true and math.isclose(said, true, rel_tol=ALIKE)):
                raise ValueError(f"{told.config.label()} has {said!r} {what}, and its trials say {true!r}")
    for name, ratio in result.speedup.items():
        baseline = result.baselines[name].estimate
        if ratio is not None and not (baseline and math.isclose(ratio * baseline.samples_per_second, result.best.samples_per_second, rel_tol=ALIKE)):
            raise ValueError(f"the speedup over {name} is {ratio!r}, which the speeds do not say")


def load(path: str | Path) -> TuneResult:
    """Read a result file. JSON only: loading runs no code.

    Raises:
        FileFormatError: missing, not a result, or of a newer version.
    """
    return TuneResult.from_json(read_json_object(path, what="result"))
