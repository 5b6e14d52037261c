"""What only a CUDA device can show: the limit, out of memory, precisions, optimizers and counters of real trials."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import autofit
from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile
from autofit.processes.process import ProcessRunner
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Outcome, Reason
from autofit.units import GIB, MIB
from tests import training

pytestmark = pytest.mark.gpu

CONFIG = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
BERT = Workload(model="bert-base-uncased", seq_len=128)


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[ProcessRunner, dict[str, Any]]]:
    with ProcessRunner(BERT, "cuda:0") as runner:
        facts = runner.describe()
        runner.context_bytes = facts["device"]["context_bytes"]
        yield runner, facts


@pytest.fixture
def device(scene: tuple[ProcessRunner, dict[str, Any]]) -> Device:
    return Device.from_json(scene[1]["device"])


@pytest.fixture
def run(scene: tuple[ProcessRunner, dict[str, Any]]) -> Iterator[Callable[..., TrialResult]]:
    runner = scene[0]

    def run_one(config: TrialConfig = CONFIG, *, limit: int | None = None, model: Any = None, **more: Any) -> TrialResult:
        more.setdefault("window_seconds", 0.2)
        request = TrialRequest(config=config, memory_limit_bytes=limit, timeout_seconds=120, **more)
        if model is None:
            return runner.run(request)
        with ObjectFile({"model": model, "train_dataset": training.Rows(64, model.layer.in_features)}) as objects:
            runner.workload = Workload(model="<test>", objects_path=objects.path)
            return runner.run(request)

    yield run_one
    runner.workload = BERT


def completed(result: TrialResult) -> Measurement:
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert result.measurement is not None
    return result.measurement


def test_the_device_is_described(device: Device) -> None:
    assert device.kind == "cuda"
    assert device.compute_capability is not None
    assert device.total_memory_bytes > GIB
    assert 50 * MIB < device.context_bytes < 3 * GIB
    assert device.free_memory_bytes is not None
    assert 0 < device.default_limit_bytes() < device.free_memory_bytes
    assert Precision.FP16 in device.precisions


def test_counters_are_ordered_and_agree_with_the_driver(run: Callable[..., TrialResult], device: Device) -> None:
    memory = completed(run()).memory
    assert memory.peak_allocated_bytes is not None
    assert memory.peak_reserved_bytes is not None
    assert memory.context_bytes is not None
    assert memory.device_used_bytes is not None
    assert 1.2 * GIB < memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert abs(memory.context_bytes - device.context_bytes) < 512 * MIB
    assert memory.device_used_bytes <= device.total_memory_bytes


def test_more_batch_takes_more_memory_and_accumulation_holds_the_gradients(run: Callable[..., TrialResult]) -> None:
    small = completed(run(CONFIG.but(per_device_train_batch_size=2))).memory.peak_allocated_bytes
    large = completed(run(CONFIG.but(per_device_train_batch_size=32))).memory.peak_allocated_bytes
    assert small is not None
    assert large is not None
    assert large > small


@pytest.mark.parametrize("precision", list(Precision))
def test_a_precision_is_what_the_forward_pass_saw(run: Callable[..., TrialResult], device: Device, precision: Precision) -> None:
    if precision not in device.precisions:
        pytest.skip(f"{precision} is not native here")
    facts = completed(run(CONFIG.but(precision=precision))).facts
    assert facts is not None
    assert facts["seen"] == facts["asked"]


def test_tf32_does_not_leak_from_one_trial_into_the_next(run: Callable[..., TrialResult], device: Device) -> None:
    if Precision.TF32 not in device.precisions:
        pytest.skip("tf32 is not native here")
    seen = []
    for precision in (Precision.TF32, Precision.FP32, Precision.TF32):
        facts = completed(run(CONFIG.but(precision=precision))).facts
        assert facts is not None
        seen.append(facts["seen"]["fp32_matmul"])
    assert seen == ["tf32", "ieee", "tf32"]


def test_checkpointing_is_active_and_saves_memory(run: Callable[..., TrialResult]) -> None:
    plain = completed(run(CONFIG.but(per_device_train_batch_size=32))).memory.peak_allocated_bytes
    saved = completed(run(CONFIG.but(per_device_train_batch_size=32, gradient_checkpointing=True))).memory.peak_allocated_bytes
    assert plain is not None
    assert saved is not None
    assert saved < plain


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit"])
def test_every_default_optimizer_trains(run: Callable[..., TrialResult], optim: str) -> None:
    if "bnb" in optim and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    facts = completed(run(CONFIG.but(optim=optim))).facts
    assert facts is not None
    assert facts["seen"] == facts["asked"]


def test_eight_bit_adam_takes_less_memory_than_adam(run: Callable[..., TrialResult]) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    full = completed(run(CONFIG)).memory.peak_allocated_bytes
    small = completed(run(CONFIG.but(optim="adamw_bnb_8bit"))).memory.peak_allocated_bytes
    assert full is not None
    assert small is not None
    assert small < full


def test_a_limit_below_the_card_is_enforced_context_included(run: Callable[..., TrialResult], device: Device) -> None:
    limit = 3 * GIB + device.context_bytes
    fits = completed(run(CONFIG, limit=limit)).memory
    assert fits.needed_bytes is not None
    assert fits.needed_bytes <= limit + 64 * MIB
    result = run(CONFIG.but(per_device_train_batch_size=512, gradient_accumulation_steps=1), limit=limit)
    assert result.outcome is Outcome.INFEASIBLE
    assert result.failure is not None
    assert result.failure.reason is Reason.OUT_OF_MEMORY
    assert result.failure.requested_bytes is not None
    assert completed(run(CONFIG, limit=limit)), "the next trial has a clean device"


@pytest.mark.parametrize(
    ("model", "phase"),
    [(training.HugeForward, "forward"), (training.HugeBackward, "backward"), (training.HugeSecondForward, "forward")],
)
def test_real_out_of_memory_is_recognised_in(run: Callable[..., TrialResult], model: type[training.Straight], phase: str) -> None:
    result = run(model=model(), limit=2 * GIB)
    assert result.outcome is Outcome.INFEASIBLE
    assert result.failure is not None
    assert (result.failure.reason, result.failure.phase) == (Reason.OUT_OF_MEMORY, phase)


def test_real_out_of_memory_is_recognised_in_the_first_optimizer_step(run: Callable[..., TrialResult], device: Device) -> None:
    model = training.Straight(width=8192, hidden=8192)  # 256 MiB of weights, as much of gradients, 512 MiB of moments
    config = CONFIG.but(gradient_accumulation_steps=1)
    result = run(config, model=model, limit=device.context_bytes + 700 * MIB)
    assert result.failure is not None
    assert (result.failure.reason, result.failure.phase) == (Reason.OUT_OF_MEMORY, "update")


def test_fp16_completes_real_steps_although_the_scaler_skips_the_first(run: Callable[..., TrialResult]) -> None:
    measured = completed(run(CONFIG.but(precision=Precision.FP16)))
    assert measured.optimizer_steps - measured.skipped_steps >= 2


def test_a_search_on_the_card_returns_a_confirmed_answer() -> None:
    result = autofit.tune("bert-base-uncased", effective_batch=32, seq_len=128, memory="6GiB", trials=8, seed=1)
    assert result.best.config.effective_batch() == 32
    assert result.confirmed
    assert result.best.memory.needed_bytes is not None
    assert result.best.memory.needed_bytes <= 6 * GIB + 64 * MIB
    assert result.cost.out_of_memory <= 1
    arguments = result.training_arguments(output_dir="out")
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 32
