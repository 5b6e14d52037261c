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
    "with an evaluation": "dataclasses.replace(base, output_dir=sys.argv[1] + '/fold', eval_strategy='epoch')",
    "with other steps": "dataclasses.replace(base, output_dir=sys.argv[1] + '/fold', max_steps=7)",
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
def test_a_copy_of_arguments_asks_for_what_its_original_did(copied: str, place: Place) -> None:
    place.script(
        f"import copy, dataclasses\nargs = {copied}\nargs.learning_rate = 1e-3\n" + "Trainer(model=model(), args=args, train_dataset=rows).train()\n",
        build='base = TrainingArguments(OUT, per_device_train_batch_size=3, optim="adafactor", bf16=True, use_cpu=True, report_to="none")\n',
    )
    script = place.describe()["script"]
    own = script["own"]
    assert (own["per_device_train_batch_size"], own["optim"], own["bf16"], script["set_in_code"]) == (3, "adafactor", True, [])
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


def test_what_a_copy_was_given_anew_is_its_own(place: Place) -> None:
    place.script(
        "import dataclasses\nargs = dataclasses.replace(base, per_device_train_batch_size=5)\nTrainer(model=model(), args=args, train_dataset=rows).train()\n",
        build='base = TrainingArguments(OUT, per_device_train_batch_size=3, optim="adafactor", use_cpu=True, report_to="none")\n',
    )
    script = place.describe()["script"]
    own = script["own"]
    assert (own["per_device_train_batch_size"], own["optim"]) == (5, "adafactor")
    assert script["set_in_code"] == ["per_device_train_batch_size"], "a flag would have no effect"


def test_an_assignment_of_what_a_trial_runs_with_anyway_counts_as_one(place: Place) -> None:
    place.script("args.per_device_train_batch_size = 8\nTrainer(model=model(), args=args, train_dataset=rows).train()\n")
    script = place.describe()["script"]
    assert script["set_in_code"] == ["per_device_train_batch_size"]
    assert script["own"]["per_device_train_batch_size"] == 8


def test_what_the_script_sets_of_fields_that_only_later_trials_change_is_noted(place: Place) -> None:
    place.script("args.dataloader_num_workers, args.learning_rate = 2, 1.0\nTrainer(model=model(), args=args, train_dataset=rows).train()\n")
    facts = place.describe()
    assert facts["script"]["set_in_code"] == ["dataloader_num_workers"]
    assert not any("in its own code" in text for text in facts["warnings"])


def test_what_the_script_compiles_itself_is_no_knob(place: Place) -> None:
    place.script(TRAIN, build='args = TrainingArguments(OUT, torch_compile=True, use_cpu=True, report_to="none")\n')
    assert "your own arguments set torch_compile" in place.describe()["extras"]["compile"]["problem"]


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


OWN_CLASSES = {
    "before": ("self.gradient_accumulation_steps = self.total // self.per_device_train_batch_size; super().__post_init__()", ["gradient_accumulation_steps"]),
    "after": ("super().__post_init__(); self.optim = 'adafactor'", ["optim"]),
    "nothing": ("super().__post_init__()", []),
}


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_what_a_class_of_the_scripts_own_sets_is_set_in_code(place: Place, name: str) -> None:
    body, fields = OWN_CLASSES[name]
    place.script(
        TRAIN,
        "--output_dir", "out", "--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "2",
        build=f"""
sys.argv.pop(1)
from dataclasses import dataclass
from transformers import HfArgumentParser
@dataclass
class Own(TrainingArguments):
    total: int = 8
    def __post_init__(self):
        {body}
args, = HfArgumentParser(Own).parse_args_into_dataclasses()
""",
    )  # fmt: skip
    script = place.describe()["script"]
    assert (script["origin"], script["set_in_code"]) == ("flags", fields)
    assert script["own"]["gradient_accumulation_steps"] == (4 if name == "before" else 1)
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


PARSE = "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()"
PARSED = {
    "TRL's parser": ("args, = TrlParser((TrainingArguments,)).parse_args_and_config()", ["--output_dir", "o", "--use_cpu"], "flags"),
    "TRL's parser on nothing": ("args, = TrlParser((TrainingArguments,)).parse_args_and_config()", [], "flags"),
    "what another parser left": (
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data'); own, rest = p.parse_known_args()\n"
        "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=rest)",
        ["--output_dir", "o", "--data", "x", "--use_cpu"],
        "flags",
    ),
    "what another parser left in sys.argv": (f"sys.argv.remove('eval'); {PARSE}", ["eval", "--use_cpu"], "flags"),
    "words that the code puts in front": (f"sys.argv[1:1] = ['--output_dir', OUT]; {PARSE}", ["--use_cpu"], "flags"),
    "words that the code adds": (f"sys.argv += ['--output_dir', 'o']; {PARSE}", ["--use_cpu"], "code"),
    "a command line of the code's own": (f"sys.argv[1:] = ['--output_dir', 'o', '--use_cpu']; {PARSE}", ["--use_cpu", "--bf16"], "code"),
    "an empty list": ("args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=[])", ["--use_cpu"], "code"),
    "a dict of a file": ("args, = HfArgumentParser(TrainingArguments).parse_dict(json.load(open(sys.argv[1])))", ["CONFIG"], "file"),
    "a file": ("args, = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])", ["CONFIG"], "file"),
    "a dict of the code": ("args, = HfArgumentParser(TrainingArguments).parse_dict({'learning_rate': 1.0})", ["CONFIG"], "code"),
}


@pytest.mark.parametrize("name", PARSED)
def test_where_arguments_come_from_is_seen_through_other_parsers(place: Place, name: str) -> None:
    text, words, origin = PARSED[name]
    if "TrlParser" in text:
        pytest.importorskip("trl")
        text = f"from trl import TrlParser\n{text}"
    (place.directory / "config.json").write_text('{"output_dir": "o", "per_device_train_batch_size": 2}')
    words = [word.replace("CONFIG", str(place.directory / "config.json")) for word in words]
    build = f"sys.argv.pop(1)\nfrom transformers import HfArgumentParser\n{text}\n"
    place.script(TRAIN, *words, build=build)
    assert place.describe()["script"]["origin"] == origin


def test_the_length_of_a_training_is_the_scripts_own_until_it_begins(place: Place) -> None:
    place.script(
        """
        from transformers import TrainerCallback
        class Seen(TrainerCallback):
            def on_train_begin(self, args, state, control, **more):
                said(before=before, during=[args.num_train_epochs, args.max_steps > 7])
        before = [args.num_train_epochs, args.max_steps]
        trainer = Trainer(model=model(), args=args, train_dataset=rows, callbacks=[Seen()])
        before += [trainer.args.num_train_epochs, trainer.args.max_steps]
        trainer.train()
        """,
        build='args = TrainingArguments(OUT, num_train_epochs=5, max_steps=7, use_cpu=True, report_to="none")\n',
    )
    assert place.run().outcome is Outcome.COMPLETED
    assert place.heard() == {"before": [5, 7, 5, 7], "during": [1, True]}


def test_a_schedule_that_is_as_long_as_the_training_does_not_end_a_trial(place: Place) -> None:
    place.script("""
        m = model()
        optimizer = torch.optim.AdamW(m.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=2)
        Trainer(model=m, args=args, train_dataset=rows, optimizers=(optimizer, schedule)).train()
    """)
    result = place.run(full_length=True, optimizer_steps=5)
    assert result.outcome is Outcome.COMPLETED, result.failure
