"""What tells one model from another: digests of a config's values, of a live module's parameters, and of what is put on them."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from transformers import PretrainedConfig

from autofit.problem.adaptation import Adaptation

#: config fields that say where a config came from, not what model it makes
_NOT_IDENTITY = ("transformers_version", "_name_or_path", "dtype", "use_cache", "architectures")


def config_digest(config: PretrainedConfig, adaptation: Adaptation | None = None) -> str:
    """Of the model that a config makes."""
    return _adapted(digest_of(_values(config)), adaptation)


def module_digest(model: torch.nn.Module, adaptation: Adaptation | None = None) -> str:
    """Of a live module: its class, its parameters' names, shapes, dtypes, and which of them are frozen, and its config where it has one."""
    shapes = [
        (name, tuple(p.shape), str(p.dtype), *(() if p.requires_grad else ("frozen",))) for name, p in model.named_parameters()
    ]
    config = getattr(model, "config", None)
    values = [_values(config)] if isinstance(config, PretrainedConfig) else []
    return _adapted(digest_of([type(model).__name__, shapes, *values]), adaptation)


def _values(config: PretrainedConfig) -> Any:
    """What of a config decides about its model; the attention where one is chosen, which `to_dict` leaves out."""
    values = {k: v for k, v in config.to_dict().items() if k not in _NOT_IDENTITY}
    attention = config._attn_implementation
    return json_able(values if attention is None else {**values, "attn_implementation": attention})


def json_able(value: Any) -> Any:
    """`value` through JSON and back; what JSON does not know as its text, the same in every process, and without keys that it does not know."""
    return json.loads(json.dumps(value, default=_text, sort_keys=False, skipkeys=True))


def _text(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(str(_text(item)) for item in value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _adapted(digest: str, adaptation: Adaptation | None) -> str:
    return digest if adaptation is None else digest_of([digest, adaptation.to_json()])


def digest_of(value: Any) -> str:
    """Of anything that JSON knows."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
