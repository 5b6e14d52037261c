"""Fixtures of the tests of script mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from tests.scripts.place import Place, contents


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessRunner]:
    os.environ["SAID"] = str(tmp_path_factory.mktemp("said") / "said.json")
    with ProcessRunner(Workload(model="bert-tiny"), "cpu") as runner:
        yield runner
    del os.environ["SAID"]


@pytest.fixture
def place(runner: ProcessRunner, tmp_path: Path) -> Iterator[Place]:
    said = Path(os.environ["SAID"])
    said.unlink(missing_ok=True)
    place = Place(tmp_path, runner, said)
    yield place
    assert contents(place.out) == {"model.bin": b"precious"}
