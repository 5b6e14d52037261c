"""What all tests share: an offline hub, one thread, a cache of their own, and `gpu` tests skipped where there is no card."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import servers

# Before any library reads them; children inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "autofit",
    deadline=None,  # a shared machine stalls now and then
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autofit")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a cache directory, removed at its end; the user's own is neither read nor written."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell: children would inherit that Ctrl-C is ignored, and some tests press it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = tempfile.mkdtemp(prefix="autofit-test-cache-")
    os.environ["AUTOFIT_CACHE_DIR"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


@pytest.fixture(scope="module")
def one_server() -> Iterator[None]:
    """One fork server for all searches and questions of a module that asks for it."""
    with servers.one_server():
        yield


@pytest.hookimpl(
    trylast=True
)  # after -m and -k have taken out what will not run: torch is imported only for what is left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and say why. Files with slow tests come first, so that no process is left with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_cuda() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    """Why CUDA tests cannot run here; None when they can."""
    import torch

    if torch.version.cuda is None:
        return "no CUDA device: this torch was built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA device"
