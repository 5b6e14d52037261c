"""Out of memory on purpose, at every place of a training where it can happen: exact exception, and what the allocator is like afterwards.

Each case runs in a child forked from a process that has only imported, so that none sees what another left behind.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autofit.children.forkserver import without_cuda
from autofit.problem.config import TrialConfig
from autofit.processes.failure import describe_exception
from autofit.trials.runner import TrialRequest
from benchmarks.evidence.inside.attempt import in_child, judged, raised_by
from benchmarks.evidence.inside.counters import counters, driver_used_bytes
from benchmarks.evidence.inside.line import Report, serve

with without_cuda():  # transformers' imports may start CUDA, and then no fork could use it
    from autofit.workload.clock import StepClock, Window
    from autofit.workload.limits import meter_for
    from autofit.workload.subject import Subject
    from autofit.workload.trial import make_trainer, trial_arguments

HUGE, BEYOND_ANY_CARD = 1 << 34, 1 << 40  #: elements of fp32: 64 GiB and 4 TiB
PIECE = 16 << 20  #: elements of fp32 (64 MiB) of the case that fills the limit bit by bit
WIDTH = 6912  #: of the linear layer: 182 MiB of weights; second gradients (three times that) fit into the limit, moments (four times) do not
CASES = ("forward", "backward", "update", "second micro-step", "evaluation", "bit by bit", "beyond the card")
PLACES = {"second micro-step": 2}  #: forward passes before the one that fails, counted from 1


class Rows(Dataset[Any]):
    """Rows of ones."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(self._width), "labels": torch.tensor(0.0)}


class _GreedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.ones(HUGE, device=gradient.device).sum()


class Greedy(nn.Module):
    """One linear layer that asks for too much at the place named."""

    def __init__(self, place: str) -> None:
        super().__init__()
        width = WIDTH if place == "update" else 64
        self.layer = nn.Linear(width, width)
        self.place, self.calls = place, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of the layer's output, in `{"loss": scalar}`."""
        self.calls += 1
        hidden = self.layer(x)
        if self.place == "backward":
            hidden = _GreedyBackward.apply(hidden)
        if self._now():
            hidden = hidden + self._take(hidden.device)
        return {"loss": (hidden.mean(dim=1) - labels).square().mean()}

    def _now(self) -> bool:
        if self.place == "evaluation":
            return not self.training
        if self.place in ("forward", "bit by bit", "beyond the card"):
            return True
        return self.calls == PLACES.get(self.place, 0)

    def _take(self, device: torch.device) -> torch.Tensor:
        if self.place != "bit by bit":
            return torch.ones(
                BEYOND_ANY_CARD if self.place == "beyond the card" else HUGE, device=device
            ).sum()
        kept = []
        while True:
            kept.append(torch.ones(PIECE, device=device))


def main(order: Mapping[str, Any], report: Report) -> None:
    """Run every case of `order["cases"]`, each at most `order["seconds"]` long."""
    for case in order["cases"]:
        status = in_child(partial(provoke, case, order, report), order["seconds"])
        if status != 0:
            report(case=case, died=status)


def provoke(case: str, order: Mapping[str, Any], report: Report) -> None:
    """One case, in this process."""
    device, used_before = order["device"], driver_used_bytes()
    meter = meter_for(device, context_bytes=order["context_bytes"])
    limit = None if case == "beyond the card" else order["limit_bytes"]
    meter.limit(limit)
    phases: list[str] = []
    model = Greedy(case).to("cpu" if device == "cpu" else "cuda:0")
    error = raised_by(lambda: train(model, phases, evaluate=case == "evaluation", cpu=device == "cpu"))
    _lift()
    at_failure = counters(used_before)
    finding: dict[str, Any] = {
        "case": case,
        "limit_bytes": limit,
        "phase": phases[-1] if phases else None,
        "at_failure": at_failure,
    }
    if error is None:
        report(**finding, error=None)
        return
    described = describe_exception(error, phase=finding["phase"])
    finding |= judged(described, limit_set=limit is not None, device=device) | {
        "after_release": {},
        "usable": None,
    }
    del error
    model.zero_grad()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    finding["after_release"] = counters(used_before)
    finding["usable"] = usable(model)
    report(**finding)


def train(model: nn.Module, phases: list[str], *, evaluate: bool, cpu: bool) -> None:
    """Two optimizer steps of the real Trainer at accumulation 2, then an evaluation if asked."""
    request = TrialRequest(
        config=TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2), optimizer_steps=2
    )
    width = model.layer.in_features  # type: ignore[union-attr]
    subject = Subject(model=model, dataset=lambda size, seed: Rows(int(width)))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="evidence-") as directory:
        trainer = make_trainer(subject, trial_arguments({}, request, output_dir=directory, cpu=cpu), request)
        StepClock(Window(optimizer_steps=2), enter=phases.append, on_warm=lambda: None).attach(trainer)
        trainer.train()
        if evaluate:
            phases.append("evaluation")
            trainer.evaluate(Rows(int(width)))  # type: ignore[arg-type]


def usable(model: nn.Module) -> bool:
    """Whether the process can still compute with what it has."""

    def multiply() -> None:
        weight = next(model.parameters())
        (torch.ones(8, weight.shape[1], device=weight.device) @ weight.T).sum().item()

    return raised_by(multiply) is None


def _lift() -> None:
    """Take back the soft limits of a CPU run, so that the report can be written."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


if __name__ == "__main__":
    serve(main)
