"""What only a CUDA device can show of adapters: quantised kernels in every precision, paged optimizers, DoRA on 8-bit layers, and memory against a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autofit.problem.adaptation import adaptation_of
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome
from tests.servers import one_server

pytestmark = pytest.mark.gpu
pytest.importorskip("peft", reason="peft is not installed")

CONFIG = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., tuple[Measurement, dict[str, Any]]]]:
    def run_one(config: TrialConfig = CONFIG, **said: Any) -> tuple[Measurement, dict[str, Any]]:
        if "quantize" in said or config.optim.startswith("paged_"):
            pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        workload = Workload(model="gpt2", seq_len=128, adaptation=adaptation_of(**said))
        with ProcessRunner(workload, "cuda:0") as runner:
            facts = runner.describe()
            runner.context_bytes = facts["device"]["context_bytes"]
            result = runner.run(TrialRequest(config=config, timeout_seconds=120, window_seconds=0.2))
        assert result.outcome is Outcome.COMPLETED, result.failure
        assert result.measurement is not None
        return result.measurement, facts["model"]

    with one_server():
        yield run_one


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_quantised_bases_train_in_every_precision(run: Any, quantize: str, precision: Precision) -> None:
    measurement, facts = run(CONFIG.but(precision=precision), adapter="lora", quantize=quantize)
    assert measurement.facts["seen"]["trained_parameters"] == facts["n_trainable_params"]
    assert measurement.facts["asked"] == measurement.facts["seen"]


def test_a_quantised_base_needs_less_than_a_plain_one_and_that_less_than_full_training(run: Any) -> None:
    peaks = [run(**said)[0].memory.peak_allocated_bytes for said in ({}, {"adapter": "lora"}, {"adapter": "lora", "quantize": "4bit"})]
    assert peaks[0] > peaks[1] > peaks[2]


def test_checkpointing_saves_memory_under_an_adapter(run: Any) -> None:
    off, on = (run(CONFIG.but(gradient_checkpointing=on), adapter="lora", quantize="4bit")[0] for on in (False, True))
    assert on.memory.peak_allocated_bytes < off.memory.peak_allocated_bytes


def test_16_bit_weights_under_an_adapter_need_half(run: Any) -> None:
    fp32, bf16 = (run(CONFIG.but(precision=p), adapter="lora")[0] for p in (Precision.BF16, Precision.PURE_BF16))
    assert bf16.memory.peak_allocated_bytes < fp32.memory.peak_allocated_bytes


@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "paged_adamw_32bit"])
def test_paged_optimizers_train_an_adapter(run: Any, optim: str) -> None:
    run(CONFIG.but(optim=optim), adapter="lora", quantize="4bit")


def test_dora_trains_on_8_bit_layers(run: Any) -> None:
    run(adapter="dora", quantize="8bit")


def test_a_trace_of_an_adapter_is_right_within_three_percent(run: Any) -> None:
    from autofit.forecasts.estimation import asking
    from autofit.forecasts.laws import Setting, collect, law_class

    measurement, facts = run(CONFIG.but(precision=Precision.BF16), adapter="lora")
    workload = Workload(model="gpt2", seq_len=128, adaptation=adaptation_of(adapter="lora"))
    config = CONFIG.but(precision=Precision.BF16)
    with ProcessRunner(workload, "cuda:0") as runner:
        capability = runner.describe()["device"]["compute_capability"]
    with asking(workload) as (told, ask):
        setting = Setting(workload=workload, facts=told, compute_capability=capability)
        laws = collect(setting, [config], ask)[law_class(setting, config)].laws
    assert laws is not None
    assert told["digest"] == facts["digest"]
    predicted = laws.memory.predict(config.per_device_train_batch_size).peak_allocated_bytes
    assert predicted == pytest.approx(measurement.memory.peak_allocated_bytes, rel=0.03)
