"""What a child said of a model: kept by the words of the question, the versions and the config's bytes; never trusted when damaged or old."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from autofit.forecasts import modelfacts
from autofit.forecasts.modelfacts import BELIEVED_SECONDS, load_facts, store_facts
from autofit.memory.cache import cache_directory
from autofit.problem.spec import Workload

WORKLOAD = Workload(model="bert-tiny", seq_len=32)
FACTS = {"digest": "abc", "n_params": 4, "seq_len": 32}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path / "cache"))


def _entry() -> Path:
    (path,) = (cache_directory() / "models").iterdir()
    return path


def test_facts_come_back_as_they_were_stored() -> None:
    assert load_facts(WORKLOAD) is None
    store_facts(WORKLOAD, FACTS)
    assert load_facts(WORKLOAD) == FACTS


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_len": 64},
        {"task": "causal-lm"},
        {"attn_implementation": "eager"},
        {"model": "bert-base-uncased"},
    ],
    ids=str,
)
def test_another_question_has_other_facts(fields: dict[str, object]) -> None:
    store_facts(WORKLOAD, FACTS)
    assert load_facts(Workload(**{"model": "bert-tiny", "seq_len": 32, **fields})) is None  # type: ignore[arg-type]


def test_another_version_of_a_library_has_other_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    store_facts(WORKLOAD, FACTS)
    monkeypatch.setattr(modelfacts, "versions", lambda: {"transformers": "99.0"})
    assert load_facts(WORKLOAD) is None


def test_a_local_config_that_was_edited_has_other_facts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text('{"model_type": "bert"}')
    local = Workload(model=str(tmp_path / "model"))
    store_facts(local, FACTS)
    assert load_facts(local) == FACTS
    config.write_text('{"model_type": "gpt2"}')
    assert load_facts(local) is None


@pytest.mark.parametrize("age", [BELIEVED_SECONDS + 1, -60.0], ids=["a day old", "from the future"])
def test_facts_are_believed_for_a_day(age: float) -> None:
    store_facts(WORKLOAD, FACTS)
    _entry().write_text(json.dumps({"time": time.time() - age, "facts": FACTS}))
    assert load_facts(WORKLOAD) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"time": 0}',
        '{"time": "now", "facts": {}}',
        json.dumps({"time": 4e9, "facts": 3}),
        "\x00\xff",
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_mended(content: str) -> None:
    store_facts(WORKLOAD, FACTS)
    _entry().write_text(content, encoding="latin-1")
    assert load_facts(WORKLOAD) is None
    store_facts(WORKLOAD, FACTS)
    assert load_facts(WORKLOAD) == FACTS


@pytest.mark.parametrize("facts", [{}, {"n_params": 3}, [1]], ids=str)
def test_facts_without_a_digest_are_no_facts(facts: object) -> None:
    store_facts(WORKLOAD, FACTS)
    _entry().write_text(json.dumps({"time": time.time(), "facts": facts}))
    assert load_facts(WORKLOAD) is None


def test_live_objects_are_never_kept() -> None:
    store_facts(Workload(model="<Net>", objects_path="/nowhere/objects"), FACTS)
    assert not (cache_directory() / "models").exists()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", os.fspath(tmp_path / "file"))
    store_facts(WORKLOAD, FACTS)
    assert load_facts(WORKLOAD) is None
