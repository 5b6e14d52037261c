"""Small live models and data for tests that run real trials: they travel to children by import path."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

MIB = 1 << 20


class Rows(Dataset[Any]):
    """`length` rows `{"x": (width,) float32, "labels": scalar}`."""

    def __init__(self, length: int = 64, width: int = 16) -> None:
        self._length, self._width = length, width

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(self._width), "labels": torch.tensor(0.0)}


class Straight(nn.Module):
    """One linear layer and a squared error; the base of the misbehaving ones below."""

    def __init__(self, width: int = 16, hidden: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(width, hidden)
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        hidden = self.trouble(self.layer(x))
        return {"loss": (hidden.mean(dim=1) - labels).square().mean()}

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        """What subclasses do wrong."""
        return hidden


class HugeForward(Straight):
    """Allocates far beyond any limit in forward."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.ones(1 << 34, device=hidden.device).sum()


class HugeSecondForward(Straight):
    """Allocates far beyond any limit in the second micro-step only."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.ones(1 << 34, device=hidden.device).sum() if self.calls == 2 else hidden


class _HugeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.ones(1 << 34, device=gradient.device).sum()


class HugeBackward(Straight):
    """Allocates far beyond any limit in backward."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _HugeBackward.apply(hidden)
        return result


class Killed(Straight):
    """Ends as the kernel's out-of-memory killer ends a process."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return hidden


class Buggy(Straight):
    """Raises something that is not out of memory."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        raise ValueError("the label encoder was fitted on other classes")


class Exits(Straight):
    """Ends the process behind Python's back."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        os._exit(41)


class Hangs(Straight):
    """Never comes back."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(600)
        return hidden


class NotANumber(Straight):
    """Its loss is not finite."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float("nan")


class Chatty(Straight):
    """Prints what looks like a protocol, on both outputs."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        print('{"event": "answer", "protocol": 1, "payload": {}}', flush=True)
        return hidden


class Sleepy(Straight):
    """Takes `micro_seconds` per forward, whatever the machine does."""

    def __init__(self, micro_seconds: float = 0.02) -> None:
        super().__init__()
        self.micro_seconds = micro_seconds

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(self.micro_seconds)
        return hidden
