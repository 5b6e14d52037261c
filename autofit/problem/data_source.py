"""Which data a training named on the command line reads: where it is, which columns count, and how it is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autofit.errors import UserError

MAX_TEXT_COLUMNS = 2  #: a text, or a pair of texts


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Rows of text to train on. JSON, as part of a `Workload`.

    Attributes:
        dataset: a file (`.csv`, `.tsv`, `.jsonl`, `.json`, `.parquet`), a directory saved by datasets, or a hub name in the local cache
            (`name` or `name:config`).
        split: `train`, `train[:1000]`, ...; None = `train`, or the only one.
        text_columns: one column, or two for pairs of texts; empty = guessed.
        label_column: labels, target texts (seq2seq-lm) or tags (token-classification); None = guessed.
        tokenizer: directory, `tokenizer.json` or name; None = the model's own.
        packing: causal-lm: join the texts and cut them into blocks of the sequence length, so that there is no padding.
        pad_to_multiple_of: batches are padded to a multiple of this many tokens; None = to their longest row.
    """

    dataset: str
    split: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    tokenizer: str | None = None
    packing: bool = False
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not self.dataset:
            raise UserError("the dataset has no name", hint="--dataset takes a file, a directory or a hub name")
        for name in ("split", "label_column", "tokenizer"):
            if getattr(self, name) is not None and not str(getattr(self, name)).strip():
                raise UserError(f"--{name.replace('_', '-')} is empty", hint="leave it out, or name one")
        if len(set(self.text_columns)) < len(self.text_columns):
            raise UserError(f"column {self.text_columns[0]!r} is named twice for the text", hint="a pair of texts is two columns")
        if len(self.text_columns) > MAX_TEXT_COLUMNS:
            raise UserError(
                f"a row has one text or a pair of texts, got {len(self.text_columns)} text columns",
                hint="--text-column takes one name, or two with a comma",
            )
        multiple = self.pad_to_multiple_of
        if multiple is not None and (isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1):
            raise UserError(f"pad_to_multiple_of must be a positive whole number, got {multiple!r}")
        if self.packing and self.pad_to_multiple_of is not None:
            raise UserError("packed blocks are not padded: pad_to_multiple_of has no effect", hint="leave one of them out")

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {**asdict(self), "text_columns": list(self.text_columns)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataSource:
        """Inverse of `to_json`; unknown keys are ignored.

        Raises:
            UserError: no dataset, or an impossible value.
        """
        names = {f.name for f in fields(cls)}
        known = {k: v for k, v in data.items() if k in names}
        known["text_columns"] = tuple(known.get("text_columns") or ())
        try:
            return cls(**known)
        except TypeError as error:
            raise UserError(f"not a DataSource: {error}") from None
