"""`autofit.tune` from Python, with real trials: every kind of model, the caller's world left as it was, studies that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForSequenceClassification, TrainingArguments

import autofit
from autofit.devices.device import Device
from autofit.errors import NothingFits, SearchFailed, StudyError, WorkerError
from autofit.problem.config import Precision
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.result import TuneResult
from autofit.search.scene import choose_device, memory_limit
from autofit.search.tuning import run_search, tune
from autofit.testing import simulated_landscape
from autofit.trials.observer import Silent
from autofit.trials.replay import ReplayRunner
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.trials.trial import Outcome, Reason, Role
from autofit.units import GIB
from tests import training
from tests.one_search import ONE, TINY, global_state, warm_up
from tests.process_table import marked
from tests.refusals import refused
from tests.searching import failed, fastest_that_fits, speeds

ROOT = Path(__file__).parents[2]


def check(result: TuneResult, tmp_path: Path) -> None:
    """An answer that was run, that multiplies out, and that transformers takes."""
    assert result.confirmed
    config = result.best.config
    assert any(r.config == config and r.outcome is Outcome.COMPLETED for r in result.trials)
    arguments = result.training_arguments(output_dir=str(tmp_path / "out"), learning_rate=1e-4)
    assert isinstance(arguments, TrainingArguments)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 4
    assert arguments.learning_rate == 1e-4
    assert str(getattr(arguments.optim, "value", arguments.optim)) == config.optim
    assert arguments.bf16 is (config.precision is Precision.BF16)


# -- what can be a model ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize("kind", ["name", "directory", "config", "module", "class"])
def test_a_model_may_be_given_as(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    TINY.save_pretrained(tmp_path / "model")
    rows: dict[str, Any] = {"train_dataset": training.Rows()}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "name": ("bert-tiny", {"seq_len": 16}),
        "directory": (tmp_path / "model", {"seq_len": 16, "task": "sequence-classification"}),
        "config": (TINY, {"seq_len": 16, "task": "causal-lm"}),
        "module": (training.Straight(), rows),
        "class": (training.Straight, rows),
    }
    model, more = cases[kind]
    capfd.readouterr()
    result = tune(model, **ONE, **more, show_progress=kind == "class")
    shown = capfd.readouterr()
    assert ("samples/s" in shown.err) == (kind == "class"), "the library shows nothing unless it is asked to"
    assert shown.out == ""
    check(result, tmp_path)
    assert len([r for r in result.trials if r.role is Role.DEFAULTS]) == 1
    if kind == "config":
        assert result.model["task"] == "causal-lm"
    if kind in ("name", "directory", "config"):
        assert result.best.tokens_per_second == pytest.approx(16 * result.best.samples_per_second)


@pytest.mark.slow
def test_a_search_leaves_the_model_and_the_world_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("work", "temporary")}
    for place in places.values():
        place.mkdir()
    monkeypatch.chdir(places["work"])
    monkeypatch.setattr("tempfile.tempdir", str(places["temporary"]))
    marker = f"autofit-test-world-{os.getpid()}"
    monkeypatch.setenv("AUTOFIT_TEST_MARKER", marker)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    warm_up()
    model = BertForSequenceClassification(TINY).eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.config.to_dict()
    before = global_state()
    result = tune(model, seq_len=16, **ONE)
    assert global_state() == before
    check(result, tmp_path)
    assert not model.training
    assert model.config.to_dict() == settings
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert set(model.state_dict()) == set(weights)
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == weights[name].numpy().tobytes(), name
    assert [list(place.rglob("*")) for place in places.values()] == [[], []], "no file is left"
    assert marked(marker) == [], "no process is left"


# -- where the caller's code is ---------------------------------------------------------------------------------------

SCRIPT = """
import torch, transformers, autofit
with open("ran.txt", "a") as handle:
    handle.write("once\\n")
