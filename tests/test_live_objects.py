"""All that a user may hand over reaches the real Trainer of a trial, nothing of it is changed, and what is wrong with it is said."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autofit.errors import SearchFailed
from autofit.results.result import TuneResult, load
from autofit.search.tuning import tune
from autofit.trials.trial import EVAL_BATCH, Outcome, Role
from tests import training
from tests.one_search import ONE, TINY, global_state, warm_up
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("one_server")

MIB = 1 << 20
SEARCH_ONLY = {k: v for k, v in ONE.items() if k != "memory"}


def codes(result: TuneResult) -> set[str]:
    return {warning.code for warning in result.warnings}


def message(result: TuneResult, code: str) -> str:
    return next(warning.message for warning in result.warnings if warning.code == code)


# -- what reaches the Trainer -----------------------------------------------------------------------------------------


class Witness(Trainer):
    """Writes down what the Trainer of a trial has, at its first micro-step."""

    path = ""

    def __init__(self, *args: Any, path: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, optimizer = self.args, self.optimizer
        assert optimizer is not None
        group = optimizer.param_groups[0]
        seen = {
            "betas": list(group["betas"]),
            "decay": group["weight_decay"],
            "learning_rate": group["initial_lr"],
            "scheduler": str(a.lr_scheduler_type.value),
            "warmup": a.warmup_steps,
            "clipping": a.max_grad_norm,
            "smoothing": self.label_smoother.epsilon if self.label_smoother is not None else None,
            "sampling": str(getattr(a.train_sampling_strategy, "value", a.train_sampling_strategy)),
            "accelerator": a.accelerator_config.non_blocking,
            "unused columns": a.remove_unused_columns,
            "processing": self.processing_class.name,  # type: ignore[union-attr]
            "evaluation rows": len(self.eval_dataset),  # type: ignore[arg-type]
            "callbacks": sorted({type(c).__name__ for c in self.callback_handler.callbacks} & {"Loud", "PrinterCallback", "EarlyStoppingCallback"}),
            "saves": [str(a.save_strategy.value), str(a.eval_strategy.value), a.report_to, a.load_best_model_at_end],
        }
        Path(self.path).write_text(json.dumps(seen))
        return super().training_step(*args, **kwargs)


class TokenRows(training.Rows):
    """Eight tokens and a class."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(8) + index % 50, "labels": torch.tensor(index % 2)}


class Processing:
    """Stands for a tokenizer."""

    name = "mine"

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "processing").write_text("saved")


class Loud(TrainerCallback):
    """Saves, logs and stops whenever it can, and counts in itself how often it was asked."""

    def __init__(self, ending: Path) -> None:
        self.calls, self._ending = 0, ending

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.calls += 1
        (Path(args.output_dir) / "note").write_text("written")
        control.should_save = control.should_log = control.should_evaluate = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ending.write_text("the training has ended")


class Descending(Trainer):
    """Makes its own optimizer, whatever `optim` says."""

    def create_optimizer(self, model: Any = None) -> Any:
        assert self.model is not None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


class Choosing(Trainer):
    """Says which optimizer is made, whatever `optim` says."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": 0.1}


def of_its_own(kind: str, model: BertForSequenceClassification) -> dict[str, Any]:
    if kind == "class":
        return {"trainer_cls": Descending}
    if kind == "choice":
        return {"trainer_cls": Choosing}
    if kind == "object":
        return {"trainer_kwargs": {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-3), None)}}
    return {"trainer_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "choice", "object", "named"])
def test_an_optimizer_of_its_own_is_kept_and_optim_is_not_searched(kind: str) -> None:
    model = BertForSequenceClassification(TINY)
    free = {k: v for k, v in SEARCH_ONLY.items() if k != "optim"}
    result = tune(model, **free, train_dataset=TokenRows(64), **of_its_own(kind, model))
    assert {record.config.optim for record in result.trials} == {"adamw_torch_fused"}
    assert any("makes its own optimizer" in warning.message for warning in result.warnings)
    with refused("the Trainer makes its own optimizer: optim has no effect"):
        tune(model, **SEARCH_ONLY, train_dataset=TokenRows(64), **of_its_own(kind, model))


@pytest.mark.slow
def test_all_of_it_reaches_the_trainer_and_nothing_of_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    for directory in (out, work):
        directory.mkdir()
        (directory / "precious").write_text("mine")
    monkeypatch.chdir(work)
    args = TrainingArguments(
        str(out), lr_scheduler_type="cosine", learning_rate=3e-4, warmup_steps=7, max_grad_norm=0.3, label_smoothing_factor=0.1,
        weight_decay=0.02, adam_beta2=0.95, train_sampling_strategy="sequential", remove_unused_columns=False,
        accelerator_config={"non_blocking": True}, save_strategy="steps", eval_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, per_device_eval_batch_size=4, report_to=["tensorboard"], use_cpu=True,
    )  # fmt: skip
    model, rows, callback = BertForSequenceClassification(TINY).eval(), TokenRows(64), Loud(tmp_path / "ended")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    kept = {k: repr(v) for k, v in vars(args).items()}
    warm_up()
    before = global_state()
    result = tune(
        model,
        **ONE,
        args=args,
        train_dataset=rows,
        eval_dataset=TokenRows(5),
        processing_class=Processing(),
        callbacks=[callback, EarlyStoppingCallback()],
        data_collator=stack,
        trainer_cls=Witness,
        trainer_kwargs={"path": str(tmp_path / "seen.json")},
    )
    after = global_state()
    del before["descriptors"], after["descriptors"]  # the fork server stays for the other tests
    assert after == before
    assert json.loads((tmp_path / "seen.json").read_text()) == {
        "betas": [0.9, 0.95], "decay": 0.02, "learning_rate": 3e-4, "scheduler": "cosine", "warmup": 7, "clipping": 0.3,
        "smoothing": 0.1, "sampling": "sequential", "accelerator": True, "unused columns": False,
        "processing": "mine", "evaluation rows": 5, "callbacks": ["Loud"], "saves": ["no", "no", [], False],
    }  # fmt: skip
    assert result.evaluation is not None
    assert result.evaluation.fits == 4
    assert {k: repr(v) for k, v in vars(args).items()} == kept
    assert callback.calls == 0
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == weights[name].numpy().tobytes()
    assert [sorted(os.listdir(d)) for d in (out, work)] == [["precious"], ["precious"]]
    assert not (tmp_path / "ended").exists()


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# -- evaluation -------------------------------------------------------------------------------------------------------


class Wide(training.Straight):
    """Needs 8 MiB for each row that is evaluated, and next to nothing in training."""

    def trouble(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.held = torch.ones(len(hidden), 2 * MIB)
        return hidden


class WithScores(training.Straight):
    """Returns 64 KiB of scores a row beside its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().forward(x, labels), "scores": torch.zeros(len(x), 16384)}


