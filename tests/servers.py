"""One fork server for all searches of a test module: its imports cost seconds, and what is tested runs in the children that it forks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from autofit.processes.launch import ForkserverLauncher
from autofit.processes.protocol import SCRATCH


@contextlib.contextmanager
def one_server() -> Iterator[None]:
    """Have every `ProcessRunner` in the block use one fork server, which ends with the block."""
    kept: list[ForkserverLauncher] = []
    with tempfile.TemporaryDirectory(prefix="autofit-test-server-") as scratch, pytest.MonkeyPatch.context() as patch:

        class Kept(ForkserverLauncher):
            def __new__(cls, environment: Mapping[str, str]) -> Kept:
                return kept[0] if kept else super().__new__(cls)  # type: ignore[return-value]

            def __init__(self, environment: Mapping[str, str]) -> None:
                if not kept:
                    super().__init__({**environment, SCRATCH: str(Path(scratch))})
                    kept.append(self)

            def close(self) -> None:
                """Stay for the next search."""

        patch.setattr("autofit.processes.process.ForkserverLauncher", Kept)
        try:
            yield
        finally:
            for server in kept:
                ForkserverLauncher.close(server)
