"""Children get the user's environment with one card visible; a server that cannot start says why."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.children.forkserver import MESSAGE_BYTES
from autofit.errors import UserError, WorkerError
from autofit.processes.child_environment import QUIET, child_environment, visible_device
from autofit.processes.launch import ForkserverLauncher
from tests.refusals import refused

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
names = st.text(st.characters(categories=["Lu"]), max_size=8).map("MY_{}".format)
environments = st.dictionaries(names, st.text(max_size=8), max_size=5)


@given(environments, st.sampled_from(("cpu", "cuda:0", "cuda:1")))
def test_what_is_not_ours_reaches_the_child_unchanged(environ: dict[str, str], device: str) -> None:
    before = dict(environ)
    found = child_environment(device, environ)
    ours = {"OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TOKENIZERS_PARALLELISM"}
    ours |= {"PYTORCH_NVML_BASED_CUDA_CHECK", *QUIET}
    assert {k: v for k, v in found.items() if k not in ours} == environ
    assert set(found) - set(environ) <= ours
    assert environ == before


def test_a_cpu_trial_sees_no_card_and_does_not_spin() -> None:
    found = child_environment("cpu", {"CUDA_VISIBLE_DEVICES": "0"})
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_WAIT_POLICY"]) == ("", "PASSIVE")
    assert child_environment("cpu", {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_card_trial_sees_its_card_only_in_the_drivers_order() -> None:
    found = child_environment("cuda:1", {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("3", "PCI_BUS_ID")
    assert "OMP_WAIT_POLICY" not in found
    kept = child_environment("cuda:0", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert kept["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_trial_is_no_rank_of_a_launcher_and_reports_to_nobody() -> None:
    found = child_environment("cuda:0", dict.fromkeys(RANKS, "1"))
    assert not set(RANKS) & set(found)
    assert found["WANDB_DISABLED"] == "true"


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda:0", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda", None, "0"),
        ("cuda:1", "4,5", "5"),
        ("cuda:0", " GPU-8a3f , GPU-9b ", "GPU-8a3f"),
    ],
)
def test_a_card_is_counted_among_the_visible_ones(device: str, visible: str | None, name: str) -> None:
    assert visible_device(device, visible) == name


@pytest.mark.parametrize(("device", "visible"), [("cuda:0", ""), ("cuda:2", "4")])
def test_a_card_that_the_user_hid_stays_hidden(device: str, visible: str) -> None:
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES") as caught:
        visible_device(device, visible)
    assert caught.value.hint is not None


def _with_torch(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_libraries_that_cannot_be_imported_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_torch("raise ImportError('libcudart.so.12: cannot open')", tmp_path, monkeypatch)
    launcher = ForkserverLauncher({})
    try:
        with refused(
            r'^the libraries cannot be imported: ImportError: libcudart.so.12: cannot open \(File ".*torch.py", line 1, in <module>\)$',
            hint="autofit doctor",
            kind=WorkerError,
        ) as caught:
            launcher.wait_ready()
        assert "Traceback" in caught.value.__notes__[0], "Python callers see where it came from"
    finally:
        launcher.close()


def test_imports_that_never_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_torch("import time; time.sleep(60)", tmp_path, monkeypatch)
    launcher = ForkserverLauncher({})
    try:
        with refused("^the fork server did not finish its imports in 0 s$", kind=WorkerError):
            launcher.wait_ready(timeout=0.3)
    finally:
        launcher.close()
        launcher.close()


def test_a_server_that_dies_is_said_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_torch("import os; os._exit(7)", tmp_path, monkeypatch)
    launcher = ForkserverLauncher({})
    try:
        with refused("^the fork server ended with status 7$", kind=WorkerError):
            launcher.wait_ready()
    finally:
        launcher.close()


def test_any_number_of_modules_is_asked_for_in_whole_messages() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    names = [f"transformers.models.model_{number}.modeling_model_{number}" for number in range(1_500)]
    launcher = object.__new__(ForkserverLauncher)
    launcher._control = ours
    with ours, theirs:
        launcher.preload(names)
        ours.shutdown(socket.SHUT_WR)
        received: list[str] = []
        while data := theirs.recv(MESSAGE_BYTES):
            received += json.loads(data)["import"]
    assert received == names
