"""Options that name the user's own data, and what they parse to."""

from __future__ import annotations

from typing import Any

import click

from autofit.errors import UserError
from autofit.problem.data_source import DataSource

DATA_OPTIONS = (
    click.option(
        "--dataset",
        metavar="FILE|DIR|NAME",
        help="Your data: .csv, .tsv, .jsonl, .json, .parquet, a directory saved by datasets, or a hub name in the cache (name:config).",
    ),
    click.option("--split", metavar="NAME", help="Which split; train when left out."),
    click.option("--text-column", metavar="A[,B]", help="Column of the text, or of a pair; guessed where only one can be meant."),
    click.option("--label-column", metavar="NAME", help="Column of the labels, target texts or tags; guessed likewise."),
    click.option("--tokenizer", metavar="DIR|NAME", help="Tokenizer; the model's own when left out."),
    click.option("--packing", is_flag=True, help="causal-lm: join the texts and cut them into blocks of --seq-len."),
    click.option("--pad-to-multiple-of", type=int, metavar="N", help="Pad batches to a multiple of N tokens."),
)
BESIDE_DATASET = {
    "split": "--split",
    "text_column": "--text-column",
    "label_column": "--label-column",
    "tokenizer": "--tokenizer",
    "packing": "--packing",
    "pad_to_multiple_of": "--pad-to-multiple-of",
}  #: option -> flag of what has a meaning beside a dataset only


def given(values: dict[str, Any], name: str) -> bool:
    """Whether the option was given: a 0 is, a flag that is off is not."""
    return values.get(name) is not None and values[name] is not False


def data_source_of(values: dict[str, Any]) -> DataSource | None:
    """The data that the options name; None when they name none.

    Raises:
        UserError: an option about data without a dataset, or an impossible value.
    """
    dataset = values.get("dataset")
    if dataset is None:
        for name, flag in BESIDE_DATASET.items():
            if given(values, name):
                raise UserError(f"{flag} without --dataset has no meaning", hint="name the data with --dataset")
        return None
    columns = values.get("text_column")
    if columns is not None and not columns.replace(",", "").strip():
        raise UserError("--text-column is empty", hint="leave it out, or name one")
    return DataSource(
        dataset=dataset,
        split=values.get("split"),
        text_columns=tuple(part.strip() for part in (columns or "").split(",") if part.strip()),
        label_column=values.get("label_column"),
        tokenizer=values.get("tokenizer"),
        packing=bool(values.get("packing")),
        pad_to_multiple_of=values.get("pad_to_multiple_of"),
    )
