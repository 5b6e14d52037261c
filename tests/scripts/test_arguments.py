"""The arguments of a script: what it asked for is known, and what a trial sets is what runs."""

from __future__ import annotations

import pytest

from autofit.problem.config import Precision
from autofit.trials.trial import Outcome
from tests.scripts.place import CONFIG, TRAIN, Place


def test_the_configuration_is_what_the_script_reads_back(place: Place) -> None:
    place.script("""
        trainer = Trainer(model=model(), args=args, train_dataset=rows)
        said(batch=args.per_device_train_batch_size, accumulation=args.gradient_accumulation_steps, bf16=args.bf16,
             mixed=args.mixed_precision, optim=args.optim.value, same=trainer.args is args, report=args.report_to,
             checkpointing=[args.gradient_checkpointing, args.activation_checkpointing], out=args.output_dir == OUT)
        trainer.train()
    """)
    config = CONFIG.but(precision=Precision.BF16, optim="adafactor", gradient_checkpointing=True)
    result = place.run(config)
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert place.heard() == {
        "batch": 2, "accumulation": 2, "bf16": True, "mixed": "bf16", "optim": "adafactor", "same": True, "report": [],
        "checkpointing": [True, True], "out": False,
    }  # fmt: skip
    assert result.measurement is not None
    facts = result.measurement.facts or {}
    assert facts["asked"] == facts["seen"]
    assert facts["seen"]["autocast_dtype"] == "bfloat16"
    assert facts["seen"]["gradient_checkpointing"] is True


def test_what_the_script_sets_after_its_arguments_are_made_is_put_back_and_reported(place: Place) -> None:
    place.script("args.per_device_train_batch_size = 7\nargs.bf16 = True\n" + TRAIN)
    facts = place.describe()
    assert facts["script"]["set_in_code"] == ["bf16", "per_device_train_batch_size"]
    assert facts["script"]["own"]["per_device_train_batch_size"] == 7
    assert any("bf16, per_device_train_batch_size" in text for text in facts["warnings"])
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


COPIES = {
    "deepcopy": "copy.deepcopy(base); args.output_dir = sys.argv[1] + '/fold'",
    "replace": "dataclasses.replace(base, output_dir=sys.argv[1] + '/fold')",
    "to_dict": "TrainingArguments(**{**base.to_dict(), 'output_dir': sys.argv[1] + '/fold'})",
    "with other steps": "dataclasses.replace(base, output_dir=sys.argv[1] + '/fold', max_steps=7)",
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
def test_a_copy_of_arguments_asks_for_what_its_original_did(copied: str, place: Place) -> None:
    place.script(
        f"import copy, dataclasses\nargs = {copied}\nargs.learning_rate = 1e-3\n" + "Trainer(model=model(), args=args, train_dataset=rows).train()\n",
        build='base = TrainingArguments(OUT, per_device_train_batch_size=3, optim="adafactor", bf16=True, use_cpu=True, report_to="none")\n',
    )
    own = place.describe()["script"]["own"]
    assert (own["per_device_train_batch_size"], own["optim"], own["bf16"]) == (3, "adafactor", True)
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


def test_what_a_copy_was_given_anew_is_its_own(place: Place) -> None:
    place.script(
        "import dataclasses\nargs = dataclasses.replace(base, per_device_train_batch_size=5)\nTrainer(model=model(), args=args, train_dataset=rows).train()\n",
        build='base = TrainingArguments(OUT, per_device_train_batch_size=3, optim="adafactor", use_cpu=True, report_to="none")\n',
    )
    own = place.describe()["script"]["own"]
    assert (own["per_device_train_batch_size"], own["optim"]) == (5, "adafactor")


def test_an_assignment_of_what_a_trial_runs_with_anyway_counts_as_one(place: Place) -> None:
    place.script("args.per_device_train_batch_size = 8\nTrainer(model=model(), args=args, train_dataset=rows).train()\n")
    script = place.describe()["script"]
    assert script["set_in_code"] == ["per_device_train_batch_size"]
    assert script["own"]["per_device_train_batch_size"] == 8


def test_a_list_in_the_code_is_no_command_line(place: Place) -> None:
    build = "from transformers import HfArgumentParser\nargs, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(GIVEN)\n"
    train = "Trainer(model=model(), args=args, train_dataset=rows).train()\n"
    place.script(train, build=build.replace("GIVEN", 'args=["--output_dir", OUT, "--use_cpu", "--report_to", "none"]'))
    assert place.describe()["script"]["origin"] == "code"
    place.script(train, "--output_dir", "out", "--use_cpu", build="sys.argv.pop(1)\n" + build.replace("GIVEN", ""))
    assert place.describe()["script"]["origin"] == "flags"


def test_an_evaluation_that_follows_from_the_strategy_is_seen(place: Place) -> None:
    place.script(
        "Trainer(model=model(), args=args, train_dataset=rows, eval_dataset=rows if args.do_eval else None).train()\n",
        build='args = TrainingArguments(OUT, eval_strategy="epoch", use_cpu=True, report_to="none")\n',
    )
    assert place.describe()["script"]["evaluation"] is not None


def test_a_schedule_that_needs_evaluations_leaves_its_keywords_behind(place: Place) -> None:
    place.script(
        "Trainer(model=model(), args=args, train_dataset=rows, eval_dataset=rows).train()\n",
        build='args = TrainingArguments(OUT, eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau", '
        'lr_scheduler_kwargs={"patience": 2, "factor": 0.5}, use_cpu=True, report_to="none")\n',
    )
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure
