from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch import nn

from autofit.errors import UserError
from autofit.workload.objects import load_objects
from tests.workload import tiny


def _file(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "objects.pkl"
    path.write_bytes(cloudpickle.dumps(data))
    return str(path)


def test_a_module_is_loaded_as_a_copy(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    objects = load_objects(_file(tmp_path, {"model": layer, "learning_rate": 0.1}))
    assert isinstance(objects.model, nn.Linear)
    assert objects.model is not layer
    assert objects.is_live
    assert objects.extra == {"learning_rate": 0.1}


def test_a_config_under_model_is_taken_as_a_config(tmp_path: Path) -> None:
    objects = load_objects(_file(tmp_path, {"model": tiny.config("bert")}))
    assert objects.model is None
    assert objects.config is not None
    assert not objects.is_live


def test_a_function_under_model_builds_the_model(tmp_path: Path) -> None:
    objects = load_objects(_file(tmp_path, {"model": lambda: nn.Linear(4, 4)}))
    assert objects.model_init is not None
    assert isinstance(objects.model_init(), nn.Linear)


def test_data_travel_alone(tmp_path: Path) -> None:
    objects = load_objects(_file(tmp_path, {"train_dataset": [1], "data_collator": len}))
    assert (objects.train_dataset, objects.data_collator, objects.is_live) == ([1], len, False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "holds a list"),
        ({"model": 3}, "got int"),
        ({"model": nn.Linear(1, 1), "model_init": len}, "model and model_init were both given"),
        ({"config": {"model_type": "bert"}}, "must be a transformers config"),
        ({"model_init": 3}, "must be a function"),
    ],
)
def test_what_cannot_be_a_model_is_named(tmp_path: Path, data: Any, message: str) -> None:
    path = _file(tmp_path, data)
    with pytest.raises(UserError, match=message):
        load_objects(path)


def test_a_file_that_is_missing_or_not_a_pickle_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pkl"
    broken.write_bytes(b"not a pickle")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_objects(str(broken))
    assert caught.value.hint is not None
    with pytest.raises(UserError, match="No such file"):
        load_objects(str(tmp_path / "missing.pkl"))
