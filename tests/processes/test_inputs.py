"""What Python callers pass to `tune`: a wrong kind of thing is refused in one line, by its name, before a process is started."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.search.tuning import tune
from tests.refusals import refused


class Thing:
    """Nothing that a training could use."""


class DataFrame(Thing):
    """As that of pandas: columns by name."""

    __module__ = "pandas"
    __getitem__ = None


class DataLoader(Thing):
    """As that of torch: batches one after the other."""

    __module__ = "torch.utils.data.dataloader"
    __iter__ = None


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.search.scene.ProcessRunner", lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tune": 5}, "--tune takes names, got 5"),
        ({"tune": b"attn"}, "--tune takes names"),
        ({"precision": 5}, "precisions are names, got 5"),
        ({"optim": 5}, "list of choices was expected, got 5"),
        ({"batch_size": "4"}, "batch size .* got '4'"),
        ({"batch_size": 2.5}, "batch size .* got 2.5"),
        ({"batch_size": [2.0]}, "batch size .* got 2.0"),
        ({"batch_size": True}, "batch size .* got True"),
        ({"batch_size": []}, "empty list of batch sizes"),
        ({"checkpointing": "both"}, "checkpointing must be True, False or None, got 'both'"),
        ({"keep_numerics": "no"}, "keep_numerics must be True or False, got 'no'"),
        ({"keep_numerics": True, "tune": "pure_bf16"}, "exclude each other"),
        ({"seed": "x"}, "seed .* got 'x'"),
        ({"seed": -1}, "seed .* got -1"),
        ({"tolerance": "x"}, "tolerance .* got 'x'"),
        ({"args": {"bf16": True}}, "args must be a TrainingArguments, got a dict"),
        ({"args": Thing}, "args must be a TrainingArguments, got the class Thing"),
        ({"trainer_kwargs": 5}, "trainer_kwargs must be a dict of keywords, got 5"),
        ({"trainer_kwargs": {5: 1}}, "trainer_kwargs must be a dict of keywords"),
        ({"trainer_cls": "Trainer"}, "trainer_cls must be a subclass of Trainer, got a str"),
        ({"trainer_cls": Thing}, "trainer_cls must be a subclass of Trainer, got the class Thing"),
        ({"processing_class": "bert-tiny"}, "processing_class must be a tokenizer .* got 'bert-tiny'"),
        ({"data_collator": "pad"}, "data_collator must be a function .* got a str"),
        ({"train_dataset": "reviews.csv"}, "train_dataset must be a dataset of rows, got a str"),
        ({"train_dataset": {"train": [1]}}, "train_dataset must be a dataset of rows, got a dict"),
        ({"train_dataset": DataFrame()}, "train_dataset must be a dataset of rows, got a DataFrame"),
        ({"train_dataset": DataLoader()}, "train_dataset must be a dataset of rows, got a DataLoader"),
        ({"eval_dataset": 5}, "eval_dataset must be a dataset of rows, got a int"),
        ({"callbacks": [5]}, "callback must be a TrainerCallback, got 5"),
        ({"callbacks": [None]}, "callback must be a TrainerCallback, got None"),
        ({"trainer_kwargs": {"args": 1}}, "trainer_kwargs holds 'args', which trials set themselves"),
        ({"trainer_kwargs": {"model_init": Thing}}, "trainer_kwargs holds 'model_init', which trials set themselves"),
        ({"device": 5}, "device must be a name, got 5"),
        ({"study": 5}, "study must be a path, got 5"),
        ({"task": 5}, "task must be a name, got 5"),
        ({"model_init": Thing}, "model and model_init were both given"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_kind_of_thing_is_refused_by_its_name(given: dict[str, Any], said: str) -> None:
    with refused(said):
        tune("bert-tiny", **{"effective_batch": 4, "device": "cpu", **given})
