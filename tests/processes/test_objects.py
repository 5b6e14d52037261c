"""Live objects travel in a private file that is gone afterwards; what cannot travel is named."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import stat
import tempfile
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from autofit.processes.objects import ObjectFile, kept_arguments
from tests.refusals import refused


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where object files are made, so that a test sees what is left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def stored(path: str) -> dict[str, Any]:
    with open(path, "rb") as handle:
        found = pickle.load(handle)
    assert isinstance(found, dict)
    return found


def test_objects_arrive_whole_and_none_is_left_out() -> None:
    def build() -> list[int]:
        return [1, 2]

    with ObjectFile({"model": build, "train_dataset": [{"x": 1}], "data_collator": None}) as file:
        found = stored(file.path)
    assert set(found) == {"model", "train_dataset"}
    assert found["model"]() == [1, 2]
    assert found["train_dataset"] == [{"x": 1}]


def test_the_file_is_private_and_gone_afterwards(temporary: Path) -> None:
    with ObjectFile({"model": 1}) as file:
        assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(file.path)).st_mode) == 0o700
    assert os.listdir(temporary) == []
    file.close()


def test_the_file_is_gone_when_the_body_raises(temporary: Path) -> None:
    with pytest.raises(KeyError), ObjectFile({"model": 1}):
        raise KeyError("model")
    assert os.listdir(temporary) == []


class _Refuses:
    """Cannot be pickled; says why in several lines, or not at all."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __reduce__(self) -> str:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (threading.Lock, "TypeError: cannot pickle '_thread.lock' object"),
        (lambda: (i for i in range(3)), "TypeError: cannot pickle 'generator' object"),
        (lambda: _Refuses("first line\nsecond line"), "RuntimeError: first line"),
        (lambda: _Refuses(""), "RuntimeError: "),
    ],
)
def test_an_object_that_cannot_travel_is_named(thing: Callable[[], Any], why: str, temporary: Path) -> None:
    with refused(f"^train_dataset cannot be sent to a trial's process: {why}$", hint="__getstate__"):
        ObjectFile({"model": [1], "train_dataset": thing()})
    with refused(f"^model cannot be sent to a trial's process: {why}$", hint="model_init"):
        ObjectFile({"model": thing()})
    assert os.listdir(temporary) == []


class Tensor:
    """As far as the pickler looks: a torch tensor on an accelerator that only its host copy can leave."""

    __module__ = "torch._stand_in"

    class device:
        type = "cuda"

    def __reduce__(self) -> str:
        raise AssertionError("the device's memory must not be pickled")

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Fraction:
        return Fraction(1, 3)


def test_a_tensor_on_an_accelerator_travels_as_its_host_copy() -> None:
    with ObjectFile({"model": {"weight": Tensor()}}) as file:
        assert stored(file.path) == {"model": {"weight": Fraction(1, 3)}}


class Strategy(enum.Enum):
    NO = "no"
    STEPS = "steps"


@dataclasses.dataclass
class Arguments:
    """Shaped like TrainingArguments."""

    output_dir: str | None = None
    learning_rate: float = 5e-5
    save_strategy: Strategy = Strategy.STEPS
    eval_strategy: Strategy | str = Strategy.NO
    report_to: list[str] = dataclasses.field(default_factory=list)
    n_gpu: int = dataclasses.field(init=False, default=-1)

    def __post_init__(self) -> None:
        self.n_gpu = 1
        self.eval_strategy = Strategy(self.eval_strategy)


def test_only_arguments_that_differ_from_the_defaults_are_kept_as_values() -> None:
    assert kept_arguments(Arguments()) == {}
    given = Arguments(output_dir="out", learning_rate=1e-4, save_strategy=Strategy.NO, report_to=["wandb"])
    assert kept_arguments(given) == {
        "output_dir": "out",
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "report_to": ["wandb"],
    }
    assert kept_arguments(Arguments(eval_strategy="no")) == {}
