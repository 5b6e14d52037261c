"""What the user asked for: the workload (model, task, data) and the terms of the search."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from autofit.errors import UserError
from autofit.problem.adaptation import Adaptation
from autofit.problem.config import Precision
from autofit.problem.data_source import DataSource

T = TypeVar("T")
MAX_EFFECTIVE_BATCH = 1 << 20
MAX_SEQ_LEN = 1 << 20
MAX_SEED = (1 << 32) - 1  #: of numpy's generators
DEFAULT_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. JSON, so that it can be sent to a child and written to a file.

    Attributes:
        model: hub name, preset name, path of a directory or config file, or a label for a live object.
        task: an auto class's name in kebab case (`sequence-classification`); None = by architecture.
        seq_len: tokens per sample (samples of audio for speech); None = by model, see `workload.tasks`.
        trust_remote_code: whether the model's own Python code may run.
        attn_implementation: `eager`, `sdpa`, ...; None = the library's choice.
        objects_path: private cloudpickle file with live objects (model, dataset, ...); None for named models.
        script: the user's script as Python's own command line has it after `python` (`train.py --lr 1e-4`, `-m pkg.train`);
            it builds model, data and Trainer itself, and `model` is its label.
        adaptation: an adapter, and how the weights under it are stored; None = the model is trained as it is.
        data: the rows that it is trained on; None = live objects or a script bring them, or they are made up.
    """

    model: str
    task: str | None = None
    seq_len: int | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    objects_path: str | None = None
    script: tuple[str, ...] | None = None
    adaptation: Adaptation | None = None
    data: DataSource | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("no model given", hint="name one with --model, e.g. --model bert-base-uncased")
        for name in ("task", "attn_implementation"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be a name, got {getattr(self, name)!r}")
        if self.seq_len is not None and not 1 <= self.seq_len <= MAX_SEQ_LEN:
            raise UserError(f"sequence length must be between 1 and {MAX_SEQ_LEN}, got {self.seq_len}")

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            **asdict(self),
            "adaptation": None if self.adaptation is None else self.adaptation.to_json(),
            "data": None if self.data is None else self.data.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Workload:
        """Inverse of `to_json`; unknown keys are ignored."""
        script, adaptation = data.get("script"), data.get("adaptation")
        known = {**data, "script": None if script is None else tuple(script)}
        known["data"] = None if data.get("data") is None else DataSource.from_json(data["data"])
        return _from_known(cls, {**known, "adaptation": None if adaptation is None else Adaptation.from_json(adaptation)})

    def identity(self) -> str:
        """A digest of what is named here. Live objects are not in it: where they matter, the model's own digest stands beside it."""
        later = ("script", "adaptation", "data")  # not in digests of before they existed
        facts = {k: v for k, v in self.to_json().items() if k != "objects_path" and (k not in later or v is not None)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """The terms of one search.

    Attributes:
        workload: what is trained.
        effective_batch: samples per optimizer step, over all devices. Exact.
        device: `cuda:N`, `cpu`, or None for the first accelerator, else the CPU.
        memory_limit_bytes: bytes of the device that the run may use, context included; None = what is free, less a margin.
        precisions, optims, checkpointing, batch_sizes: restrictions of the space; None = all that the device supports.
        keep_numerics: whether only choices are searched that leave the mathematics of training as it is (see `numerics`).
        reference_optim: the optimizer in the user's own arguments; None = they name none, or the library's default.
        tune: what the space is widened by, beyond the plain one (see `extras`).
        trials: most trials that run (play-off and confirmation not counted); None = no limit but the space.
        timeout_seconds: for the whole search; None = none.
        trial_timeout_seconds: for one trial; None = a generous default.
        sampler: `auto`, `tpe`, `random` or `grid`.
        seed: of the sampler and of the trials.
        tolerance: relative speed difference that does not matter (0.01 = 1 %).
        eval_batch_size: samples per evaluation step whose memory is tried with the winner; None = no evaluation is tried.
    """

    workload: Workload
    effective_batch: int
    device: str | None = None
    memory_limit_bytes: int | None = None
    precisions: tuple[Precision, ...] | None = None
    optims: tuple[str, ...] | None = None
    checkpointing: tuple[bool, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    keep_numerics: bool = False
    reference_optim: str | None = None
    tune: tuple[str, ...] = ()
    trials: int | None = None
    timeout_seconds: float | None = None
    trial_timeout_seconds: float | None = None
    sampler: str = "auto"
    seed: int = 0
    tolerance: float = DEFAULT_TOLERANCE
    eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.effective_batch, bool) or not isinstance(self.effective_batch, int):
            raise UserError(f"effective batch must be a whole number, got {self.effective_batch!r}")
        if not 1 <= self.effective_batch <= MAX_EFFECTIVE_BATCH:
            raise UserError(
                f"effective batch must be between 1 and {MAX_EFFECTIVE_BATCH}, got {self.effective_batch}"
            )
        if self.trials is not None and self.trials < 1:
            raise UserError(f"trials must be at least 1, got {self.trials}")
        if self.eval_batch_size is not None and not 1 <= self.eval_batch_size <= MAX_EFFECTIVE_BATCH:
            raise UserError(f"evaluation batch must be between 1 and {MAX_EFFECTIVE_BATCH}, got {self.eval_batch_size}")
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float) or not 0 <= self.tolerance < 1:
            raise UserError(f"tolerance must be at least 0 and below 1, got {self.tolerance!r}")
        self._check_restrictions()

    def _check_restrictions(self) -> None:
        if self.device is not None and not isinstance(self.device, str):
            raise UserError(f"device must be a name, got {self.device!r}", hint="use cpu, cuda or cuda:N")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed must be a whole number between 0 and {MAX_SEED}, got {self.seed!r}")
        for size in self.batch_sizes or ():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"a batch size must be a positive whole number, got {size!r}")
        if self.batch_sizes == ():
            raise UserError("an empty list of batch sizes", hint="leave it out to search them all")
        if not isinstance(self.keep_numerics, bool):
            raise UserError(f"keep_numerics must be True or False, got {self.keep_numerics!r}")
        for value in self.checkpointing or ():
            if not isinstance(value, bool):
                raise UserError(f"checkpointing must be True, False or None, got {value!r}")
        if self.keep_numerics and "pure_bf16" in self.tune:
            raise UserError("--keep-numerics and --tune pure_bf16 exclude each other", hint="leave one of them out")

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["workload"] = self.workload.to_json()
        data["tune"] = list(self.tune)
        for name in ("precisions", "optims", "checkpointing", "batch_sizes"):
            data[name] = (
                None if data[name] is None else [str(v) if name == "precisions" else v for v in data[name]]
            )
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SearchSpec:
        """Inverse of `to_json`; unknown keys are ignored."""
        kept = dict(data)
        kept["workload"] = Workload.from_json(kept["workload"])
        for name in ("precisions", "optims", "checkpointing", "batch_sizes"):
            if kept.get(name) is not None:
                kept[name] = tuple(Precision(v) if name == "precisions" else v for v in kept[name])
        kept["tune"] = tuple(kept.get("tune") or ())
        return _from_known(cls, kept)


def _from_known(cls: type[T], data: Mapping[str, Any]) -> T:
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{k: v for k, v in data.items() if k in names})
    except TypeError as error:
        raise UserError(f"not a {cls.__name__}: {error}") from None
