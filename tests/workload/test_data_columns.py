"""Which columns are text and label: as named, guessed where one reading is possible, refused in one line otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.problem.data_source import DataSource
from autofit.problem.task import Task
from autofit.workload.data.columns import Columns, Kind, choose_columns
from tests.refusals import refused

TEXT, INTEGER, FLOAT, WORDS, TAGS, OTHER = Kind.TEXT, Kind.INTEGER, Kind.FLOAT, Kind.WORDS, Kind.TAGS, Kind.OTHER
CLASSIFY = Task.SEQUENCE_CLASSIFICATION


def chosen(task: Task, columns: dict[str, Kind], **named: Any) -> Columns:
    return choose_columns(DataSource(dataset="d", **named), task, columns)


@pytest.mark.parametrize(
    ("task", "columns", "text", "label"),
    [
        (CLASSIFY, {"text": TEXT, "label": INTEGER}, ("text",), "label"),
        (CLASSIFY, {"id": INTEGER, "Review": TEXT, "author": TEXT, "Sentiment": TEXT}, ("Review",), "Sentiment"),
        (CLASSIFY, {"premise": TEXT, "hypothesis": TEXT, "label": INTEGER}, ("premise", "hypothesis"), "label"),
        (CLASSIFY, {"question": TEXT, "sentence": TEXT, "label": INTEGER, "idx": INTEGER}, ("question", "sentence"), "label"),
        (CLASSIFY, {"words_said": TEXT, "stars": FLOAT}, ("words_said",), "stars"),
        (Task.CAUSAL_LM, {"text": TEXT, "title": TEXT}, ("text",), None),
        (Task.MASKED_LM, {"anything": TEXT, "n": INTEGER}, ("anything",), None),
        (Task.SEQ2SEQ_LM, {"article": TEXT, "highlights": TEXT, "id": TEXT}, ("article",), "highlights"),
        (Task.SEQ2SEQ_LM, {"english": TEXT, "target": TEXT}, ("english",), "target"),
        (Task.TOKEN_CLASSIFICATION, {"id": TEXT, "tokens": WORDS, "ner_tags": TAGS, "n": INTEGER}, ("tokens",), "ner_tags"),
    ],
)
def test_what_can_be_meant_in_one_way_only_is_guessed(task: Task, columns: dict[str, Kind], text: tuple[str, ...], label: str | None) -> None:
    assert chosen(task, columns) == Columns(text=text, label=label)


def test_what_is_named_is_taken() -> None:
    columns = {"a": TEXT, "b": TEXT, "c": INTEGER, "d": INTEGER}
    assert chosen(CLASSIFY, columns, text_columns=("b", "a"), label_column="d") == Columns(text=("b", "a"), label="d")
    assert chosen(CLASSIFY, {"x": TEXT, "y": TEXT}, label_column="x") == Columns(text=("y",), label="x")


@pytest.mark.parametrize(
    ("task", "columns", "named", "words", "hint"),
    [
        (CLASSIFY, {"a": TEXT, "b": TEXT, "label": INTEGER}, {}, "text of 'd' could be several", r"a \(text\), b \(text\)"),
        (CLASSIFY, {"text": TEXT, "x": INTEGER, "y": INTEGER}, {}, "label of 'd' could be several", "x .*y"),
        (CLASSIFY, {"n": INTEGER, "label": INTEGER}, {}, "text of 'd' is none", None),
        (CLASSIFY, {"text;label": TEXT}, {}, "label of 'd' is none", "beside 'text;label' it has no column"),
        (CLASSIFY, {"label": INTEGER}, {"label_column": "label"}, "text of 'd' is none", "^beside the label it has no column"),
        (CLASSIFY, {"text": TEXT, "label": INTEGER}, {"text_columns": ("body",)}, "no column 'body'", "text, label"),
        (CLASSIFY, {"text": TEXT, "label": INTEGER}, {"text_columns": ("label",)}, "'label' holds integer", None),
        (CLASSIFY, {"a": TEXT, "b": TEXT}, {"text_columns": ("a", "b"), "label_column": "b"}, "'b' is named as the text and as the label", "two columns"),
        (CLASSIFY, {"text": TEXT, "label": OTHER}, {"label_column": "label"}, "must hold float or integer or text", None),
        (Task.CAUSAL_LM, {"text": TEXT, "n": INTEGER}, {"label_column": "n"}, "no labels beside its text", None),
        (Task.CAUSAL_LM, {"a": TEXT, "b": TEXT}, {"text_columns": ("a", "b")}, "one text column", None),
        (Task.QUESTION_ANSWERING, {"text": TEXT}, {}, "question-answering cannot be trained", "sequence-classification"),
        (Task.IMAGE_CLASSIFICATION, {"text": TEXT}, {}, "image-classification cannot", None),
        (Task.CTC, {"text": TEXT}, {}, "ctc cannot", None),
    ],
)
def test_what_cannot_be_told_is_refused(task: Task, columns: dict[str, Kind], named: dict[str, Any], words: str, hint: str | None) -> None:
    with refused(words, hint=hint):
        chosen(task, columns, **named)