def fails(prediction: Any) -> dict[str, float]:
    raise ValueError("both classes are needed")


@pytest.mark.slow
def test_an_evaluation_that_needs_more_than_training_is_found_out_and_halved(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=32, use_cpu=True)
    result = tune(
        Wide(), **{**ONE, "memory": "200MiB"}, args=args, train_dataset=training.Rows(), eval_dataset=training.Rows(100)
    )
    found = result.evaluation
    assert found is not None
    assert found.fits is not None
    assert 4 <= found.fits < 32
    assert found.peak_bytes is not None
    assert found.peak_bytes > 8 * MIB * found.fits
    assert {r.outcome for r in found.attempts} == {Outcome.COMPLETED, Outcome.INFEASIBLE}
    assert result.arguments[EVAL_BATCH] == found.fits
    assert getattr(result.training_arguments(str(tmp_path)), EVAL_BATCH) == found.fits
    with refused("was tuned", hint=None):
        result.training_arguments(str(tmp_path), **{EVAL_BATCH: 32})
    assert "evaluation_memory" in codes(result)
    assert result.cost.out_of_memory == 0
    result.save(tmp_path / "best.json")
    assert load(tmp_path / "best.json").evaluation == found


@pytest.mark.slow
def test_scores_that_pile_up_are_counted_over_the_whole_set_and_metrics_that_raise_are_said(tmp_path: Path) -> None:
    result = tune(
        WithScores(),
        **{**ONE, "memory": "200MiB"},
        train_dataset=training.Rows(),
        eval_dataset={"long": training.Rows(20_000), "short": training.Rows(3)},
        trainer_kwargs={"compute_metrics": fails},
    )
    found = result.evaluation
    assert found is not None
    assert found.fits == 8
    assert found.metric_error == "ValueError: both classes are needed"
    assert found.pile is not None
    assert 65536 <= found.pile.bytes_per_row < 65536 + 64
    assert found.pile.rows == 20_000
    assert not found.pile.fits
    assert "preprocess_logits_for_metrics" in message(result, "evaluation_memory")
    assert "both classes" in message(result, "metrics_failed")


class BrokenRows(training.Rows):
    """Raises from row 3 on."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 3:
            raise KeyError("row 3 has no text")
        return super().__getitem__(index)


@pytest.mark.slow
def test_an_evaluation_that_fails_is_a_warning_with_its_cause_and_the_answer_stays() -> None:
    result = tune(training.Sleepy(), **ONE, train_dataset=training.Rows(), eval_dataset=BrokenRows())
    assert result.confirmed
    assert not [r for r in result.trials if r.role is Role.LOADER], "a dataset that is fast beside the model needs no workers"
    assert result.evaluation is not None
    assert result.evaluation.fits is None
    assert "row 3 has no text" in message(result, "evaluation_failed")
    assert "failed_trials" not in codes(result)


# -- the loader -------------------------------------------------------------------------------------------------------


class SlowRows(training.Rows):
    """Takes 20 ms a row."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        return super().__getitem__(index)


