"""`--help` lists every option once, under a heading."""

from __future__ import annotations

import importlib

import click
import pytest
from click.testing import CliRunner

from autofit.cli.sections import OTHERS, SECTIONS, SectionedCommand


@pytest.mark.parametrize("name", ["search", "estimate", "landscape"])
def test_every_option_is_listed_once(name: str) -> None:
    command = importlib.import_module(f"autofit.cli.{name}").command
    text = CliRunner().invoke(command, ["--help"]).output
    for option in (p for p in command.params if isinstance(p, click.Option)):
        assert text.count(f"  {option.opts[0]} ") == 1, option.opts
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [title for title in (*SECTIONS, OTHERS) if title in headings]


def test_only_help_has_no_heading_of_its_own() -> None:
    command = importlib.import_module("autofit.cli.search").command
    assert isinstance(command, SectionedCommand)
    known = {name for names in SECTIONS.values() for name in names}
    assert {p.name for p in command.params if isinstance(p, click.Option)} <= known
