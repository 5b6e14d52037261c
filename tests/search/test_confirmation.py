"""A long run of an answer says beforehand what it runs and how long that may take. The command is tested in `cli`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from click.testing import CliRunner

from autofit.cli import cli
from autofit.errors import AutofitError
from autofit.search.confirmation import confirm
from autofit.trials.trial import Reason
from tests.builders import GPU, make_config, make_record, make_result
from tests.refusals import refused
from tests.searching import failed


class Described:
    """A runner on the same device with other software; a run is what was asked for."""

    model: ClassVar[dict[str, Any]] = {}

    def __init__(self, *_: Any) -> None:
        self.context_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"device": {"context_bytes": 1, "name": GPU.name}, "software": {"torch": "2.13.0", "transformers": "5.0.0"}, "model": self.model}

    def run(self, request: Any) -> Any:
        return request


def test_what_runs_is_said_before_it_runs_with_the_time_that_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.confirmation.ProcessRunner", Described)
    said: list[str] = []
    result = make_result([make_record(0, make_config(8), 32.0, jitter=0.0)])
    request: Any = confirm(result, steps=30, say=said.append)
    assert (request.optimizer_steps, request.full_length) == (30, True)
    assert said == [
        "note: searched with transformers 5.23.0, confirming with 5.0.0",
        "running 30 optimizer steps of 8x8 fp32 adamw_torch_fused: about 1m 00s at the speed of the search",
    ]


def test_another_model_script_or_data_than_in_the_search_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(searched: dict[str, Any], found: dict[str, Any]) -> list[str]:
        monkeypatch.setattr("autofit.search.confirmation.ProcessRunner", Described)
        monkeypatch.setattr(Described, "model", found)
        said: list[str] = []
        result = replace(make_result([make_record(0, make_config(8), 32.0)]), model=searched)
        confirm(result, steps=2, say=said.append)
        return [text for text in said if "changed" in text or "another" in text]

    def data(digest: str, rows: int) -> dict[str, Any]:
        return {"data": {"digest": digest, "lengths": {"rows": rows, "longest": 60, "unit": "tokens"}}}

    one = {"digest": "a", "script": {"digest": "a"}, **data("a", 200)}
    assert told(one, one) == []
    assert told({}, one) == told(one, {}) == []
    assert told(one, {**one, "digest": "b"}) == ["note: the model has another configuration than in the search"]
    assert told(one, {**one, "script": {"digest": "b"}}) == ["note: the script has changed since the search"]
    assert told(one, {**one, **data("b", 50)}) == [
        "note: the data has changed since the search: 50 rows of up to 60 tokens instead of 200 rows of up to 60 tokens"
    ]
    assert told(one, {**one, **data("b", 200)}) == ["note: the data has changed since the search: 200 rows of up to 60 tokens"]


@pytest.mark.parametrize("model", [{"source": "object"}, {"source": "local", "live": True}])
def test_what_was_trained_with_live_objects_is_not_confirmed_without_them(model: dict[str, Any]) -> None:
    with refused("live Python objects"):
        confirm(replace(make_result([make_record(0, make_config(8), 32.0)]), model=model), steps=2)


@pytest.mark.parametrize(
    ("reason", "more", "code", "words"),
    [
        (Reason.OUT_OF_MEMORY, {}, 3, "smaller --memory"),
        (Reason.NON_FINITE_LOSS, {}, 1, "memory is not the cause"),
        (Reason.TIMEOUT, {}, 2, "more --timeout"),
        (Reason.ERROR, {"refused": True, "hint": "give more rows"}, 2, "give more rows"),
        (Reason.CRASH, {}, 1, "did not survive"),
    ],
)
def test_a_run_that_does_not_come_to_its_end_says_why(
    reason: Reason, more: dict[str, Any], code: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_result([make_record(0, make_config(8), 32.0)]).save(tmp_path / "best.json")
    monkeypatch.setattr("autofit.search.confirmation.confirm", lambda *args, **kwargs: failed(reason, "it ended", **more))
    done = CliRunner().invoke(cli, ["confirm", str(tmp_path / "best.json")])
    error = done.exception
    assert isinstance(error, AutofitError)
    assert error.exit_code == code
    assert words in f"{error.message} {error.hint}"
