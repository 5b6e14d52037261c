"""What the fork server imports must not start CUDA (peft, where it is installed, brings bitsandbytes, which asks the card), nor end the server;
and a server that breaks leaves its parent's files alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

#: imports bitsandbytes, as peft does and the Trainer through it, on a machine that looks as if it had a card, and says whether CUDA would have been started
PROBE = """
import json, sys
import torch
started = []
torch.cuda._lazy_init = lambda: started.append(True)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.version.cuda = "12.8"
torch._C._cuda_getCurrentRawStream = lambda index: 0  # not in CPU builds
from autofit.children.forkserver import without_cuda
original = torch.cuda.get_device_capability
asked = []
with without_cuda():
    answer = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: asked.append(device) or answer(device)
    import bitsandbytes
restored = torch.cuda.get_device_capability is original
print(json.dumps({"started": bool(started), "asked": bool(asked), "restored": restored}))
"""


@pytest.mark.slow
def test_importing_bitsandbytes_does_not_start_cuda() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # "asked" is why the guard is there: it can go when bitsandbytes asks no card any more
    assert json.loads(done.stdout.splitlines()[-1]) == {"started": False, "asked": True, "restored": True}


#: serves on the descriptor given, without the libraries
SERVE = "import socket, sys; from autofit.children.forkserver import _serve; _serve(socket.socket(fileno=int(sys.argv[1])))"


def _serve(messages: list[bytes], path: Path) -> tuple[int, str]:
    """A server that finds modules in `path` gets `messages`; its status when the parent has closed its end, and what it said last."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {SERVE}", str(theirs.fileno())]
    with ours, theirs:
        for message in messages:
            ours.send(message)
        ours.shutdown(socket.SHUT_WR)
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_module_that_cannot_be_imported_beforehand_does_not_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "breaks_when_imported.py").write_text("raise RuntimeError('needs a card')")
    (tmp_path / "comes_after.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    status, said = _serve([json.dumps({"import": ["breaks_when_imported", "comes_after"]}).encode()], tmp_path)
    assert (status, said) == (0, "")
    assert (tmp_path / "imported").exists()


def test_the_parents_directories_go_with_the_parent_and_not_with_a_server_that_breaks(tmp_path: Path) -> None:
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    for directory in (kept, removed):
        directory.mkdir()
    status, said = _serve([json.dumps({"remove": [str(kept)]}).encode(), b"no message"], tmp_path)
    assert status == 1
    assert "JSONDecodeError" in said
    assert kept.exists()
    assert _serve([json.dumps({"remove": [str(removed)]}).encode()], tmp_path) == (0, "")
    assert not removed.exists()
