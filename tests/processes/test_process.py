"""Real trials in real child processes: outcomes, out of memory of every kind, isolation, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autofit.errors import UserError, WorkerError
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import Kind
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Outcome, Reason
from autofit.units import GIB, MIB
from tests import training
from tests.process_table import gone_within, marked

CONFIG = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
BERT = Workload(model="bert-tiny", seq_len=32)


@pytest.fixture(scope="module")
def bert() -> Iterator[ProcessRunner]:
    with ProcessRunner(BERT, "cpu") as runner:
        runner.describe()
        yield runner


@pytest.fixture
def run_live(bert: ProcessRunner) -> Iterator[Callable[..., TrialResult]]:
    """Run one trial of a live module under a limit (on the module's one fork server)."""

    def run(
        model: nn.Module, *, config: TrialConfig = CONFIG, limit: int | None = 2 * GIB, rows: int = 64, timeout: float = 60.0, **more: Any
    ) -> TrialResult:
        width = model.layer.in_features
        with ObjectFile({"model": model, "train_dataset": training.Rows(rows, width)}) as objects:
            bert.workload = Workload(model="<test>", objects_path=objects.path)
            more.setdefault("window_seconds", 0.1)
            return bert.run(TrialRequest(config=config, memory_limit_bytes=limit, timeout_seconds=timeout, **more))

    yield run
    bert.workload = BERT


def test_a_trial_returns_raw_samples_counters_and_proof_of_its_knobs(bert: ProcessRunner) -> None:
    config = TrialConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=True, optim="adafactor")
    result = bert.run(TrialRequest(config=config, memory_limit_bytes=2 * GIB, window_seconds=0.2))
    assert result.outcome is Outcome.COMPLETED
    m = result.measurement
    assert m is not None
    assert m.optimizer_steps >= 2
    assert len(m.micro_step_seconds) == 2 * len(m.update_seconds) == 2 * len(m.fetch_seconds), "trials run at accumulation min(2, target)"
    assert len(m.update_seconds) == m.optimizer_steps - 1, "the first step is dropped"
    assert len(m.losses) == m.optimizer_steps
    assert m.tokens_per_sample == 32
    assert m.memory.peak_reserved_bytes is not None
    assert 20 * MIB < m.memory.peak_reserved_bytes < GIB
    assert m.facts is not None
    assert m.facts["asked"] == m.facts["seen"]
    assert m.facts["seen"]["gradient_checkpointing"] is True
    assert m.facts["seen"]["optimizer"] == "Adafactor"


def test_full_length_runs_at_the_target_accumulation(bert: ProcessRunner) -> None:
    config = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    result = bert.run(TrialRequest(config=config, full_length=True, optimizer_steps=3))
    assert result.measurement is not None
    assert result.measurement.optimizer_steps == 3
    assert len(result.measurement.micro_step_seconds) == 16


def test_bf16_is_seen_as_autocast_in_forward(bert: ProcessRunner) -> None:
    result = bert.run(TrialRequest(config=CONFIG.but(precision="bf16"), window_seconds=0.1))
    assert result.measurement is not None
    assert result.measurement.facts is not None
    assert result.measurement.facts["seen"]["autocast_dtype"] == "bfloat16"
    assert result.measurement.facts["seen"]["weight_dtype"] == "float32"


def test_out_of_memory_is_infeasible_and_leaves_the_runner_usable(bert: ProcessRunner) -> None:
    tight = bert.run(TrialRequest(config=CONFIG.but(per_device_train_batch_size=512), memory_limit_bytes=100 * MIB))
    assert tight.outcome is Outcome.INFEASIBLE
    assert tight.failure is not None
    assert tight.failure.reason is Reason.OUT_OF_MEMORY
    again = bert.run(TrialRequest(config=CONFIG, memory_limit_bytes=2 * GIB, window_seconds=0.1))
    assert again.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("model", "phase"),
    [(training.HugeForward, "forward"), (training.HugeBackward, "backward"), (training.HugeSecondForward, "forward")],
)
def test_real_out_of_memory_is_recognised_in(run_live: Callable[..., TrialResult], model: type[training.Straight], phase: str) -> None:
    result = run_live(model())
    assert result.outcome is Outcome.INFEASIBLE
    assert result.failure is not None
    assert (result.failure.reason, result.failure.phase) == (Reason.OUT_OF_MEMORY, phase)
    assert result.failure.requested_bytes == 4 << 34


def test_real_out_of_memory_is_recognised_in_the_first_optimizer_step(run_live: Callable[..., TrialResult]) -> None:
    # 64 MiB of weights and as much of gradients fit into the limit, Adam's 128 MiB of moments do not.
    model = training.Straight(width=4096, hidden=4096)
    result = run_live(model, config=CONFIG.but(gradient_accumulation_steps=1), limit=240 * MIB)
    assert result.failure is not None
    assert (result.failure.reason, result.failure.phase) == (Reason.OUT_OF_MEMORY, "update")


def test_a_child_that_is_killed_under_a_limit_is_suspected_out_of_memory(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Killed())
    assert result.outcome is Outcome.INFEASIBLE
    assert result.failure is not None
    assert result.failure.reason is Reason.SUSPECTED_OUT_OF_MEMORY


def test_a_child_that_is_killed_without_a_limit_is_a_crash(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Killed(), limit=None)
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason is Reason.CRASH


def test_a_bug_of_the_training_is_failed_with_its_traceback(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Buggy())
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason is Reason.ERROR
    assert "label encoder" in result.failure.message
    assert result.failure.traceback is not None
    assert "in trouble" in result.failure.traceback


