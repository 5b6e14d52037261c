"""Laws on disk, so that a second question about the same model is answered at once.

A key is a digest of all that a law depends on; a law says nothing about the card's size or the number of samples. An
entry is one compressed JSON document, written in one step. An entry that cannot be read counts as missing and is
overwritten by the next; a cache that cannot be written is no error, only slow.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autofit.errors import FileFormatError
from autofit.memory.law import MemoryLaw
from autofit.memory.roofline import CostLaw

VERSION = 1
DIRECTORY_VARIABLE = "AUTOFIT_CACHE_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class LawKey:
    """All that a law depends on.

    Attributes:
        model: the model's configuration, or a digest of the object.
        task: the auto class, in kebab case.
        seq_len: tokens per sample.
        precision, optim: as in `TrialConfig`.
        checkpointing: how activations are recomputed (`off`, `on`, `reentrant`, ...).
        attention: the implementation that was asked for, and the one that was chosen.
        compute_capability: of the card that the trace pretends to run on.
        padded: whether batches carry padding.
        accumulates: whether there is more than one micro-step per update.
        versions: of torch, transformers and whatever else decides what a step does.
        extra: further arguments that change a step, as JSON.
    """

    model: str | Mapping[str, Any]
    task: str | None
    seq_len: int | None
    precision: str
    optim: str
    checkpointing: str
    attention: str | None
    compute_capability: str | None
    padded: bool
    accumulates: bool
    versions: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """A name for the entry: equal keys, and only those, have equal digests."""
        facts = {"format": VERSION, **asdict(self)}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLaws:
    """What is kept for one configuration: its memory, and its work where that was recorded."""

    memory: MemoryLaw
    cost: CostLaw | None = None


def cache_directory() -> Path:
    """`AUTOFIT_CACHE_DIR`, else `autofit` in the user's cache directory (XDG)."""
    own = os.environ.get(DIRECTORY_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "autofit"


def load_laws(key: LawKey) -> CachedLaws | None:
    """The laws kept under `key`; None when there are none that can be read."""
    try:
        with gzip.open(_path(key), "rt", encoding="utf-8") as handle:
            data = json.load(handle)
        cost = data["cost"]
        return CachedLaws(
            memory=MemoryLaw.from_json(data["memory"]), cost=None if cost is None else CostLaw.from_json(cost)
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, FileFormatError, zlib.error):
        return None  # absent, cut short, of another version, or not ours: all the same to the caller


def store_laws(key: LawKey, laws: CachedLaws) -> bool:
    """Keep `laws` under `key`, in place of what was there; False when the directory cannot be written."""
    data = {"memory": laws.memory.to_json(), "cost": None if laws.cost is None else laws.cost.to_json()}
    text = json.dumps(data, separators=(",", ":"))
    path, temporary = _path(key), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".law.", delete=False) as handle:
            temporary = handle.name
            handle.write(gzip.compress(text.encode(), compresslevel=1))
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def _path(key: LawKey) -> Path:
    return cache_directory() / "laws" / f"{key.digest()}.json.gz"
