"""Where a script's TrainingArguments come from, read off the parsers that are at work while they are made: transformers' own, and TRL's copy of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any


class Origin(StrEnum):
    """Where a script's TrainingArguments come from."""

    FLAGS = "flags"  #: HfArgumentParser on the command line
    FILE = "file"  #: HfArgumentParser on a JSON or YAML file, or on a dict that was read from one
    CODE = "code"  #: a call in the code


#: methods of HfArgumentParser
PARSERS = ("parse_args_into_dataclasses", "parse_json_file", "parse_yaml_file", "parse_dict")
FILES = (".json", ".yaml", ".yml")


def origin_of(frame: FrameType | None, typed: Sequence[str]) -> Origin:
    """The origin of what is made in `frame`: by the outermost parser below which it runs (those of files hand on to that of a dict).

    Args:
        frame: where a TrainingArguments is made.
        typed: the words of the script's command line, whatever its code has made of `sys.argv`.
    """
    found = None
    while frame is not None:
        if frame.f_code.co_name in PARSERS and isinstance(frame.f_locals.get("self"), argparse.ArgumentParser):
            found = frame
        frame = frame.f_back
    if found is None:
        return Origin.CODE
    parser, given = found.f_locals["self"], found.f_locals.get("args")
    if found.f_code.co_name == "parse_args_into_dataclasses":
        return Origin.FLAGS if _of_command_line(parser, given, typed) else Origin.CODE
    if found.f_code.co_name == "parse_dict":
        return Origin.FILE if isinstance(given, Mapping) and _of_file(given) else Origin.CODE
    return Origin.FILE


def _of_command_line(parser: Any, given: Sequence[str] | None, typed: Sequence[str]) -> bool:
    """Whether a list for a parser (None: `sys.argv`) is what was typed: without what another parser has taken, or behind what a file of arguments or
    the code says, so that flags at the end have the last word.

    An empty list says nothing: it is the command line where TRL's parser hands it on.
    """
    current = sys.argv[1:]
    if given is not None and not given:
        return not current and type(parser).__module__.startswith("trl.")
    given, words = current if given is None else given, iter(typed)
    return all(word in words for word in given) or (bool(typed) and list(given[-len(typed) :]) == list(typed))


def _of_file(given: Mapping[str, Any]) -> bool:
    """Whether a file that the command line names holds all the names of a dict."""
    for word in sys.argv[1:]:
        path = Path(word.rpartition("=")[2])
        if given and path.suffix in FILES and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if all(str(name) in text for name in given):
                return True
    return False
