"""The smallest real search, and what it must leave as it was."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import optuna
import torch
from transformers import BertConfig

#: one configuration, so that a search is two or three trials: defaults, the hand's half precision, confirmation
ONE: dict[str, Any] = {
    "effective_batch": 4,
    "batch_size": 4,
    "device": "cpu",
    "memory": "2GiB",
    "precision": "fp32",
    "optim": "adamw_torch_fused",
    "checkpointing": False,
}
TINY = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)


def global_state() -> dict[str, Any]:
    """What a library call must not change."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tobytes(),
        "random": random.getstate(),
        "threads of torch": (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()),
        "environment": dict(os.environ),
        "signals": [
            signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
        ],
        "wake-up": _wakeup_fd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "directory": os.getcwd(),
        "warnings": list(warnings.filters),
        "logging": (list(logging.root.handlers), logging.root.level, optuna.logging.get_verbosity()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        "umask": _umask(),
    }


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def warm_up() -> None:
    """Import what a first call imports."""
    import autofit.forecasts.estimation
    import autofit.processes.objects
    import autofit.study.journal
    import autofit.study.sampler  # noqa: F401

    optuna.create_study().ask()
