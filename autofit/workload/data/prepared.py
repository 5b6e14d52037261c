"""A named dataset made ready once: tokenised in the first child that needs it, kept in a private file that later ones read."""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from autofit.errors import UserError
from autofit.problem.data_source import DataSource
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.processes.protocol import SCRATCH
from autofit.trials.lengths import Lengths
from autofit.workload.data.columns import choose_columns
from autofit.workload.data.files import kinds_of, load_rows
from autofit.workload.data.labels import Labels, labels_of, tags_of
from autofit.workload.data.library import arrow_column, datasets, pa, pc
from autofit.workload.data.tokenise import tokenising
from autofit.workload.data.tokenizers import check_room, check_vocabulary, load_tokenizer, longest_allowed
from autofit.workload.tasks import max_positions, sequence_length

MOST_ROWS = 100_000  #: that are tokenised: more say nothing new about lengths
LONGEST_KEPT = 256  #: rows of most characters that are tokenised in any case
LABELLED = (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Tokenised rows on disk and what is known of them.

    Attributes:
        directory: private; holds `rows.arrow`.
        source, task: what they are.
        tokenizer: its name.
        trust_remote_code: as in `Workload`.
        total: rows of the dataset, of which `rows.arrow` may be a sample.
        label_names: of the classes; empty where there are none.
        regression: whether the label is a number to predict.
        limit: tokens after which texts were cut; None = never.
        said: the columns in words.
        digest: of the tokens.
    """

    directory: str
    source: DataSource
    task: Task
    tokenizer: str
    trust_remote_code: bool = False
    total: int
    label_names: tuple[str, ...] = ()
    regression: bool = False
    limit: int | None = None
    said: str = ""
    digest: str = ""
    used: int = field(default=0)

    def rows(self) -> datasets.Dataset:
        """The rows, read from disk as they are used."""
        return datasets.Dataset.from_file(str(Path(self.directory) / "rows.arrow"))

    def lengths(self) -> Lengths:
        """Tokens of every prepared row, targets of their own (seq2seq) beside them."""
        table = self.rows()
        targets = _list_lengths(table, "labels") if self.task is Task.SEQ2SEQ_LM else None
        return Lengths.of(_list_lengths(table, "input_ids"), targets=targets)

    def longest(self) -> int:
        """Tokens of the longest row, padded as batches are."""
        found = self.lengths()
        multiple = self.source.pad_to_multiple_of or 1
        return -(-int(max(found.inputs.max(), found.targets.max())) // multiple) * multiple

    def load_tokenizer(self) -> Any:
        """The tokenizer that made the rows."""
        return load_tokenizer(self.tokenizer, trust_remote_code=self.trust_remote_code)

    def fitted(self, config: PretrainedConfig) -> PretrainedConfig:
        """A copy of the model's config with as many labels as the data has, as `from_pretrained(num_labels=...)` makes it."""
        if self.task not in LABELLED:
            return config
        fitted = copy.deepcopy(config)
        fitted.num_labels = max(1, len(self.label_names))
        if self.task is Task.SEQUENCE_CLASSIFICATION:
            fitted.problem_type = "regression" if self.regression else "single_label_classification"
        return fitted

    def facts(self) -> dict[str, Any]:
        """For the result: where the data is from, its columns, its labels and its lengths."""
        lengths = self.lengths()
        summary, multiple = lengths.summary().to_json(), self.source.pad_to_multiple_of
        return {
            "source": self.source.dataset,
            "split": self.source.split,
            "columns": self.said,
            "num_labels": max(1, len(self.label_names)) if self.task in LABELLED else None,
            "packing": self.source.packing,
            "truncated_at": self.limit,
            "uneven": lengths.uneven,
            "digest": self.digest if multiple is None else f"{self.digest} in multiples of {multiple}",
            "lengths": {**summary, "rows": self.used if self.used_all or self.source.packing else self.total},  # rows without a token are none
            "sampled_rows": None if self.used_all else self.used,
        }

    @property
    def used_all(self) -> bool:
        """Whether every row of the dataset was tokenised."""
        return self.total <= MOST_ROWS


def prepare(workload: Workload, task: Task, config: PretrainedConfig) -> Prepared:
    """Return the tokenised data of `workload.data`, from the private file where an earlier child has made it.

    Raises:
        UserError: data, columns, labels or tokenizer cannot be used.
    """
    source = workload.data
    assert source is not None
    key = json.dumps([source.to_json(), workload.model, str(task), workload.seq_len], sort_keys=True)
    directory = Path(_scratch()) / f"data-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        return _from_json(json.loads((directory / "prepared.json").read_text("utf-8")))
    except FileNotFoundError:
        prepared = _prepare(workload, source, task, config, directory)
    (directory / "prepared.json").write_text(json.dumps(asdict(prepared)), encoding="utf-8")
    return prepared


def _prepare(workload: Workload, source: DataSource, task: Task, config: PretrainedConfig, directory: Path) -> Prepared:
    if source.packing and task is not Task.CAUSAL_LM:
        raise UserError(f"packing is for causal-lm, not for {task}", hint="leave --packing out")
    raw = load_rows(source, directory / "cache")
    columns = choose_columns(source, task, kinds_of(raw))
    labels = _labels(raw, task, columns.label)
    name = source.tokenizer or workload.model
    tokenizer = load_tokenizer(name, trust_remote_code=workload.trust_remote_code)
    asked = sequence_length(workload.seq_len, task, config) if source.packing or workload.seq_len is not None else None
    limit = longest_allowed(tokenizer, asked, max_positions(config))
    _check_tokenizer(tokenizer, task)
    if not source.packing:
        check_room(tokenizer, limit, pair=len(columns.text) == 2)
    make = tokenising(task, tokenizer, columns, labels, limit=limit, packing=source.packing)
    rows = _mapped(sample(raw, columns.sequences(task)), make, directory / "rows.arrow")
    if len(rows) == 0:
        problem = f"all texts together are shorter than one block of {limit} tokens" if source.packing else "no row has a token"
        raise UserError(f"the dataset {source.dataset!r} gives nothing to train on: {problem}", hint="give more text, or a smaller --seq-len")
    sequences = ("input_ids", "labels") if task is Task.SEQ2SEQ_LM else ("input_ids",)
    largest = int(max(pc.max(chunk.flatten()).as_py() or 0 for name in sequences for chunk in rows.data.column(name).chunks))
    check_vocabulary(tokenizer, config, max(largest, len(tokenizer) - 1) if task is Task.MASKED_LM else largest)
    prepared = Prepared(
        directory=str(directory),
        source=source,
        task=task,
        tokenizer=name,
        trust_remote_code=workload.trust_remote_code,
        total=len(raw),
        used=len(rows),
        label_names=() if labels is None else labels.names,
        regression=labels is not None and labels.regression,
        limit=limit,
        said=columns.said(),
        digest=_digest(rows),
    )
    _check_padding(prepared, config)
    return prepared


def _labels(raw: datasets.Dataset, task: Task, column: str | None) -> Labels | None:
    if column is None or task not in LABELLED:
        return None
    return labels_of(raw, column) if task is Task.SEQUENCE_CLASSIFICATION else tags_of(raw, column)


def _check_tokenizer(tokenizer: Any, task: Task) -> None:
    if task is Task.MASKED_LM and tokenizer.mask_token is None:
        raise UserError("masked-lm needs a tokenizer with a mask token, this one has none", hint="give another with --tokenizer")
    if task is Task.TOKEN_CLASSIFICATION and not tokenizer.is_fast:
        raise UserError("token-classification needs a fast tokenizer, which knows the words of its tokens", hint="give one with --tokenizer")


def sample(rows: datasets.Dataset, columns: Sequence[tuple[str, ...]], most: int | None = None) -> datasets.Dataset:
    """At most `most` rows: drawn evenly by chance, and those of most characters, so that the longest are among them.

    Args:
        rows: all of them.
        columns: of each sequence that is made of a row, the columns of texts or words that it is made of.
        most: rows that are drawn by chance; None = `MOST_ROWS`.
    """
    most = MOST_ROWS if most is None else most
    if len(rows) <= most:
        return rows
    drawn = [np.random.default_rng(0).permutation(len(rows))[:most]]
    for names in columns:
        characters = sum(_characters(arrow_column(rows, name)) for name in names)
        drawn.append(np.argsort(-characters, kind="stable")[:LONGEST_KEPT])
    return rows.select(np.unique(np.concatenate(drawn)))


def _characters(column: Any) -> Any:
    """Of each text of an arrow column, or of each list of words in it; 0 where there is none."""
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in column.chunks:
        listed = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
        texts, rows = (chunk.flatten(), pc.list_parent_indices(chunk).to_numpy()) if listed else (chunk, np.arange(len(chunk)))
        lengths = np.zeros(len(chunk), dtype=np.int64)
        np.add.at(lengths, rows, pc.fill_null(pc.utf8_length(texts.cast(pa.large_string())), 0).to_numpy(zero_copy_only=False))
        found.append(lengths)
    return np.concatenate(found)


def _check_padding(prepared: Prepared, config: PretrainedConfig) -> None:
    positions, longest = max_positions(config), prepared.longest()
    if positions is not None and longest > positions:
        raise UserError(
            f"padded to a multiple of {prepared.source.pad_to_multiple_of}, the longest row has {longest} tokens: more than the model's {positions} positions",
            hint="use a smaller --pad-to-multiple-of, or a --seq-len that is a multiple of it",
        )


def _mapped(rows: datasets.Dataset, make: Any, path: Path) -> datasets.Dataset:
    """All rows through `make`, into one arrow file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return rows.map(
        make,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        cache_file_name=str(path),
        load_from_cache_file=False,
        new_fingerprint="autofit-tokens",  # else all of the tokenizer is pickled and hashed to make one
    )


def _list_lengths(rows: datasets.Dataset, column: str) -> Any:
    return pc.list_value_length(rows.data.column(column)).to_numpy()


def _digest(rows: datasets.Dataset) -> str:
    digest = hashlib.sha256()
    for name in ("input_ids", "labels"):
        if name in rows.column_names:
            for chunk in rows.data.column(name).chunks:
                for buffer in chunk.buffers():
                    digest.update(memoryview(buffer) if buffer is not None else b"")
    return digest.hexdigest()[:16]


def _from_json(data: Mapping[str, Any]) -> Prepared:
    kept = {**data, "source": DataSource.from_json(data["source"]), "task": Task(data["task"])}
    return Prepared(**{**kept, "label_names": tuple(data["label_names"])})


@functools.cache
def _own_scratch(pid: int) -> str:
    directory = tempfile.mkdtemp(prefix="autofit-data-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _scratch() -> str:
    """The runner's private directory; one of this process where there is no runner."""
    return os.environ.get(SCRATCH) or _own_scratch(os.getpid())
