"""What a child reports of the packages that it finds."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from autofit.workload import describe


class Loaded:
    """As bitsandbytes' own: every name is a function."""

    def __getattr__(self, name: str) -> object:
        return lambda: None


@pytest.mark.parametrize(
    ("lib", "said"),
    [
        (Loaded(), None),
        (SimpleNamespace(error_msg="/opt/x/libbitsandbytes_cuda130.so: undefined symbol: f\nmore"), "without its native library (libbitsandbytes_cuda130.so: undefined symbol: f)"),
    ],
    ids=["loaded", "not loaded"],
)
def test_a_bitsandbytes_whose_own_library_did_not_load_cannot_be_used_on_a_card(lib: object, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__spec__=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", SimpleNamespace(lib=lib))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe.missing_packages().get("bitsandbytes") == said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "bitsandbytes" not in describe.missing_packages()
