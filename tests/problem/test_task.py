from __future__ import annotations

import pytest

from autofit.errors import UserError
from autofit.problem.task import Task, parse_task


@pytest.mark.parametrize("task", list(Task))
def test_a_task_is_called_by_its_own_name_or_its_auto_class(task: Task) -> None:
    assert parse_task(str(task)) is task
    assert parse_task(str(task).upper().replace("-", "_")) is task
    assert parse_task(task.auto_class_name) is task


@pytest.mark.parametrize(
    ("alias", "task"),
    [
        ("text-classification", Task.SEQUENCE_CLASSIFICATION),
        ("ner", Task.TOKEN_CLASSIFICATION),
        ("text-generation", Task.CAUSAL_LM),
        ("fill-mask", Task.MASKED_LM),
        ("summarization", Task.SEQ2SEQ_LM),
        ("translation_en_to_fr", Task.SEQ2SEQ_LM),
        ("automatic-speech-recognition", Task.CTC),
    ],
)
def test_pipeline_names_are_aliases(alias: str, task: Task) -> None:
    assert parse_task(alias) is task


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="sequence-clasification") as caught:
        parse_task("sequence-clasification")
    assert caught.value.hint is not None
    assert "sequence-classification" in caught.value.hint


def test_a_task_like_none_is_answered_with_all_of_them() -> None:
    with pytest.raises(UserError) as caught:
        parse_task("qqqq")
    assert caught.value.hint is not None
    assert all(str(task) in caught.value.hint for task in Task)