print("the body runs")
class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
    def forward(self, x, labels):
        return {"loss": (self.layer(x).mean(dim=1) - labels).square().mean() + SHIFT}
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(8), "labels": torch.tensor(0.0)}
class Counter(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        assert kwargs["processing_class"].SHIFT == SHIFT
class Own(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (loss * SHIFT, outputs) if return_outputs else loss * SHIFT
class Processing:
    SHIFT = 1.0
SHIFT = 1.0
def build():
    return Net(8)
result = autofit.tune(%s, effective_batch=4, batch_size=4, device="cpu", memory="2GiB", precision="fp32",
                      optim="adamw_torch_fused", checkpointing=False, train_dataset=Rows(), eval_dataset=Rows(),
                      trainer_cls=Own, callbacks=[Counter()], processing_class=Processing())
print("answer", result.best.config.effective_batch(), result.confirmed, result.evaluation.fits)
"""
NOTEBOOK = """
import sys, types
cell = compile(open("cell.txt").read(), "<ipython-input-1-abcdef>", "exec")
sys.modules["__main__"] = main = types.ModuleType("__main__")
assert not hasattr(main, "__file__")
exec(cell, main.__dict__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "model"), [("script", "build"), ("stdin", "model_init=build"), ("notebook", "Net()")]
)
def test_code_in_main_needs_no_guard_and_runs_once(how: str, model: str, tmp_path: Path) -> None:
    source = SCRIPT % model
    (tmp_path / "cell.txt").write_text(source)
    (tmp_path / "script.py").write_text(source)
    command = {"script": ["script.py"], "stdin": ["-"], "notebook": ["-c", NOTEBOOK]}[how]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=source if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the body runs", "answer 4 True 8"]
    assert (tmp_path / "ran.txt").read_text() == "once\n"


# -- studies ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_a_study_of_a_live_module_goes_on_and_runs_nothing_again(tmp_path: Path) -> None:
    more: dict[str, Any] = {**ONE, "train_dataset": training.Rows(), "study": tmp_path / "study"}
    more.pop("memory")  # what is free differs from call to call: the study's own limit counts
    first = tune(training.Straight(), **more)
    second = tune(training.Straight(), **more)
    assert second.trials == first.trials
    assert second.best == first.best
    assert second.memory_limit_bytes == first.memory_limit_bytes
    before = (tmp_path / "study").read_bytes()
    with refused("another model", kind=StudyError):
        tune(training.Straight(width=16, hidden=8), **more)
    assert (tmp_path / "study").read_bytes() == before


class Interrupter:
    """An observer that presses Ctrl-C in the middle of a trial, counted from 0."""

    def __init__(self, number: int, after: float) -> None:
        self._left, self._after = number, after

    def trial_started(self, config: object, role: object, why: object) -> None:
        if self._left == 0:
            threading.Timer(self._after, os.kill, (os.getpid(), signal.SIGINT)).start()
        self._left -= 1

    def trial_ended(self, record: object) -> None: ...

    def note(self, message: str) -> None: ...


@pytest.mark.slow
def test_an_interrupt_in_a_real_trial_gives_the_best_so_far_and_the_study_goes_on(tmp_path: Path) -> None:
    more: dict[str, Any] = {**ONE, "batch_size": None, "study": tmp_path / "study"}
    rows = training.Rows()
    first = tune(training.Sleepy(0.3), train_dataset=rows, observer=Interrupter(1, 0.5), **more)
    assert first.stopped == "interrupted"
    assert [r.role for r in first.trials if r.outcome is Outcome.COMPLETED] == [Role.DEFAULTS]
    assert "interrupted" in {w.code for w in first.warnings}
    second = tune(training.Sleepy(0.3), train_dataset=rows, trials=2, **more)
    assert second.trials[: len(first.trials)] == first.trials
    assert second.confirmed


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_a_bug_of_the_training_is_shown_once_with_its_traceback() -> None:
    more = {**ONE, "batch_size": None}
    with refused("failed alike: .*label encoder", kind=SearchFailed) as caught:
        tune(training.Buggy(), train_dataset=training.Rows(), **more)
    assert isinstance(caught.value, SearchFailed)
    assert caught.value.traceback.count("Traceback") == 1
    assert "in trouble" in caught.value.traceback


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_a_limit_that_nothing_fits_is_said_after_real_trials() -> None:
    model = training.Straight(
        width=4096, hidden=4096
    )  # 64 MiB of weights, as much of gradients, twice of Adam's state
    with refused("no configuration fits into 100.0 MiB", kind=NothingFits):
        tune(model, train_dataset=training.Rows(width=4096), **{**ONE, "memory": "100MiB"})


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_a_training_that_hangs_ends_at_the_time_limit_of_a_trial() -> None:
    begin = time.monotonic()
    with refused("no answer within 2 s", hint="--trial-timeout", kind=SearchFailed):
        tune(training.Hangs(), train_dataset=training.Rows(), trial_timeout="2s", **ONE)
    assert time.monotonic() - begin < 120


# -- before anything runs ---------------------------------------------------------------------------------------------


def test_tune_is_public() -> None:
    assert autofit.tune is tune


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no model"),
        ({"effective_batch": 0}, "effective batch"),
        ({"effective_batch": 2.0}, "whole number"),
        ({"memory": "lots"}, "memory"),
        ({"timeout": "soon"}, "timeout"),
        ({"trials": 1.5}, "trials"),
        ({"seq_len": "long"}, "seq_len"),
        ({"precision": "fp8"}, "fp8"),
        ({"optim": []}, "empty"),
        ({"sampler": "magic"}, "magic"),
        ({"tolerance": 2}, "tolerance"),
        ({"study": "/nowhere/study"}, "nowhere"),
        ({"device": "tpu"}, "tpu"),
        ({"train_dataset": threading.Lock()}, "train_dataset"),
        ({"callbacks": print}, "callbacks must be a list"),
        ({"show_progress": True, "observer": Silent()}, "show_progress and observer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_refused_before_a_process_is_started(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr("autofit.search.scene.ProcessRunner", started)
    with refused(message):
        tune(**{"model": "bert-tiny", **ONE, **change})


CARD = Device(kind="cuda", name="card", total_memory_bytes=16 * GIB, free_memory_bytes=12 * GIB)


def spec(**fields: Any) -> SearchSpec:
    return SearchSpec(workload=Workload(model="m"), effective_batch=8, **fields)


def test_the_limit_is_what_was_asked_else_the_studys_else_what_is_free() -> None:
    stored = {"memory_limit": 3 * GIB}
    assert memory_limit(spec(memory_limit_bytes=GIB), CARD, stored) == GIB
    assert memory_limit(spec(), CARD, stored) == 3 * GIB
    assert memory_limit(spec(), CARD, None) == CARD.default_limit_bytes() < 12 * GIB
    unknown = Device(kind="cuda", name="unknown", total_memory_bytes=0)
    assert memory_limit(spec(), unknown, None) >= 1 << 60
    with refused("larger than card has", hint="--memory"):
        memory_limit(spec(memory_limit_bytes=17 * GIB), CARD, None)


@pytest.mark.parametrize(("asked", "chosen"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_a_device_is_taken_by_its_name(asked: str, chosen: str) -> None:
    assert choose_device(asked) == chosen


@pytest.mark.parametrize(("kind", "name"), [("cpu", "a processor"), ("cuda", "a card that no table has")])
def test_a_replay_of_a_device_that_cannot_be_predicted_starts_no_process(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr("autofit.search.scene.asking", started)
    grid = simulated_landscape(8)
    device = replace(grid.device, kind=kind, name=name)
    result = run_search(spec(), landscape=replace(grid, device=device, spec={"model": "bert-tiny"}))
    assert result.confirmed


def test_a_replay_goes_on_without_predictions_where_the_libraries_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise WorkerError("the libraries cannot be imported: ImportError")

    monkeypatch.setattr("autofit.search.scene.asking", broken)
    grid = simulated_landscape(8)
    device = replace(grid.device, name="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
    result = run_search(spec(), landscape=replace(grid, device=device, spec={"model": "bert-tiny"}))
    assert result.confirmed


def test_a_landscape_of_another_effective_batch_is_refused() -> None:
    with refused("recorded at effective batch 16, not 8", hint="--effective-batch 16"):
        run_search(spec(), landscape=simulated_landscape(16))


def test_a_mended_failure_is_proposed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landscape, true = simulated_landscape(32), ReplayRunner.run
    fastest = fastest_that_fits(landscape, landscape.device.default_limit_bytes())
    spec = SearchSpec(workload=Workload(model="m"), effective_batch=32)

    def failing(self: ReplayRunner, request: TrialRequest) -> TrialResult:
        alike = request.config.optim == fastest.optim and request.config.precision == fastest.precision
        return failed(Reason.ERROR, "ImportError") if alike else true(self, request)

    study = tmp_path / "study.log"
    monkeypatch.setattr(ReplayRunner, "run", failing)
    first = run_search(spec, study=study, landscape=landscape, predict=False)
    assert first.best.config.optim != fastest.optim or first.best.config.precision != fastest.precision
    monkeypatch.undo()
    second = run_search(spec, study=study, landscape=landscape, predict=False)
    assert speeds(landscape)[second.best.config] >= 0.99 * speeds(landscape)[fastest]


def test_what_a_search_returns_is_what_its_file_holds(tmp_path: Path) -> None:
    """The certificate among it, with its closest contenders."""
    landscape = simulated_landscape(16)
    spec = SearchSpec(workload=Workload(model="recorded"), effective_batch=16)
    result = run_search(spec, landscape=landscape, predict=False)
    assert result.certificate is not None
    assert result.certificate["contenders"]
    result.save(tmp_path / "best.json")
    assert autofit.load(tmp_path / "best.json") == result
