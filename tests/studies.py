"""A small study on disk with one trial of every kind, and what its bytes say."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import optuna

from autofit.problem.config import Precision
from autofit.problem.space import Capabilities, Space, build_space
from autofit.study.journal import open_study
from autofit.study.study import RECORD, TrialStudy
from autofit.trials.trial import Reason, Role, TrialRecord
from tests.builders import make_config, make_record

IDENTITY = {
    "model": "bert-tiny 3f2a",
    "effective_batch": 8,
    "device": "cpu",
    "memory_limit": 1 << 30,
    "task": None,
}
SPACE: Space = build_space(
    effective_batch=8,
    capabilities=Capabilities(
        device_kind="cpu", precisions=(Precision.FP32,), optims=("adamw_torch", "adafactor")
    ),
)


def opened(path: str | Path | None, identity: dict[str, Any] = IDENTITY) -> optuna.Study:
    """The study in `path`, under a sampler that needs no torch."""
    return open_study(path, sampler=optuna.samplers.RandomSampler(seed=0), identity=dict(identity))


def opened_trials(path: str | Path | None) -> TrialStudy:
    """Ask and tell over the study in `path`."""
    return TrialStudy(opened(path), SPACE)


def write_study(path: str | Path) -> TrialStudy:
    """Write a study that a kill interrupts: every outcome, a repeat, a play-off, a run outside the space, one trial in flight."""
    study = opened_trials(path)
    first, second, third, fourth = SPACE.configs[:4]
    study.enqueue(first)
    study.tell(study.ask(), make_record(0, first, 100.0, role=Role.DEFAULTS))
    for config, reason in (
        (second, Reason.OUT_OF_MEMORY),
        (third, Reason.PREDICTED_TOO_BIG),
        (fourth, Reason.CRASH),
    ):
        study.enqueue(config)
        study.tell(study.ask(), make_record(0, config, reason=reason, message="why\n\u00fc"))
    study.enqueue(first)
    study.drop(study.ask())
    study.add(make_record(0, first, 101.0, role=Role.PLAYOFF))
    study.add(make_record(0, make_config(4, 8, optim="sgd"), 50.0, role=Role.HAND_RECIPE))
    study.add(make_record(0, first, reason=Reason.OUT_OF_MEMORY, role=Role.CONFIRMATION))
    study.enqueue(SPACE.configs[4])
    study.ask()
    return study


@functools.cache
def journal_bytes() -> bytes:
    """The bytes of `write_study`'s file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "study.log"
        write_study(path)
        return path.read_bytes()


def whole_lines(data: bytes) -> list[dict[str, Any]]:
    """The journal entries whose line has its end."""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def finished_records(data: bytes) -> list[dict[str, Any]]:
    """Records in whole lines, in order, as JSON without their number."""
    found = []
    for entry in whole_lines(data):
        attributes = entry.get("user_attr") or entry.get("user_attrs") or {}
        if RECORD in attributes:
            found.append(numberless(attributes[RECORD]))
    return found


def numberless(record: TrialRecord | dict[str, Any]) -> dict[str, Any]:
    """A record as JSON without its number, which the study gives."""
    data = record.to_json() if isinstance(record, TrialRecord) else record
    return {name: value for name, value in data.items() if name != "number"}
