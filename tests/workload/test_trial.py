"""One trial of live objects, run here: what the user's own code makes of the configuration is found out."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.channel import Channel
from autofit.processes.objects import ObjectFile, sent_arguments
from autofit.processes.protocol import TrialOrder
from autofit.trials.measurement import Measurement
from autofit.trials.runner import TrialRequest
from autofit.trials.soundness import unsound
from autofit.trials.trial import Reason
from autofit.workload.trial import run_trial
from tests import training
from tests.refusals import refused

CONFIG = TrialConfig(per_device_train_batch_size=4)


def trial(config: TrialConfig = CONFIG, *, args: TrainingArguments | None = None, **objects: Any) -> Measurement:
    """A real trial of small rows."""
    given = {"model": training.Straight(), "train_dataset": training.Rows(), **objects, **sent_arguments(args)}
    with ObjectFile(given) as file:
        workload = Workload(model="<model>", objects_path=file.path)
        request = TrialRequest(config=config, window_seconds=0.05)
        return run_trial(TrialOrder(request=request, workload=workload.to_json(), device="cpu"), Channel(io.BytesIO()))


class Accumulating(Trainer):
    """Settles its accumulation itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.gradient_accumulation_steps = 3


@pytest.mark.parametrize(
    ("trainer_cls", "accelerator"), [(Accumulating, None), (Trainer, {"gradient_accumulation_kwargs": {"num_steps": 3}})]
)
def test_a_step_of_more_samples_than_were_asked_for_is_no_measurement(trainer_cls: type[Trainer], accelerator: Any, tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=accelerator)
    failure = unsound(trial(args=args, trainer_cls=trainer_cls))
    assert failure is not None
    assert failure.reason is Reason.KNOB_WITHOUT_EFFECT
    assert failure.message == "gradient_accumulation_steps: asked for 1, the run had 3"


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_accumulation_as_it_is_asked_for_is_seen(steps: int) -> None:
    assert unsound(trial(CONFIG.but(gradient_accumulation_steps=steps), trainer_cls=Trainer)) is None


def test_a_model_whose_parameters_are_all_frozen_is_refused() -> None:
    with refused("^Straight has nothing to train: all of its parameters are frozen", hint="is_trainable=True"):
        trial(model=training.Straight().requires_grad_(False))


def test_an_optimizer_of_another_model_is_refused_and_one_of_a_part_is_not() -> None:
    model = training.Straight()
    with refused("trains no parameter of the model", hint="optimizer_cls_and_kwargs"):
        trial(model=model, trainer_arguments={"optimizers": (torch.optim.SGD(training.Straight().parameters()), None)})
    assert unsound(trial(model=model, trainer_arguments={"optimizers": (torch.optim.SGD([model.layer.bias]), None)})) is None


class Saving(Trainer):
    """Switches checkpointing on, whatever its arguments say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.activation_checkpointing_enable()  # type: ignore[union-attr]


@pytest.mark.parametrize(("trainer_cls", "off"), [(Saving, True), (Trainer, False)])
def test_checkpointing_that_code_switches_on_is_switched_off_and_said(trainer_cls: type[Trainer], off: bool) -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rows = [{"input_ids": torch.arange(8), "labels": torch.tensor(0)}] * 16
    found = trial(model=BertForSequenceClassification(BertConfig(**shape)), train_dataset=rows, trainer_cls=trainer_cls)
    assert unsound(found) is None
    assert (found.facts or {})["checkpointing_switched_off"] is off
