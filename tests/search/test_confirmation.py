"""A long run of an answer says beforehand what it runs and how long that may take. The command is tested in `cli`."""

from __future__ import annotations

from typing import Any, Self

import pytest

from autofit.search.confirmation import confirm
from tests.builders import GPU, make_config, make_record, make_result


class Described:
    """A runner on the same device with other software; a run is what was asked for."""

    def __init__(self, *_: Any) -> None:
        self.context_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "device": {"context_bytes": 1, "name": GPU.name},
            "software": {"torch": "2.13.0", "transformers": "5.0.0"},
            "model": {"digest": "m", "data": {"digest": "other"}},
        }

    def run(self, request: Any) -> Any:
        return request


def test_what_runs_is_said_before_it_runs_with_the_time_that_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.confirmation.ProcessRunner", Described)
    said: list[str] = []
    result = make_result([make_record(0, make_config(8), 32.0, jitter=0.0)], model={"digest": "m", "data": {"digest": "d"}})
    request: Any = confirm(result, steps=30, say=said.append)
    assert (request.optimizer_steps, request.full_length) == (30, True)
    assert said == [
        "note: searched with transformers 5.23.0, confirming with 5.0.0",
        "note: the data is not that of the search",
        "running 30 optimizer steps of 8x8 fp32 adamw_torch_fused: about 1m 00s at the speed of the search",
    ]
