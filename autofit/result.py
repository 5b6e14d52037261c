"""The answer of a search, as data: computed from the records alone, so that anyone can recompute it from the file.

File: `{"schema": "autofit/result", "version": 1, "best", "baselines", "speedup", "spec", "device", "software", "trials", "warnings", "cost"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.arguments import CHECKPOINTING_NAMES, explicit_arguments, model_arguments, training_arguments
from autofit.config import TrialConfig
from autofit.device import Device
from autofit.errors import FileFormatError, UserError
from autofit.estimates import Estimate as Estimate
from autofit.estimates import break_even_hours as break_even_hours
from autofit.estimates import by_config as by_config
from autofit.estimates import estimate_of as estimate_of
from autofit.estimates import estimates as estimates
from autofit.files import read_json_object, write_json
from autofit.spec import SearchSpec
from autofit.trial import TrialRecord

if TYPE_CHECKING:
    from transformers import TrainingArguments

SCHEMA, VERSION = "autofit/result", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something the user should know: a stable code, one sentence, and what to do next (None: nothing)."""

    code: str
    message: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the user would have had: `estimate` is None when it did not fit (`note` says so)."""

    config: TrialConfig | None
    estimate: Estimate | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON for the result file."""
        return {
            "config": self.config.to_json() if self.config else None,
            "estimate": self.estimate.to_json() if self.estimate else None,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baseline:
        """Inverse of `to_json`."""
        return cls(
            config=TrialConfig.from_json(data["config"]) if data["config"] else None,
            estimate=Estimate.from_json(data["estimate"]) if data["estimate"] else None,
            note=data["note"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the search cost.

    Attributes:
        seconds: wall time of the search.
        device_seconds: of it, in trials.
        trials: trials that ran (play-off and confirmation not counted).
        out_of_memory: of them, those that did not fit.
        break_even_hours: per baseline: hours of training with the answer after which the search has paid for itself; None
            where the answer is not faster.
    """

    seconds: float
    device_seconds: float
    trials: int
    out_of_memory: int
    break_even_hours: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The answer and its proof.

    Attributes:
        best: the winner.
        confirmed: whether it ran at full accumulation and longest length.
        tied: configurations that are not slower beyond the noise, with their estimates; the winner needs the least memory of those as fast in the mean.
        baselines: `defaults` and `hand_recipe`.
        speedup: ratio of throughput over each baseline; None where the baseline has none.
        spec, device, software: under which conditions.
        memory_limit_bytes: enforced in every trial.
        trials: every record.
        removals: choices that are not in the space: `{"knob", "value", "reason"}`.
        untested: reason -> how many configurations were not run for it.
        stopped: why the search ended, one sentence.
        certificate: the sampler's statement about what was left, with the closest contenders; None when it has none.
        warnings: see `Warning`.
        cost: see `Cost`.
        argument_defaults: of the installed TrainingArguments, to write down only what differs.
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
    argument_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of the winner's TrainingArguments that differ from the installed defaults."""
        return training_arguments(self.best.config, self.argument_defaults)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keywords that the winner needs in `from_pretrained`; empty for most."""
        return model_arguments(self.best.config)

    def training_arguments(self, output_dir: str, **more: Any) -> TrainingArguments:
        """Return ready `transformers.TrainingArguments`.

        Args:
            output_dir: as TrainingArguments wants it.
            more: further keywords (learning_rate, ...). The tuned ones cannot be overridden.

        Raises:
            UserError: a keyword would override a tuned one.
        """
        tuned = {*explicit_arguments(self.best.config, self.argument_defaults), *CHECKPOINTING_NAMES}
        clash = sorted(tuned & set(more))
        if clash:
            raise UserError(
                f"{', '.join(clash)} was tuned and cannot be set again",
                hint="build TrainingArguments from result.arguments",
            )
        from transformers import TrainingArguments

        cpu = {"use_cpu": True} if self.device.kind == "cpu" else {}
        return TrainingArguments(output_dir=output_dir, **{**cpu, **self.arguments, **more})

    def to_json(self) -> dict[str, Any]:
        """The result as the file holds it."""
        best = {
            **self.best.to_json(),
            "training_arguments": self.arguments,
            "model_arguments": self.model_arguments,
            "effective_batch": self.best.config.effective_batch(),
            "confirmed": self.confirmed,
            "tied_with": [estimate.to_json() for estimate in self.tied],
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
            "memory_limit_bytes": self.memory_limit_bytes,
            "trials": [record.to_json() for record in self.trials],
            "removals": [dict(removal) for removal in self.removals],
            "untested": dict(self.untested),
            "stopped": self.stopped,
            "certificate": dict(self.certificate) if self.certificate is not None else None,
            "warnings": [asdict(warning) for warning in self.warnings],
            "cost": {**asdict(self.cost), "break_even_hours": dict(self.cost.break_even_hours)},
            "argument_defaults": dict(self.argument_defaults),
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
            return cls(
                best=Estimate.from_json(data["best"]),
                confirmed=data["best"]["confirmed"],
                tied=tuple(Estimate.from_json(e) for e in data["best"]["tied_with"]),
                baselines={name: Baseline.from_json(b) for name, b in data["baselines"].items()},
                speedup=data["speedup"],
                spec=SearchSpec.from_json(data["spec"]),
                device=Device.from_json(data["device"]),
                software=data["software"],
                model=data["model"],
                memory_limit_bytes=data["memory_limit_bytes"],
                trials=tuple(TrialRecord.from_json(t) for t in data["trials"]),
                removals=tuple(data["removals"]),
                untested=data["untested"],
                stopped=data["stopped"],
                certificate=data["certificate"],
                warnings=tuple(Warning(**w) for w in data["warnings"]),
                cost=Cost(**data["cost"]),
                argument_defaults=data["argument_defaults"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise FileFormatError(
                f"the result file cannot be read: {error!r}", hint="was it edited by hand?"
            ) from None


def load(path: str | Path) -> TuneResult:
    """Read a result file. JSON only: loading runs no code.

    Raises:
        FileFormatError: missing, not a result, or of a newer version.
    """
    return TuneResult.from_json(read_json_object(path, what="result"))
