"""What a child said of a model, kept on disk, so that a second question about it starts no child.

The key holds all that the answer depends on: the words of the question, the versions, and for a local model the bytes of its config. A hub name is
believed for a day.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.errors import UserError
from autofit.files import write_json
from autofit.forecasts.laws import versions
from autofit.memory.cache import cache_directory
from autofit.memory.formula import ModelShape
from autofit.problem.spec import Workload

BELIEVED_SECONDS = 86400.0


def load_facts(workload: Workload) -> dict[str, Any] | None:
    """The facts kept for `workload`; None when there are none, or they are too old."""
    path = _path(workload)
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        if not 0 <= time.time() - entry["time"] < BELIEVED_SECONDS:
            return None
        facts: dict[str, Any] = entry["facts"]
        return facts if isinstance(facts, dict) and "digest" in facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or not ours: the child will say it again


def store_facts(workload: Workload, facts: dict[str, Any]) -> None:
    """Keep `facts`; a cache that cannot be written is no error."""
    if workload.objects_path is not None or workload.data is not None:  # what the files hold is not in the key
        return
    path = _path(workload)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"time": time.time(), "facts": facts})
    except (OSError, UserError):
        return


def shape_of(facts: Mapping[str, Any]) -> ModelShape:
    """What the closed formula wants to know of a model."""
    return ModelShape(
        n_params=facts["n_params"],
        n_trainable=facts.get("n_trainable_params"),
        hidden_size=facts.get("hidden_size"),
        layers=facts.get("num_layers"),
        heads=facts.get("num_heads"),
        vocab_size=facts.get("vocab_size") if str(facts.get("task", "")).endswith("-lm") else None,
        seq_len=facts.get("positions") or facts.get("seq_len"),
        adapter=facts.get("adapter") is not None,
        quantised_bytes=facts.get("weights_bytes") if facts.get("quantization") else None,
        n_quantised=facts.get("n_quantised") or 0,
        convolutions=facts.get("positions") is not None,
    )


def _path(workload: Workload) -> Path:
    source = Path(workload.model)
    config = source / "config.json" if source.is_dir() else source
    content = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
    key = json.dumps([workload.to_json(), versions(), content], sort_keys=True)
    return cache_directory() / "models" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
