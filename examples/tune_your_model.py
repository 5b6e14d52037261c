"""Your own nn.Module and your own dataset: trials train copies in their own processes, your objects are not touched.

    python examples/tune_your_model.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

import autofit


class TwoLayers(nn.Module):
    """A regression model that returns its loss, as the Trainer expects."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)}


class Points(Dataset):
    """Random points; the target is their sum."""

    def __init__(self, rows: int = 256, width: int = 64) -> None:
        self.x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum()}


result = autofit.tune(TwoLayers(), effective_batch=32, train_dataset=Points(), optim="adamw_torch_fused,adafactor", trials=6, timeout="45s")
print(f"fastest: {result.best.config.label()}")
print(f"arguments to write down: {result.arguments}")
