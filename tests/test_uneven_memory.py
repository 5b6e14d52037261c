"""A dataset from 5 tokens to the model's maximum under a memory limit: the winner survives an epoch whose worst batch comes last, a probe at the mean does not."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import BertConfig

from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile
from autofit.processes.process import ProcessRunner
from autofit.search.tuning import tune
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Outcome, Reason
from autofit.units import MIB
from tests.uneven import OwnLoader, Sentences, pad

pytestmark = pytest.mark.usefixtures("one_server")

EFFECTIVE, LONGEST = 16, 512
LIMIT = 260 * MIB  #: 16 rows of 512 tokens take about 400 MiB, 4 take about 150, 16 of mean length less than 100; a CPU limit is lax by tens of MiB
MODEL = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, max_position_embeddings=LONGEST
)
#: ascending, so that whoever reads them in order meets the worst batch last
LENGTHS = sorted([5 + (i * 17) % 60 for i in range(48 - EFFECTIVE)] + [LONGEST - 12 * i for i in range(EFFECTIVE)])
MEAN = round(statistics.fmean(LENGTHS))


class Plain:
    """A loader with nothing but batches: no longest batch can be put in front."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class InOrder(OwnLoader):
    """Reads the rows in order, as they are."""

    def get_train_dataloader(self) -> Any:
        return Plain(super().get_train_dataloader())


@contextlib.contextmanager
def runner_of(lengths: list[int], **more: Any) -> Iterator[ProcessRunner]:
    """Runs trainings on rows of these lengths."""
    with ObjectFile({"config": MODEL, "train_dataset": Sentences(lengths), "data_collator": pad, **more}) as file:
        workload = Workload(model="<tiny>", task="sequence-classification", objects_path=file.path)
        with ProcessRunner(workload, "cpu") as runner:
            yield runner


def epoch(runner: ProcessRunner, config: TrialConfig) -> TrialResult:
    """A whole epoch under the limit."""
    steps = len(LENGTHS) // EFFECTIVE
    return runner.run(TrialRequest(config=config, memory_limit_bytes=LIMIT, optimizer_steps=steps, full_length=True))


@pytest.mark.slow
def test_the_winner_survives_the_worst_batch_and_a_probe_at_the_mean_length_would_not_have() -> None:
    greedy = TrialConfig(per_device_train_batch_size=EFFECTIVE)
    with runner_of([MEAN] * 64) as at_the_mean:
        probed = at_the_mean.run(TrialRequest(config=greedy, memory_limit_bytes=LIMIT))
    assert probed.outcome is Outcome.COMPLETED, "a tuner that probes at the mean length takes it"

    result = tune(
        MODEL, task="sequence-classification", train_dataset=Sentences(LENGTHS), data_collator=pad, effective_batch=EFFECTIVE,
        device="cpu", memory=LIMIT, precision="fp32", optim="adamw_torch_fused", checkpointing=False, batch_size=(4, EFFECTIVE),
    )  # fmt: skip
    assert result.best.config.per_device_train_batch_size == 4
    assert result.confirmed
    greedy_runs = [r for r in result.trials if r.config == greedy]
    assert greedy_runs, "it did not fit, or needs at least as much as one that did not"
    assert [r for r in greedy_runs if r.outcome not in (Outcome.INFEASIBLE, Outcome.SKIPPED)] == []

    with runner_of(LENGTHS, trainer_cls=InOrder) as in_order:
        failed, survived = epoch(in_order, greedy), epoch(in_order, result.best.config)
    assert failed.outcome is Outcome.INFEASIBLE
    assert failed.failure is not None
    assert failed.failure.reason in (Reason.OUT_OF_MEMORY, Reason.SUSPECTED_OUT_OF_MEMORY)
    assert survived.outcome is Outcome.COMPLETED, survived.failure
    assert survived.measurement is not None
    assert (survived.measurement.facts or {})["data"]["measured_longest"] == LONGEST, "the worst batch was in it"

    assert result.data["memory_decided_by"] == {"length": LONGEST, "unit": "tokens", "shown": True}
    for record in result.trials:
        if record.measurement is not None:
            facts = (record.measurement.facts or {})["data"]
            assert facts["prelude_steps"] >= 2, record.role
            assert facts["prelude_longest"] == LONGEST, record.role