class AloneRows(SlowRows):
    """Works in the training's own process only."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if get_worker_info() is not None:
            raise RuntimeError("a connection cannot be shared")
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_slow_dataset_gets_workers_and_the_answer_holds_them(tmp_path: Path) -> None:
    result = tune(training.Straight(), **ONE, train_dataset=SlowRows())
    workers = result.arguments["dataloader_num_workers"]
    assert workers >= 2
    tried = [r for r in result.trials if r.role is Role.LOADER]
    with_workers = next(r for r in tried if dict(r.config.extra) == {"dataloader_num_workers": 2})
    without = next(r for r in result.trials if r.config == result.best.config.but(extra=()))
    assert with_workers.samples_per_second is not None
    assert without.samples_per_second is not None
    assert with_workers.samples_per_second > without.samples_per_second
    assert with_workers.measurement is not None
    loader = (with_workers.measurement.facts or {})["loader"]
    assert loader["dataloader_num_workers"] == 2
    assert result.training_arguments(str(tmp_path)).dataloader_num_workers == workers
    assert result.confirmed


@pytest.mark.slow
def test_a_dataset_that_workers_cannot_read_is_a_warning() -> None:
    result = tune(training.Straight(), **ONE, train_dataset=AloneRows())
    assert "dataloader_num_workers" not in result.arguments
    assert "a connection cannot be shared" in message(result, "loader_failed")
    assert result.confirmed


class SlowStream(torch.utils.data.IterableDataset[Any]):
    """Every process reads all of it."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(4096):
            time.sleep(0.005)
            yield {"x": torch.full((16,), float(number)), "labels": torch.tensor(0.0)}


@pytest.mark.slow
def test_a_slow_stream_that_is_not_shared_out_gets_no_workers() -> None:
    result = tune(training.Straight(), **ONE, train_dataset=SlowStream())
    assert "dataloader_num_workers" not in result.arguments
    assert not [r for r in result.trials if r.role is Role.LOADER]
    assert any("divide the stream among workers" in w.next_step for w in result.warnings if w.code == "input_bound")
    assert result.confirmed


class HangingRows(SlowRows):
    """Notes the process that reads it, which then never comes back."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self._notes = notes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if get_worker_info() is not None:
            (self._notes / str(os.getpid())).touch()
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.slow
def test_workers_end_with_a_trial_that_is_ended(tmp_path: Path) -> None:
    result = tune(training.Straight(), **ONE, train_dataset=HangingRows(tmp_path), trial_timeout="5s")
    assert result.confirmed
    assert "no answer within 5 s" in message(result, "loader_failed")
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits for its parent to ask does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- what is wrong with them ------------------------------------------------------------------------------------------


class Stuck(list[int]):
    """Could be a dataset, a collator or a callback, and cannot travel."""

    on_train_begin = __call__ = list.append

    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


@pytest.mark.parametrize("name", ["eval_dataset", "processing_class", "callbacks", "data_collator", "trainer_kwargs"])
def test_what_cannot_be_sent_is_refused_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.scene.ProcessRunner", lambda *_, **__: pytest.fail("a process was started"))
    thing: Any = Stuck()
    given = {"callbacks": [thing], "trainer_kwargs": {"lock": thing}}.get(name, thing)
    said = "trainer_arguments" if name == "trainer_kwargs" else name
    with refused(f"^{said} cannot be sent to a trial's process: TypeError", hint="__getstate__"):
        tune("bert-tiny", **SEARCH_ONLY, **{name: given})


class Unloadable:
    """Travels, and does not arrive."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)

    def __setstate__(self, state: Any) -> None:
        raise ConnectionError("the database is not reachable from here")


class NoLoss(Trainer):
    """Forgets to return its loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)


def unlabelled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([row["x"] for row in rows])}


class Stopper(TrainerCallback):
    """Ends every epoch at once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        raise StopAsyncIteration("a callback that raises")


class Lossless(training.Straight):
    """Takes rows without labels, and has no loss for them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x, labels) if labels is not None else {"scores": self.layer(x)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said", "where"),
    [
        ({"model": Lossless(), "data_collator": unlabelled}, "did not return a loss", "compute_loss"),
        ({"trainer_cls": NoLoss}, "NoLoss.compute_loss returned None instead of a loss", "compute_loss"),
        ({"callbacks": [Stopper()]}, "a callback that raises", "on_step_begin"),
    ],
    ids=["no labels", "no loss", "a callback that raises"],
)
def test_a_training_that_fails_shows_its_own_traceback(change: dict[str, Any], said: str, where: str) -> None:
    given = {"model": training.Straight(), "train_dataset": training.Rows(), **change}
    with refused(said, hint="fix what it says", kind=SearchFailed) as caught:
        tune(**given, **ONE)
    assert isinstance(caught.value, SearchFailed)
    assert where in caught.value.traceback


@pytest.mark.slow
def test_a_dataset_that_raises_is_refused_with_its_row() -> None:
    with refused("row 3 has no text"):
        tune(training.Straight(), **ONE, train_dataset=BrokenRows())


@pytest.mark.slow
def test_an_object_that_does_not_arrive_is_refused_in_one_line() -> None:
    thing = Unloadable()
    thing.__dict__["rows"] = 4
    with refused("cannot be loaded in a trial's process: ConnectionError: the database", hint="function that builds it"):
        tune(training.Straight(), **ONE, train_dataset=thing)
