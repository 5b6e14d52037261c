"""The benchmark that compares predicted largest batches with trials: its search for the turning point, its report, and what it once found."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.forecasts.estimation import asking
from autofit.forecasts.laws import Setting, collect, law_class
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from benchmarks.largest_batch import boundary, main, report

RECORDED = sorted((Path(__file__).parents[2] / "benchmarks" / "reports").glob("*-largest-batch.json"))[-1]
DATA: dict[str, Any] = json.loads(RECORDED.read_text())


@given(most=st.integers(0, 3000), guess=st.integers(0, 3000))
def test_the_turning_point_is_found_from_any_guess_with_few_questions(most: int, guess: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= most

    assert boundary(fits, guess) == most
    assert len(asked) == len(set(asked))
    assert min(asked) >= 1
    assert len(asked) <= 2 + 2 * (abs(most - max(1, guess)) + 1).bit_length()


def test_the_report_counts_what_was_missed_and_in_which_direction() -> None:
    row = {**DATA["rows"][0], "predicted": 10}
    lines = report({**DATA, "rows": [{**row, "found": found} for found in (10, 10, 8, 13)]})
    assert "Of 4 questions 2 were answered exactly, 1 (by 2 at most) with a batch that is too large, 1 (by 3 at most) with one that is too small." in lines


def test_the_committed_report_is_that_of_its_rows() -> None:
    assert RECORDED.with_suffix(".md").read_text().splitlines() == report(DATA)


def test_no_such_model_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--date", "2026-01-01", "--models", "bert-base-uncased,nobody"])
    assert "no such model: nobody" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize(("model", "precision"), [("t5-small", "bf16"), ("vit-base-patch16-224", "fp32")])
def test_predictions_still_meet_what_trials_found(model: str, precision: str) -> None:
    for name in ("torch", "transformers"):
        if importlib.metadata.version(name).partition("+")[0] != DATA["machine"]["versions"][name].partition("+")[0]:
            pytest.skip(f"the rows were recorded with another {name}")
    rows = [
        row
        for row in DATA["rows"]
        if (row["model"], row["config"]["precision"], row["config"]["gradient_checkpointing"]) == (model, precision, False)
    ]
    workload = Workload(model=model, seq_len=rows[0]["seq_len"])
    with asking(workload) as (facts, ask):
        setting = Setting(workload=workload, facts=facts, compute_capability=DATA["machine"]["device"]["compute_capability"])
        laws = collect(setting, [TrialConfig.from_json(row["config"]) for row in rows], ask)
        for row in rows:
            law = laws[law_class(setting, TrialConfig.from_json(row["config"]))].laws
            assert law is not None
            told = law.memory.max_batch(row["limit_bytes"] - row["context_bytes"])
            assert abs(told - row["found"]) <= 1, row
