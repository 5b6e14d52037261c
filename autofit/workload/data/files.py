"""The rows that `--dataset` names: a file, a directory saved by datasets, or a hub name in the local cache."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants

from autofit.errors import UserError
from autofit.problem.data_source import DataSource
from autofit.workload.data.columns import Kind
from autofit.workload.data.library import datasets
from autofit.workload.sources import first_line, hub_reachable

BUILDERS: Mapping[str, str] = {
    ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet",
}  # fmt: skip
HINT_FORMATS = "give a .csv, .tsv, .jsonl, .json or .parquet file, a directory saved by save_to_disk, or a hub name in the local cache"
INTEGERS = ("int", "uint", "bool")


def load_rows(source: DataSource, cache_dir: Path) -> datasets.Dataset:
    """Return the rows of the wanted split.

    Args:
        source: what is asked for.
        cache_dir: private directory for what datasets writes while it reads a file.

    Raises:
        UserError: not there, unreadable, no such split, or no rows.
    """
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors come as exceptions too
    path = Path(source.dataset).expanduser()
    if os.path.isdir(path):  # unlike Path's own, it takes names that no file can have
        rows = _directory(source, path)
    elif os.path.exists(path):
        rows = _file(source, path, cache_dir)
    elif _looks_like_path(source.dataset):
        raise UserError(f"the dataset {source.dataset!r} does not exist", hint=HINT_FORMATS)
    else:
        rows = _hub(source)
    if len(rows) == 0:
        raise _empty(source)
    return rows.with_format(None)  # a saved one may hand out tensors


def kinds_of(rows: datasets.Dataset) -> dict[str, Kind]:
    """Column -> what it holds."""
    return {name: _kind(feature) for name, feature in rows.features.items()}


def _kind(feature: Any) -> Kind:
    if isinstance(feature, datasets.ClassLabel):
        return Kind.INTEGER
    if isinstance(feature, datasets.Value):
        name = str(feature.dtype)
        if "string" in name:
            return Kind.TEXT
        if name.startswith(INTEGERS):
            return Kind.INTEGER
        return Kind.FLOAT if name.startswith(("float", "double")) else Kind.OTHER
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
    if isinstance(inner, datasets.ClassLabel | datasets.Value):
        return {Kind.TEXT: Kind.WORDS, Kind.INTEGER: Kind.TAGS}.get(_kind(inner), Kind.OTHER)
    return Kind.OTHER


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in BUILDERS


def _file(source: DataSource, path: Path, cache_dir: Path) -> datasets.Dataset:
    builder = BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise UserError(f"the format of {source.dataset!r} is not known by its name", hint=HINT_FORMATS)
    if path.stat().st_size == 0:
        raise _empty(source)
    if builder == "json":
        _refuse_no_objects(source, path)
    more = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    try:
        return datasets.load_dataset(builder, data_files=str(path), split=source.split or "train", cache_dir=str(cache_dir), **more)
    except Exception as error:  # readers of three formats raise their own types; all of them come from the file
        if "corresponds to no data" in str(error):
            raise _empty(source) from None
        cause = error.__cause__ or error
        if type(cause).__name__ == "EmptyDataError":
            raise _empty(source) from None
        if "split" in str(error).lower():
            raise UserError(f"{source.dataset!r} has no split {source.split!r}", hint="a single file is the split train") from None
        raise UserError(f"the dataset {source.dataset!r} cannot be read: {first_line(cause)}") from error


def _refuse_no_objects(source: DataSource, path: Path) -> None:
    """Check how the first value begins: the JSON reader of datasets ends the whole process at a bare `null` there."""
    with path.open("rb") as handle:
        beginning = handle.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    if beginning and beginning[:1] not in b"{[":
        raise UserError(f"the dataset {source.dataset!r} cannot be read: its first row is no JSON object", hint='each row is written as {"text": "...", "label": 0}')


def _empty(source: DataSource) -> UserError:
    return UserError(f"the dataset {source.dataset!r} is empty", hint="it needs at least one row")


def _directory(source: DataSource, path: Path) -> datasets.Dataset:
    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise UserError(f"directory {source.dataset!r} was not saved by datasets", hint=HINT_FORMATS) from None
    except Exception as error:  # arrow and JSON readers raise their own types
        if isinstance(error, IndexError) and not any(path.glob("*.arrow")):  # it was saved without a row: there is no file of rows
            raise _empty(source) from None
        raise UserError(f"the dataset {source.dataset!r} cannot be read: {first_line(error)}") from error
    return _split_of(source, {"train": found} if isinstance(found, datasets.Dataset) else found)


def _split_of(source: DataSource, found: Mapping[str, datasets.Dataset]) -> datasets.Dataset:
    if not found:
        raise _empty(source)
    name = source.split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if name in found:
        return found[name]
    try:  # a part of a split, or several of them, as files are asked for
        parts = datasets.ReadInstruction.from_spec(name).to_absolute({own: len(rows) for own, rows in found.items()})
    except (ValueError, AssertionError):  # what `ReadInstruction` raises for a name that it cannot read, or a part that is not there
        splits = ", ".join(f"{own} ({len(rows)} rows)" for own, rows in found.items())
        raise UserError(f"{source.dataset!r} has no split {name!r}", hint=f"its splits are {splits}") from None
    return datasets.concatenate_datasets([found[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _hub(source: DataSource) -> datasets.Dataset:
    name, _, config = source.dataset.partition(":")
    reachable = not huggingface_hub.constants.HF_HUB_OFFLINE and hub_reachable()
    if not reachable:  # this process answers one request: what is switched off here stays off nowhere else
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, config or None, split=source.split or "train")
    except Exception as error:  # the hub's client and the builders raise many types
        if "split" in str(error).lower():
            raise UserError(f"{name!r} has no split {source.split or 'train'!r}", hint="name one with --split") from None
        where = "" if reachable else " and the hub cannot be reached"
        raise UserError(f"the dataset {name!r} is neither a path nor in the local cache{where}: {first_line(error)}", hint=HINT_FORMATS) from None
