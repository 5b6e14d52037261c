"""What only a CUDA device can show of the wider space and of soundness: compiled, offloaded and flash trials, and 16 bit against fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import Kind
from autofit.results.checking import CheckOrder, forms_for, summary, unsound_precision
from autofit.trials.runner import TrialRequest
from autofit.trials.soundness import departure_bound
from autofit.trials.trial import Outcome
from tests.servers import one_server

pytestmark = pytest.mark.gpu
BF16 = TrialConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, precision=Precision.BF16)
CHECKPOINTED = BF16.but(gradient_checkpointing=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    with one_server(), ProcessRunner(Workload(model="gpt2", seq_len=128), "cuda:0") as runner:
        runner.context_bytes = runner.describe()["device"]["context_bytes"]
        yield runner


@pytest.fixture(scope="module")
def knobs(runner: ProcessRunner) -> dict[str, Any]:
    extras: dict[str, Any] = runner.describe()["model"]["extras"]
    return extras


@pytest.fixture
def run(runner: ProcessRunner) -> Callable[[TrialConfig], Any]:
    def run_one(config: TrialConfig) -> Any:
        result = runner.run(TrialRequest(config=config, timeout_seconds=400, window_seconds=0.5))
        assert result.outcome is Outcome.COMPLETED, result.failure
        assert result.measurement is not None
        assert result.measurement.facts["asked"] == result.measurement.facts["seen"]
        return result.measurement

    return run_one


@pytest.mark.parametrize(
    ("knob", "config"),
    [
        ("compile", BF16.but(extra=(("torch_compile", True),))),
        ("offload", CHECKPOINTED.but(extra=(("offload", True),))),
        ("every_n_layers", CHECKPOINTED.but(extra=(("every_n_layers", 2),))),
        ("liger", BF16.but(extra=(("use_liger_kernel", True),))),
    ],
)
def test_a_knob_that_is_offered_takes_effect(run: Any, knobs: dict[str, Any], knob: str, config: TrialConfig) -> None:
    if knobs[knob]["problem"] is not None:
        pytest.skip(knobs[knob]["problem"])
    run(config)


def test_every_attention_that_is_offered_takes_effect(run: Any, knobs: dict[str, Any]) -> None:
    for name in knobs["attn"]["values"]:
        run(BF16.but(extra=(("attn_implementation", name),)))


def test_offloaded_checkpoints_leave_the_card(run: Any, knobs: dict[str, Any]) -> None:
    if knobs["offload"]["problem"] is not None:
        pytest.skip(knobs["offload"]["problem"])
    kept, moved = (run(CHECKPOINTED.but(extra=extra)).memory.peak_allocated_bytes for extra in ((), (("offload", True),)))
    assert moved <= kept


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.TF32, Precision.PURE_BF16])
def test_honest_16_bit_is_rounding(runner: ProcessRunner, precision: Precision) -> None:
    winner = BF16.but(precision=precision)
    order = CheckOrder(
        workload=runner.workload.to_json(),
        device="cuda:0",
        forms=forms_for(winner, 8, split=True, precision=True),
        batch=8,
        context_bytes=runner.context_bytes,
    )
    answer = runner.ask(Kind.CHECK, order.to_json(), timeout=200)
    assert unsound_precision(winner, answer) is None
    found = summary(winner, 8, answer)
    assert found["precision_loss_difference"] < departure_bound(precision)
    assert found["split_loss_difference"] < 1e-3
