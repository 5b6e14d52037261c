"""What the fork server imports must not start CUDA: peft, where it is installed, brings bitsandbytes, which asks the card."""

from __future__ import annotations

import json
import subprocess
import sys

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
