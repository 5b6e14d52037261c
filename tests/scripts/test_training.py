"""The training of a script: real trials of it, and one line where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autofit.errors import ScriptError
from autofit.problem.config import Precision
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.trial import Outcome, Reason
from tests.refusals import refused
from tests.scripts.place import BUILD, CONFIG, PREAMBLE, TRAIN, Place


def test_an_evaluation_before_the_training_sees_the_first_rows_only(place: Place) -> None:
    place.script("""
        class Counting(Trainer):
            seen = 0
            def prediction_step(self, model, inputs, *args, **kwargs):
                self.seen += len(inputs["labels"])
                return super().prediction_step(model, inputs, *args, **kwargs)
        args.per_device_eval_batch_size = 2
        trainer = Counting(model=model(), args=args, train_dataset=rows, eval_dataset=rows * 20)
        metrics = trainer.evaluate()
        said(rows=trainer.seen, loss="eval_loss" in metrics)
        trainer.train()
    """)
    facts = place.describe()
    assert any("before it trains, the script evaluates" in text for text in facts["warnings"])
    assert place.heard() == {"rows": 4, "loss": True}


def test_an_evaluation_before_the_training_that_wants_all_rows_gets_them(place: Place) -> None:
    place.script("""
        def metrics(found):
            assert len(found.label_ids) == 22
            return {"rows": len(found.label_ids)}
        trainer = Trainer(model=model(), args=args, train_dataset=rows, eval_dataset=rows * 2, compute_metrics=metrics)
        said(rows=trainer.evaluate()["eval_rows"])
        trainer.train()
    """)
    facts = place.describe()
    assert not any("the script evaluates" in text for text in facts["warnings"])
    assert place.heard() == {"rows": 22}


def test_a_loader_of_its_own_that_ignores_the_batch_size_is_no_answer(place: Place) -> None:
    place.script("""
        class Own(Trainer):
            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(self.train_dataset, batch_size=5, collate_fn=self.data_collator)
        Own(model=model(), args=args, train_dataset=rows).train()
    """)
    result = place.run(CONFIG.but(per_device_train_batch_size=4))
    assert result.failure is not None
    assert result.failure.reason is Reason.KNOB_WITHOUT_EFFECT
    assert "per_device_train_batch_size" in result.failure.message
    assert place.run(CONFIG.but(per_device_train_batch_size=5)).outcome is Outcome.COMPLETED


def test_weights_that_the_script_stores_in_16_bit_are_told(place: Place) -> None:
    place.script("""
        m = model().to(torch.bfloat16 if args.bf16 else torch.float32)
        Trainer(model=m, args=args, train_dataset=rows).train()
    """)
    assert place.describe()["weights_dtype"] == "float32"
    result = place.run(CONFIG.but(precision=Precision.BF16))
    assert result.measurement is not None
    assert (result.measurement.facts or {})["weight_dtype"] == "bfloat16"


def test_what_libraries_read_when_they_are_imported_is_set_before(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    home = f'os.environ["HF_HOME"] = {str(tmp_path / "home")!r}\n'
    check = f'import huggingface_hub.constants\nassert huggingface_hub.constants.HF_HOME == {str(tmp_path / "home")!r}\n'
    script.write_text("import os\n" + home + check + PREAMBLE + BUILD + TRAIN)
    with ProcessRunner(Workload(model="train.py", script=(str(script), str(tmp_path / "out"))), "cpu") as own:
        assert own.describe()["model"]["class"] == "BertForSequenceClassification"


def test_the_script_runs_as_python_would_run_it(place: Place) -> None:
    (place.directory / "helper.py").write_text("VALUE = 5\n")
    place.script(
        """
        import helper
        assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
        said(argv=sys.argv, file=__file__, path=sys.path[0], helper=helper.VALUE, cwd=os.getcwd())
        Trainer(model=model(), args=args, train_dataset=rows).train()
        """,
        "--lr",
        "1",
    )
    assert place.run().outcome is Outcome.COMPLETED
    path = str(place.directory / "train.py")
    assert place.heard() == {
        "argv": [path, str(place.out), "--lr", "1"], "file": path, "path": str(place.directory), "helper": 5, "cwd": os.getcwd(),
    }  # fmt: skip


def test_a_subclass_with_its_own_optimizer_keeps_it(place: Place) -> None:
    place.script("""
        class Own(Trainer):
            def create_optimizer(self, model=None):
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
                return self.optimizer
        Own(model=model(), args=args, train_dataset=rows).train()
    """, build='args = TrainingArguments(OUT, optim="adafactor", use_cpu=True, report_to="none")\n')
    facts = place.describe()
    assert facts["script"]["own_optimizer"] is True
    assert (facts["script"]["own"]["optim"], facts["script"]["set_in_code"]) == ("adafactor", [])
    assert any("its own optimizer" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


def test_checkpointing_of_the_script_itself_is_switched_off_where_a_trial_is_without(place: Place) -> None:
    place.script(
        "m = model()\nm.gradient_checkpointing_enable()\nTrainer(model=m, args=args, train_dataset=rows).train()\n"
    )
    result = place.run()
    assert result.measurement is not None, result.failure
    assert (result.measurement.facts or {})["checkpointing_switched_off"] is True


def test_a_subclass_that_only_says_which_optimizer_is_made_keeps_it(place: Place) -> None:
    place.script("""
        class Own(Trainer):
            @staticmethod
            def get_optimizer_cls_and_kwargs(args, model=None):
                return torch.optim.SGD, {"lr": 0.1}
        Own(model=model(), args=args, train_dataset=rows).train()
    """)
    assert place.describe()["script"]["own_optimizer"] is True
    assert place.run().outcome is Outcome.COMPLETED


EAGER = CONFIG.but(extra=(("attn_implementation", "eager"),))


def test_another_attention_is_tried_on_the_model_that_the_script_loads(place: Place) -> None:
    place.script("""
        class Own(Trainer):
            def compute_loss(self, model, *args, **kwargs):
                said(attention=[model.config._attn_implementation, *{m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}])
                return super().compute_loss(model, *args, **kwargs)
        Own(model=model(), args=args, train_dataset=rows).train()
    """)
    assert place.describe()["extras"]["attn"]["default"] == "sdpa"
    result = place.run(EAGER)
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert json.loads(place.said.read_text()) == {"attention": ["eager", "eager"]}
    assert result.measurement is not None
    facts = result.measurement.facts or {}
    assert (facts["asked"]["attn_implementation"], facts["seen"]["attn_implementation"]) == ("eager", "eager")


def test_a_model_that_is_made_when_the_training_begins_is_as_the_trial_asks(place: Place) -> None:
    place.script("""
        def init():
            made = model()
            made.gradient_checkpointing_enable()
            return made
        Trainer(model_init=init, args=args, train_dataset=rows).train()
    """)
    for config in (EAGER, CONFIG.but(gradient_checkpointing=True), CONFIG.but(precision=Precision.PURE_BF16)):
        result = place.run(config)
        assert result.outcome is Outcome.COMPLETED, result.failure


def test_early_stopping_schedulers_and_trackers_do_not_stop_a_trial(place: Place) -> None:
    place.script(
        """
        from transformers import EarlyStoppingCallback
        Trainer(model=model(), args=args, train_dataset=rows, eval_dataset=rows, callbacks=[EarlyStoppingCallback()]).train()
        """,
        build='args = TrainingArguments(OUT, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, use_cpu=True,\n'
        '    load_best_model_at_end=True, lr_scheduler_type="reduce_lr_on_plateau", eval_on_start=True)\n',
    )
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


def test_a_half_precision_model_is_described_as_such(place: Place) -> None:
    place.script("Trainer(model=model().to(torch.bfloat16), args=args, train_dataset=rows).train()\n")
    facts = place.describe()
    assert facts["weights_dtype"] == "bfloat16"
    assert facts["class"] == "BertForSequenceClassification"
    assert facts["n_params"] > 0
    assert facts["source"] == "script"
    assert facts["script"]["own"]["per_device_train_batch_size"] == 3


def test_one_model_has_one_digest_and_another_has_another(place: Place) -> None:
    place.script(TRAIN)
    digest = place.describe()["digest"]
    assert place.describe()["digest"] == digest
    place.script("Trainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=rows).train()\n")
    facts = place.describe()
    assert facts["digest"] != digest
    assert facts["supports_gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no training here')", "^train.py ended without building a Trainer$"),
        (
            "Trainer(model=model(), args=args, train_dataset=rows)",
            "^train.py built a Trainer and ended without calling train",
        ),
        ("sys.exit(3)", r"^train.py called sys.exit\(3\) before it trained$"),
        ("sys.exit('no GPU')", r"^train.py called sys.exit\('no GPU'\) before it trained$"),
        (
            "Trainer(model=model(), args=args, train_dataset=rows)\nsys.exit()",
            r"^train.py called sys.exit\(\) before it trained$",
        ),
        ("raise KeyError('column')", "^train.py raised before it trained: KeyError: 'column'$"),
        ("import no_such_module", "^train.py raised before it trained: ModuleNotFoundError"),
        ("input('which GPU? ')", "EOFError: the script reads standard input"),
        ("sys.stdin.read()", "EOFError: the script reads standard input"),
        ("Trainer(model=model(), args=args).train()", "no train_dataset"),
        ("Trainer(model=model(), args=args, train_dataset=[]).train()", "training dataset is empty"),
        ("TrainingArguments(OUT, fsdp=True)", "the script trains with fsdp: script mode tunes one process"),
        ("TrainingArguments(OUT, deepspeed={'zero_optimization': {'stage': 2}})", "the script trains with deepspeed"),
    ],
)
def test_a_script_that_does_not_train_is_refused_in_one_line(place: Place, text: str, message: str) -> None:
    place.script(text)
    with refused(message, kind=ScriptError):
        place.describe()
    result = place.run()
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason is Reason.ERROR


def test_the_scripts_own_traceback_is_kept(place: Place) -> None:
    place.script("def load():\n    raise ValueError('bad data')\nload()\n")
    with pytest.raises(ScriptError) as caught:
        place.describe()
    assert "in load" in caught.value.traceback
    assert "ValueError: bad data" in caught.value.traceback
    assert "runpy" not in caught.value.traceback
    failure = place.run().failure
    assert failure is not None
    assert failure.traceback is not None
    assert "in load" in failure.traceback


def test_what_a_script_printed_before_it_left_is_kept(place: Place) -> None:
    place.script(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\np.parse_args([])\n"
    )
    with pytest.raises(ScriptError) as caught:
        place.describe()
    assert caught.value.message == "train.py called sys.exit(2) before it trained"
    assert "the following arguments are required: --lr" in caught.value.traceback


@pytest.mark.parametrize(
    ("compute_loss", "message"),
    [
        ("return None", "compute_loss returned None"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "out of memory"),
        (
            "return super().compute_loss(model, {'input_ids': inputs['input_ids']}, **kw)",
            "did not return a loss",
        ),
    ],
)
def test_a_training_that_fails_is_a_trial_with_its_own_traceback_even_where_the_script_swallows_it(
    place: Place, compute_loss: str, message: str
) -> None:
    place.script(f"""
        class Own(Trainer):
            def compute_loss(self, model, inputs, **kw):
                {compute_loss}
        try:
            Own(model=model(), args=args, train_dataset=rows).train()
        except Exception:
            print("training failed, never mind")
    """)
    result = place.run()
    assert result.failure is not None
    assert message in result.failure.message
    assert "compute_loss" in (result.failure.traceback or "")
    expected = Reason.OUT_OF_MEMORY if "memory" in message else Reason.ERROR
    assert result.failure.reason is expected


def test_of_two_trainers_the_first_that_trains_is_measured_and_said(place: Place) -> None:
    place.script("""
        teacher = Trainer(model=model(), args=args, train_dataset=rows)
        student = Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=rows)
        teacher.train()
        student.train()
    """)
    facts = place.describe()
    assert facts["class"] == "BertForSequenceClassification"
    assert any("trains more than once" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


WAYS: dict[str, tuple[str, str]] = {
    "arguments are left out": ("", "Trainer(model=model(), train_dataset=rows).train()"),
    "arguments are copied": (
        BUILD,
        "import copy\nother = copy.deepcopy(args)\nother.learning_rate = 1.0\nTrainer(model=model(), args=other, train_dataset=rows).train()",
    ),
    "arguments are replaced": (
        BUILD,
        "import dataclasses\nother = dataclasses.replace(args, seed=1)\nTrainer(model=model(), args=other, train_dataset=rows).train()",
    ),
    "arguments come from a pickle": (
        BUILD,
        "import pickle\nTrainer(model=model(), args=pickle.loads(pickle.dumps(args)), train_dataset=rows).train()",
    ),
    "the model is made by model_init": (
        BUILD,
        "Trainer(model_init=model, args=args, train_dataset=rows).train()",
    ),
    "the optimizer is handed over": (
        BUILD,
        "m = model()\nTrainer(model=m, args=args, train_dataset=rows, optimizers=(torch.optim.SGD(m.parameters(), lr=0.1), None)).train()",
    ),
    "the dataset is a table": (
        BUILD,
        "import datasets\nTrainer(model=model(), args=args, train_dataset=datasets.Dataset.from_list(rows)).train()",
    ),
    "the dataset is a stream": (
        "args = TrainingArguments(OUT, max_steps=10, use_cpu=True)\n",
        "class S(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        yield from rows\n"
        "Trainer(model=model(), args=args, train_dataset=S()).train()",
    ),
    "rows are grouped by length": (
        'args = TrainingArguments(OUT, train_sampling_strategy="group_by_length", use_cpu=True)\n',
        TRAIN,
    ),
    "workers load the data": (
        "args = TrainingArguments(OUT, dataloader_num_workers=2, use_cpu=True)\n",
        TRAIN,
    ),
    "the machine cannot run what the script asks for": (
        "args = TrainingArguments(OUT, bf16=True, tf32=True)\n",
        TRAIN,
    ),
    "a checkpoint is saved and loaded again": (
        BUILD,
        "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    model().save_pretrained(d)\n"
        "    Trainer(model=BertForSequenceClassification.from_pretrained(d), args=args, train_dataset=rows).train()",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_completes_where(way: str, place: Place) -> None:
    build, text = WAYS[way]
    place.script(text, build=build)
    result = place.run(CONFIG.but(precision=Precision.BF16))
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert result.measurement is not None
    seen = (result.measurement.facts or {})["seen"]
    assert seen.get("autocast_dtype", "bfloat16") == "bfloat16"


def test_a_script_that_ends_its_own_process_is_refused_in_one_line(place: Place) -> None:
    place.script("print('goodbye', flush=True)\nos._exit(7)\n")
    with refused("^train.py ended with status 7 before it trained$", kind=ScriptError) as caught:
        place.describe()
    assert getattr(caught.value, "traceback", "").endswith("goodbye")


def test_a_scripts_own_evaluation_is_tried_and_its_data_is_named(place: Place) -> None:
    evaluates = """
        def metrics(prediction):
            return {"rows": len(prediction.predictions)}
        Trainer(model=model(), args=args, train_dataset=rows, eval_dataset=rows[:5], compute_metrics=metrics).train()
    """
    place.script(evaluates)
    found = place.describe()["script"]["evaluation"]
    assert found["batch_size"] == 8
    assert found["data"].startswith("list of 5 rows, ")
    result = place.run(CONFIG.but(extra=(("per_device_eval_batch_size", 2),)), evaluate=True, optimizer_steps=2)
    assert result.measurement is not None, result.failure
    found = (result.measurement.facts or {})["evaluation"]
    assert (found["batch"], found["batches"], found["rows"], found["loss_only"]) == (2, 3, 5, False)
    place.script(TRAIN)
    assert place.describe()["script"]["evaluation"] is None


def test_workers_of_the_loader_reach_a_script(place: Place) -> None:
    place.script(TRAIN)
    result = place.run(CONFIG.but(extra=(("dataloader_num_workers", 2), ("dataloader_prefetch_factor", 3))))
    assert result.measurement is not None, result.failure
    loader = (result.measurement.facts or {})["loader"]
    assert loader["dataloader_num_workers"] == result.measurement.loader_workers == 2
    assert loader["dataloader_prefetch_factor"] == 3
    assert loader["wait_seconds"] > 0


def test_a_training_that_another_callback_ends_is_no_measurement(place: Place) -> None:
    place.script("""
        from transformers import TrainerCallback
        class Stop(TrainerCallback):
            def on_step_begin(self, args, state, control, **more):
                control.should_training_stop = True
        Trainer(model=model(), args=args, train_dataset=rows, callbacks=[Stop()]).train()
    """)
    failure = place.run().failure
    assert failure is not None
    assert failure.message == "the training ended after 0 optimizer steps: too few to measure"


def test_a_confirmation_runs_the_whole_accumulation(place: Place) -> None:
    place.script(TRAIN)
    result = place.run(full_length=True, optimizer_steps=3)
    assert result.measurement is not None
    assert result.measurement.optimizer_steps == 3
    assert len(result.measurement.micro_step_seconds) == 2 * 4


PREBUILT = {
    "by the Trainer": ("trainer.create_optimizer_and_scheduler(num_training_steps=1000)", False),
    "by the Trainer, with a schedule of the script's own": (
        "trainer.create_optimizer()\ntrainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)",
        False,
    ),
    "by the script": ("trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)", True),
    "by both": ("trainer.create_optimizer()\ntrainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)", True),
}


@pytest.mark.parametrize("way", PREBUILT)
def test_an_optimizer_that_the_trainer_makes_before_its_training_is_the_one_that_optim_names(place: Place, way: str) -> None:
    text, own = PREBUILT[way]
    place.script(f"trainer = Trainer(model=model(), args=args, train_dataset=rows)\n{text}\nsaid(made=type(trainer.optimizer).__name__)\ntrainer.train()\n")
    facts = place.describe()
    assert facts["script"]["own_optimizer"] is own
    assert any("its own optimizer" in warning for warning in facts["warnings"]) is own
    result = place.run(CONFIG.but(optim="adafactor"))
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert place.heard() == {"made": "SGD" if own else "Adafactor"}
