"""`autofit doctor`: how its lines are laid out; what they say is in `test_search_command.py`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autofit.cli.doctor import INDENT, command

FACT = "presets     " + ", ".join(f"model-{number}" for number in range(40))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_fact_is_folded_on_a_terminal_and_one_line_in_a_file(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autofit.search.examination.examine", lambda device: iter([FACT]))
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=io.StringIO(), width=80, force_terminal=terminal))
    command.main([], standalone_mode=False)
    first, *rest = capsys.readouterr().out.splitlines()
    if not terminal:
        assert ([first], rest) == ([FACT], [])
        return
    assert " ".join([first, *(line.strip() for line in rest)]) == FACT
    assert rest
    assert all(line.startswith(INDENT) and len(line) <= 80 for line in rest)
