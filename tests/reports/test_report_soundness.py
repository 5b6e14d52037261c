"""One sentence says what was compared, how near it was, or why nothing was."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.problem.config import Precision
from autofit.reports.report import report_lines
from autofit.reports.report_soundness import checked_sentence
from tests.builders import make_config, make_record, make_result

AGREES = {"split_loss_difference": 2e-7, "split_gradient_difference": 4e-4}
IN_BF16 = {"precision": "bf16", "precision_loss_difference": 0.0031}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, None),
        (AGREES, "Checked: one batch in one piece and in micro-batches agree to 0.04 % in loss and gradient norm."),
        (IN_BF16, "Checked: bf16 starts 0.31 % off the losses of fp32 (rounding explains 6.25 %)."),
        ({"split_loss_difference": 3.0, "split_gradient_difference": 3.0}, None),
        ({"split_loss_difference": None, "split_gradient_difference": 0.0}, None),
        ({"precision": "fp16", "precision_loss_difference": 0.5}, None),
        ({"skipped": "the time budget was spent"}, "Soundness was not checked: the time budget was spent."),
        ({"split_loss_difference": 0.0, "split_gradient_difference": 0.0}, "Checked: one batch in one piece and in micro-batches agree to less than 0.001 % in loss and gradient norm."),
    ],
)
def test_what_is_said(found: dict[str, Any], said: str | None) -> None:
    assert checked_sentence(found, Precision.BF16) == said


def test_the_report_has_it() -> None:
    config = make_config(8, precision=Precision.BF16)
    result = make_result([make_record(0, config, 100.0)], soundness={**AGREES, **IN_BF16})
    text = " ".join(" ".join(line.text for line in report_lines(result, 100)).split())
    assert "in loss and gradient norm; bf16 starts 0.31 % off the losses of fp32" in text
