"""The tokenizer of a training: the model's own, or the one that was named; never downloaded where there is no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from autofit.errors import UserError
from autofit.workload.sources import first_line, hub_reachable

#: a directory with none of these has no tokenizer: transformers would make an empty one without a word
FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model", "tokenizer_config.json")
NO_LIMIT = 1 << 24  #: `model_max_length` above this means that the tokenizer does not say


def load_tokenizer(name: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer that `name` stands for, with a padding token.

    Args:
        name: directory, `tokenizer.json` file, or a name in the hub's cache (or on the hub, where it can be reached).

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = Path(name).expanduser()
    hint = "name a directory or a tokenizer.json with --tokenizer"
    if os.path.isdir(path) and not any((path / file).is_file() for file in FILES):
        raise UserError(f"no tokenizer in directory {name!r}", hint=hint)
    try:
        if os.path.isfile(path) and path.name == "config.json":
            tokenizer = _pretrained(str(path.parent), trust_remote_code=trust_remote_code)
        elif os.path.isfile(path):
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = _pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers of a hundred models raise what they like; all of it comes from these files
        where = "" if os.path.exists(path) else " here (it is not in the local cache, and names of presets have none)"
        raise UserError(f"no tokenizer for {name!r}{where}: {first_line(error)}", hint=hint) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _pretrained(name: str, *, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:  # whatever it is: not in the cache, perhaps; where the hub cannot help either, it is the answer, as it came
        if os.path.exists(name) or not hub_reachable():
            raise
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def longest_allowed(tokenizer: Any, asked: int | None, positions: int | None) -> int | None:
    """Tokens after which texts are cut: as asked, else the tokenizer's and the model's maximum; None = never."""
    if asked is not None:
        return asked
    own = getattr(tokenizer, "model_max_length", None)
    known = [n for n in (own if isinstance(own, int) and own < NO_LIMIT else None, positions) if n is not None]
    return min(known) if known else None


def check_room(tokenizer: Any, limit: int | None, *, pair: bool) -> None:
    """Raise UserError when the tokens that go around every text leave no room for text: tokenizers then do not cut at all.

    Args:
        limit: tokens after which texts are cut; None = never.
        pair: whether a row is two texts.
    """
    around = tokenizer.num_special_tokens_to_add(pair=pair)
    if limit is not None and limit <= around:
        least = around + (2 if pair else 1)
        raise UserError(
            f"texts cannot be cut to {limit} token{'s' if limit > 1 else ''}: the tokenizer puts {around} around each", hint=f"use --seq-len {least} or more"
        )


def check_vocabulary(tokenizer: Any, config: PretrainedConfig, largest: int) -> None:
    """Raise UserError when the tokenizer makes tokens that the model does not have.

    Args:
        largest: the largest token number in the data.
    """
    known = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(known, int) and largest >= known:
        raise UserError(
            f"the tokenizer makes token {largest}, the model has {known} tokens only",
            hint="give the tokenizer that belongs to the model with --tokenizer",
        )
