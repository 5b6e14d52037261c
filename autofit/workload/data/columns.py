"""Which columns of a dataset are the text and the label: as asked, or guessed where only one reading is possible. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autofit.errors import UserError
from autofit.problem.data_source import DataSource
from autofit.problem.task import Task


class Kind(StrEnum):
    """What a column holds."""

    TEXT = "text"
    INTEGER = "integer"  #: class labels included
    FLOAT = "float"
    WORDS = "lists of words"
    TAGS = "lists of numbers"
    OTHER = "something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns that count: one text or a pair, and a label where the task has one."""

    text: tuple[str, ...]
    label: str | None = None

    def said(self) -> str:
        """In words, for the report."""
        texts = " and ".join(repr(name) for name in self.text)
        return f"text in {texts}" + ("" if self.label is None else f", labels in {self.label!r}")

    def sequences(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """The columns that make each of the sequences of tokens of a row: its input, and its target where that is a text."""
        return (self.text, (self.label,)) if task is Task.SEQ2SEQ_LM and self.label is not None else (self.text,)


TEXT_NAMES = ("text", "sentence", "content", "review", "document", "body", "comment", "tweet", "article", "source", "input", "inputs")
PAIRS = (
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("text1", "text2"),
    ("text_a", "text_b"), ("query", "passage"),
)  # fmt: skip
LABEL_NAMES = ("label", "labels", "class", "category", "sentiment", "score", "rating")
TARGET_NAMES = ("target", "summary", "target_text", "targets", "highlights", "output", "translation", "answer", "label", "labels")
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("ner_tags", "tags", "labels", "label", "pos_tags", "chunk_tags")
#: task -> (names and kinds of its text, names and kinds of its label; None = it has none)
_WANTED: Mapping[Task, tuple[tuple[Sequence[str], Collection[Kind]], tuple[Sequence[str], Collection[Kind]] | None]] = {
    Task.SEQUENCE_CLASSIFICATION: ((TEXT_NAMES, {Kind.TEXT}), (LABEL_NAMES, {Kind.TEXT, Kind.INTEGER, Kind.FLOAT})),
    Task.CAUSAL_LM: ((TEXT_NAMES, {Kind.TEXT}), None),
    Task.MASKED_LM: ((TEXT_NAMES, {Kind.TEXT}), None),
    Task.SEQ2SEQ_LM: ((TEXT_NAMES, {Kind.TEXT}), (TARGET_NAMES, {Kind.TEXT})),
    Task.TOKEN_CLASSIFICATION: ((WORD_NAMES, {Kind.WORDS}), (TAG_NAMES, {Kind.TAGS, Kind.WORDS})),
}
SUPPORTED = tuple(_WANTED)


def choose_columns(source: DataSource, task: Task, columns: Mapping[str, Kind]) -> Columns:
    """Return the columns of the text and of the label.

    Args:
        source: names what the user named.
        task: what they must hold.
        columns: name -> kind, in the dataset's order.

    Raises:
        UserError: a column that is not there or holds something else, or several readings are possible.
    """
    if task not in _WANTED:
        raise UserError(f"{task} cannot be trained on a dataset of texts", hint=f"--dataset is for {', '.join(SUPPORTED)}")
    (text_names, text_kinds), labelled = _WANTED[task]
    if labelled is None and source.label_column is not None:
        raise UserError(f"{task} has no labels beside its text: --label-column has no meaning", hint="leave it out")
    label = None
    if source.label_column is not None and labelled is not None:
        label = _named(source.label_column, columns, labelled[1], "label")
    text = tuple(_named(name, columns, text_kinds, "text") for name in source.text_columns)
    if len(text) == 2 and task not in (Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM):
        raise UserError(f"{task} reads one text column, got {' and '.join(text)}", hint="name one with --text-column")
    if label in text and task is Task.SEQUENCE_CLASSIFICATION:
        raise UserError(f"column {label!r} is named as the text and as the label", hint="a model that reads its label learns nothing else: name two columns")
    if not text:
        text = _guessed_text(source, task, {n: k for n, k in columns.items() if n != label}, text_names, text_kinds)
    if label is None and labelled is not None:
        rest = {name: kind for name, kind in columns.items() if name not in text}
        label = _guess(source, rest, *labelled, what="label", flag="--label-column", beside=text)
    return Columns(text=text, label=label)


def _named(name: str, columns: Mapping[str, Kind], kinds: Collection[Kind], what: str) -> str:
    if name not in columns:
        raise UserError(f"no column {name!r} for the {what}", hint=f"the columns are {', '.join(columns)}")
    if columns[name] not in kinds:
        wanted = " or ".join(sorted(kinds))
        raise UserError(f"column {name!r} holds {columns[name]}, a {what} column must hold {wanted}", hint=f"the columns are {_listed(columns)}")
    return name


def _guessed_text(
    source: DataSource, task: Task, columns: Mapping[str, Kind], names: Sequence[str], kinds: Collection[Kind]
) -> tuple[str, ...]:
    if task is Task.SEQUENCE_CLASSIFICATION:
        pairs = [pair for pair in PAIRS if all(columns.get(name) in kinds for name in pair)]
        if len(pairs) == 1:
            return pairs[0]
    if task is Task.SEQ2SEQ_LM and source.label_column is None:  # a target's name is not a source's
        rest = {n: k for n, k in columns.items() if n.lower() not in TARGET_NAMES}
        columns = rest or columns
    if task is Task.SEQUENCE_CLASSIFICATION and source.label_column is None:
        columns = {n: k for n, k in columns.items() if n.lower() not in LABEL_NAMES} or columns
    return (_guess(source, columns, names, kinds, what="text", flag="--text-column"),)


def _guess(
    source: DataSource, columns: Mapping[str, Kind], names: Sequence[str], kinds: Collection[Kind], *, what: str, flag: str, beside: Sequence[str] = ()
) -> str:
    """The only column with a usual name, else the only one of a fitting kind."""
    fitting = [name for name, kind in columns.items() if kind in kinds]
    usual = [name for name in fitting if name.lower() in names]
    for found in (usual, fitting):
        if len(found) == 1:
            return found[0]
    problem = "could be several columns" if fitting else "is none of its columns"
    hint = f"the columns are {_listed(columns)}" if columns else f"beside {' and '.join(map(repr, beside)) or 'the label'} it has no column"
    raise UserError(f"the {what} of {source.dataset!r} {problem}: say which with {flag}", hint=hint)


def _listed(columns: Mapping[str, Kind]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())