def test_a_child_that_exits_is_a_crash(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Exits(), limit=None)
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason is Reason.CRASH
    assert "41" in result.failure.message


def test_a_trial_that_hangs_is_ended_at_its_time_limit(run_live: Callable[..., TrialResult]) -> None:
    begin = time.monotonic()
    result = run_live(training.Hangs(), timeout=2.0)
    assert time.monotonic() - begin < 60
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert (result.failure.reason, result.failure.phase) == (Reason.TIMEOUT, "forward")


def test_a_loss_that_is_not_finite_is_infeasible(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.NotANumber())
    assert result.outcome is Outcome.INFEASIBLE
    assert result.failure is not None
    assert result.failure.reason is Reason.NON_FINITE_LOSS


def test_what_a_training_prints_is_never_taken_for_an_answer(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Chatty())
    assert result.outcome is Outcome.COMPLETED
    assert result.measurement is not None
    assert result.measurement.micro_step_seconds


def test_data_shorter_than_a_step_does_not_shrink_the_trial(run_live: Callable[..., TrialResult]) -> None:
    result = run_live(training.Straight(), config=TrialConfig(per_device_train_batch_size=16, gradient_accumulation_steps=2), rows=3)
    assert result.measurement is not None
    assert len(result.measurement.micro_step_seconds) == 2 * len(result.measurement.update_seconds)


def test_a_short_trial_predicts_the_step_time_at_full_accumulation(run_live: Callable[..., TrialResult]) -> None:
    """A model that sleeps; the exact law has its own test on a virtual clock (`test_clock`)."""
    config = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    short = run_live(training.Sleepy(0.1), config=config).measurement
    full = run_live(training.Sleepy(0.1), config=config, full_length=True, optimizer_steps=3).measurement
    assert short is not None
    assert full is not None
    measured = (sum(full.micro_step_seconds) + 8 * sum(full.fetch_seconds) + sum(full.update_seconds)) / 2
    assert 8 * (short.t_micro + short.t_fetch) + short.t_update == pytest.approx(measured, rel=0.05)


def test_a_running_trial_can_be_cancelled_from_another_thread() -> None:
    with (
        ObjectFile({"model": training.Hangs(), "train_dataset": training.Rows()}) as objects,
        ProcessRunner(Workload(model="<test>", objects_path=objects.path), "cpu") as runner,
    ):
        runner.ask(Kind.DESCRIBE, {"workload": None, "device": "cpu"}, timeout=60)
        timer = threading.Timer(2.0, runner.cancel)
        timer.start()
        result = runner.run(TrialRequest(config=CONFIG, timeout_seconds=60))
        timer.join()
    assert result.failure is not None
    assert result.failure.reason is Reason.INTERRUPTED


def test_a_spawned_child_gives_the_same_kind_of_answer() -> None:
    with ProcessRunner(BERT, "cpu", method="spawn") as runner:
        result = runner.run(TrialRequest(config=CONFIG, memory_limit_bytes=2 * GIB, window_seconds=0.1))
    assert result.outcome is Outcome.COMPLETED


def test_a_forked_child_that_does_not_come_up_is_replaced_by_a_spawned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.processes.process.START_TIMEOUT_SECONDS", 0.0)
    with ProcessRunner(BERT, "cpu") as runner:
        result = runner.run(TrialRequest(config=CONFIG, window_seconds=0.1))
        assert runner.fallback_reason is not None
        assert "spawned" in runner.fallback_reason
    assert result.outcome is Outcome.COMPLETED


def test_a_mistake_of_the_user_arrives_as_such() -> None:
    with ProcessRunner(Workload(model="bert-tyni"), "cpu") as runner, pytest.raises(UserError) as caught:
        runner.describe()
    assert "bert-tyni" in caught.value.message
    assert caught.value.hint is not None
    assert "bert-tiny" in caught.value.hint


def test_libraries_that_cannot_be_imported_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ProcessRunner(BERT, "cpu") as runner, pytest.raises(WorkerError, match="libcudart"):
        runner.describe()


def test_close_is_idempotent_and_removes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runner = ProcessRunner(BERT, "cpu")
    runner.run(TrialRequest(config=CONFIG, window_seconds=0.1))
    runner.close()
    runner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("after", [0.2, 8.0])
def test_no_child_outlives_a_parent_that_is_killed(tmp_path: Path, after: float) -> None:
    """Killed while the server imports, and in the middle of a trial."""
    marker = f"autofit-test-{os.getpid()}-{after}"
    script = textwrap.dedent(
        """
        from autofit.processes.objects import ObjectFile
        from autofit.processes.process import ProcessRunner
        from autofit.trials.runner import TrialRequest
        from autofit.problem.spec import Workload
        from tests import training
        from tests.processes.test_process import CONFIG
        with ObjectFile({"model": training.Hangs(), "train_dataset": training.Rows()}) as objects:
            with ProcessRunner(Workload(model="<test>", objects_path=objects.path), "cpu") as runner:
                runner.run(TrialRequest(config=CONFIG))
        """
    )
    env = {**os.environ, "AUTOFIT_TEST_MARKER": marker, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while len(marked(marker)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(marked(marker)) >= 2
    time.sleep(after)
    parent.kill()
    parent.wait()
    assert gone_within(marker, 5) == []
    assert list(tmp_path.glob("autofit-*")) == [], "no file outlives it either"
