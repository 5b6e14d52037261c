"""Script mode: unmodified scripts are tuned in real trials, leave no trace, and say in one line why they cannot be tuned."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.config import Precision, TrialConfig
from autofit.errors import ScriptError
from autofit.process import ProcessRunner
from autofit.result import load
from autofit.runner import TrialRequest, TrialResult
from autofit.spec import Workload
from autofit.trial import Outcome, Reason
from tests.cli.runs import autofit
from tests.refusals import refused

SCRIPTS = Path(__file__).parent.parent / "examples" / "scripts"
CONFIG = TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4)

#: what a small script has above the lines that a test is about: a model, rows, and arguments whose output directory is given
PREAMBLE = """
import json, os, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

OUT = sys.argv[1]
def model():
    return BertForSequenceClassification(BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50, max_position_embeddings=16))
rows = [{"input_ids": [i % 50] * 8, "attention_mask": [1] * 8, "labels": i % 2} for i in range(11)]
def said(**facts):
    with open(os.environ["SAID"], "w") as handle:
        json.dump(facts, handle)
"""
BUILD = 'args = TrainingArguments(OUT, per_device_train_batch_size=3, report_to="none", use_cpu=True)\n'


class Place:
    """A directory with scripts and outputs, and a runner for trials of them.

    Attributes:
        directory: where the scripts lie; their output directory is `out` in it, and holds something already.
        said: where a script may leave what it saw.
    """

    def __init__(self, directory: Path, runner: ProcessRunner, said: Path) -> None:
        self.directory, self.out, self.said, self._runner = directory, directory / "out", said, runner
        self.out.mkdir()
        (self.out / "model.bin").write_bytes(b"precious")

    def script(self, text: str, *arguments: str, build: str = BUILD) -> None:
        path = self.directory / "train.py"
        path.write_text(PREAMBLE + build + textwrap.dedent(text))
        self._runner.workload = Workload(model="train.py", script=(str(path), str(self.out), *arguments))

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._runner.describe()["model"]
        return facts

    def run(self, config: TrialConfig = CONFIG, **more: Any) -> TrialResult:
        return self._runner.run(
            TrialRequest(config=config, timeout_seconds=60.0, **{"window_seconds": 0.1, **more})
        )

    def heard(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.said.read_text())
        return facts


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessRunner]:
    os.environ["SAID"] = str(tmp_path_factory.mktemp("said") / "said.json")
    with ProcessRunner(Workload(model="bert-tiny"), "cpu") as runner:
        yield runner
    del os.environ["SAID"]


@pytest.fixture
def place(runner: ProcessRunner, tmp_path: Path) -> Iterator[Place]:
    said = Path(os.environ["SAID"])
    said.unlink(missing_ok=True)
    place = Place(tmp_path, runner, said)
    yield place
    assert contents(place.out) == {"model.bin": b"precious"}


def contents(directory: Path) -> dict[str, bytes | None]:
    """Everything in a directory, by relative path; None for directories."""
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")
    }


TRAIN = "Trainer(model=model(), args=args, train_dataset=rows).train()\n"


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


def test_nothing_after_the_training_runs_and_nothing_is_written(place: Place) -> None:
    place.script(f"""
        try:
            {TRAIN.strip()}
        except BaseException:
            pass
        finally:
            for write in (lambda: open({str(place.directory / "after.txt")!r}, "w"), lambda: os.mkdir({str(place.directory / "after")!r}),
                          lambda: torch.save(1, {str(place.directory / "after.pt")!r}), lambda: model().save_pretrained(OUT)):
                try:
                    write()
                except BaseException:
                    pass
        said(reached=True)
    """)
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert sorted(p.name for p in place.directory.iterdir()) == ["out", "train.py"]
    assert not place.said.exists()


def test_what_is_saved_before_the_training_goes_elsewhere(place: Place) -> None:
    place.script(
        "os.makedirs(OUT + '/logs', exist_ok=True)\nmodel().save_pretrained(OUT)\nmodel().config.save_pretrained(OUT)\n"
        + TRAIN
    )
    facts = place.describe()
    assert any(str(place.out) in text and "nothing of it stays" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


def test_files_that_the_script_writes_to_its_output_directory_lie_elsewhere_and_can_be_read_back(place: Place) -> None:
    place.script("""
        import logging, pathlib
        assert open(OUT + "/model.bin").read() == "precious"
        with open(OUT + "/labels.json", "w") as handle:
            json.dump({"a": 1}, handle)
        with open(OUT + "/model.bin", "a") as handle:
            handle.write(", and more")
        pathlib.Path(OUT, "notes.txt").write_text("note")
        torch.save({"b": 2}, OUT + "/extra.pt")
        logging.getLogger("own").addHandler(logging.FileHandler(OUT + "/own.log"))
        said(labels=json.load(open(OUT + "/labels.json")), model=open(OUT + "/model.bin").read(), extra=torch.load(OUT + "/extra.pt"),
             notes=pathlib.Path(OUT, "notes.txt").read_text())
        Trainer(model=model(), args=args, train_dataset=rows).train()
    """)
    facts = place.describe()
    assert any(str(place.out) in text and "nothing of it stays" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED
    assert place.heard() == {"labels": {"a": 1}, "model": "precious, and more", "extra": {"b": 2}, "notes": "note"}


@pytest.mark.parametrize(
    ("change", "build"),
    [
        ("os.remove(OUT + '/model.bin')", BUILD),
        ("os.rename(OUT + '/model.bin', OUT + '/old.bin')", BUILD),
        ("os.remove(out + '/model.bin')", "out = sys.argv[3]\n"),
        ("os.rename(out + '/model.bin', out + '/old.bin')", "out = sys.argv[3]\n"),
    ],
)
def test_what_lies_in_the_output_directory_is_not_changed_even_before_arguments_are_made(
    place: Place, change: str, build: str
) -> None:
    later = "" if build is BUILD else BUILD
    place.script(f"{change}\n{later}{TRAIN}", "--output_dir", str(place.out), build=build)
    assert any("the script removes or renames" in text and "model.bin" in text for text in place.describe()["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


#: what scripts do with files in their output directory (OUT) before they train
FILES = {
    "a dataset that is saved and loaded": """
        from datasets import Dataset, load_from_disk
        Dataset.from_list(rows).save_to_disk(OUT + "/data")
        rows = load_from_disk(OUT + "/data")""",
    "rows that are written and loaded": """
        from datasets import load_dataset
        with open(OUT + "/rows.jsonl", "w") as handle:
            handle.writelines(json.dumps(row) + "\\n" for row in rows)
        rows = load_dataset("json", data_files=OUT + "/rows.jsonl", split="train")""",
    "a file that is put in place": """
        with open(OUT + "/args.tmp", "w") as handle:
            handle.write("x")
        os.replace(OUT + "/args.tmp", OUT + "/args.json")
        assert os.path.exists(OUT + "/args.json") and os.listdir(OUT)""",
    "a file that replaces another": """
        with open(OUT + "/model.tmp", "w") as handle:
            handle.write("x")
        os.replace(OUT + "/model.tmp", OUT + "/model.bin")
        assert open(OUT + "/model.bin").read() == "x" """,
    "a note that is written and removed": """
        import pathlib
        note = pathlib.Path(OUT, "note.txt")
        note.write_text("x")
        note.unlink()
        assert not note.exists()""",
    "tensors": """
        from safetensors.torch import load_file, save_file
        save_file({"a": torch.ones(2)}, OUT + "/a.safetensors")
        assert load_file(OUT + "/a.safetensors")["a"].sum() == 2""",
    "a cache of its own": """
        from datasets import Dataset
        rows = Dataset.from_list(rows).map(lambda row: row, cache_file_name=OUT + "/cache.arrow")""",
    "a copy of the script": "import shutil\nshutil.copy(__file__, OUT + '/train_copy.py')",
    "a directory that is moved": """
        os.makedirs(OUT + "/a/b")
        open(OUT + "/a/b/c", "w").close()
        os.rename(OUT + "/a", OUT + "/d")
        open(OUT + "/d/e", "w").close()
        os.remove(OUT + "/d/e")""",
    "an untrained model": "Trainer(model=model(), args=args, train_dataset=rows).save_model(OUT)",
}


@pytest.mark.parametrize("text", FILES.values(), ids=list(FILES))
def test_what_scripts_do_with_their_output_directory_works_and_leaves_it_as_it_was(text: str, place: Place) -> None:
    place.script(textwrap.dedent(text).strip() + "\n" + TRAIN)
    place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


CLEAN_UPS = {
    "files": "import glob\nfor name in glob.glob(OUT + '/*'): os.remove(name)\n",
    "paths": "import pathlib\nfor path in pathlib.Path(OUT).iterdir(): path.unlink()\n",
    "the last run out of the way": "os.rename(OUT, OUT + '.bak')\nos.makedirs(OUT, exist_ok=True)\n",
    "a checkpoint": "import shutil\nshutil.rmtree(OUT, ignore_errors=True)\nos.makedirs(OUT)\n",
    "settings": "with open(OUT + '/model.bin', 'w') as handle: handle.write('{}')\n",
}


@pytest.mark.parametrize("text", CLEAN_UPS.values(), ids=list(CLEAN_UPS))
def test_a_constant_output_directory_is_as_safe_before_the_arguments_are_made(text: str, place: Place) -> None:
    # The project lies among the temporary files here, which makes nothing of it temporary.
    place.script(
        f"OUT = {str(place.out)!r}\n{text}{BUILD}{TRAIN}",
        build="",
    )
    place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}
    assert place.run().outcome is Outcome.COMPLETED
    assert not place.out.with_suffix(".bak").exists()


def test_what_is_saved_to_another_directory_does_not_overwrite_what_is_there(place: Place) -> None:
    other = place.directory / "untrained"
    other.mkdir()
    (other / "training_args.bin").write_bytes(b"of a real run")
    place.script(f"trainer = Trainer(model=model(), args=args, train_dataset=rows)\ntrainer.save_model({str(other)!r})\ntrainer.train()\n")
    assert place.run().outcome is Outcome.COMPLETED
    assert contents(other) == {"training_args.bin": b"of a real run"}


def test_a_killed_trial_leaves_nothing_in_the_output_directory(place: Place) -> None:
    place.script("os.makedirs(OUT + '/cache')\nopen(OUT + '/cache/rows', 'w').close()\nopen(OUT + '/own.log', 'w').close()\nos.kill(os.getpid(), 9)\n" + TRAIN)
    assert place.run().outcome is not Outcome.COMPLETED
    assert contents(place.out) == {"model.bin": b"precious"}


@pytest.mark.parametrize("build", [BUILD, "out = OUT\n"], ids=["after", "before the arguments"])
def test_a_directory_that_the_script_deletes_and_makes_anew_stays_as_it_was(place: Place, build: str) -> None:
    later = "" if build is BUILD else BUILD
    place.script(
        "import shutil\nshutil.rmtree(OUT)\nos.makedirs(OUT)\n"
        "with open(OUT + '/model.bin', 'w') as handle: handle.write('another')\n"
        f"said(model=open(OUT + '/model.bin').read())\n{later}{TRAIN}",
        "--output_dir",
        str(place.out),
        build=build,
    )
    facts = place.describe()
    assert any(f"the script removes or renames {place.out}" in text for text in facts["warnings"])
    assert place.heard() == {"model": "another"}
    assert place.run().outcome is Outcome.COMPLETED


def test_before_its_arguments_are_made_a_script_may_add_to_its_output_directory_and_nothing_of_it_stays(place: Place) -> None:
    place.script(
        f"""
        import pathlib, shutil
        from datasets import Dataset, load_from_disk
        out = sys.argv[3]
        shutil.rmtree(out + "/absent", ignore_errors=True)
        os.makedirs(out + "/cache", exist_ok=True)
        with open(out + "/args.tmp", "w") as handle:
            handle.write("x")
        os.replace(out + "/args.tmp", out + "/args.json")
        pathlib.Path(out, "rows.txt").write_text("y")
        assert os.path.exists(out + "/args.json") and os.path.exists(out + "/rows.txt")
        {BUILD.strip()}
        {TRAIN.strip()}
        """,
        "--output_dir",
        str(place.out),
        build="",
    )
    assert place.describe()["script"]["digest"] is not None
    assert place.run().outcome is Outcome.COMPLETED


def test_what_is_saved_before_the_training_can_be_loaded_again(place: Place) -> None:
    place.script("""
        from transformers import AutoConfig, AutoModelForSequenceClassification
        model().save_pretrained(OUT + "/base")
        loaded = AutoModelForSequenceClassification.from_pretrained(OUT + "/base")
        said(size=AutoConfig.from_pretrained(OUT + "/base").hidden_size, kind=type(loaded).__name__)
        Trainer(model=loaded, args=args, train_dataset=rows).train()
    """)
    assert place.run().outcome is Outcome.COMPLETED
    assert place.heard() == {"size": 16, "kind": "BertForSequenceClassification"}


def test_the_open_of_a_trial_is_as_good_as_the_built_in(place: Place) -> None:
    place.script("""
        import pickle
        class Files:
            opener = open
        with Files().opener(__file__) as handle:
            said(first=handle.readline(), same=pickle.loads(pickle.dumps(open)) is not None)
        Trainer(model=model(), args=args, train_dataset=rows).train()
    """)
    place.describe()
    assert place.heard() == {"first": "\n", "same": True}


def test_a_script_may_go_to_another_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.directory.parent)
    place.script("os.chdir(OUT)\n" + TRAIN)
    assert place.describe()["script"]["digest"] is not None
    assert place.run().outcome is Outcome.COMPLETED


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
    """)
    facts = place.describe()
    assert facts["script"]["own_optimizer"] is True
    assert any("its own optimizer" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


def test_checkpointing_of_the_script_itself_is_switched_off_where_a_trial_is_without(place: Place) -> None:
    place.script(
        "m = model()\nm.gradient_checkpointing_enable()\nTrainer(model=m, args=args, train_dataset=rows).train()\n"
    )
    assert any("switches checkpointing on in its code" in text for text in place.describe()["warnings"])
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


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
    assert place.describe()["script"]["evaluation"] == {"batch_size": 8, "data": "list of 5 rows"}
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


def _csv(path: Path) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["text", "label"])
        writer.writerows([["word " * (1 + i % 20), "good" if i % 3 else "bad"] for i in range(60)])


def _text(path: Path) -> None:
    path.write_text("A line of a book that nobody has written yet.\n" * 120)


def _pairs(path: Path) -> None:
    path.write_text(
        "".join(
            json.dumps({"source": "a house " * (1 + i % 4), "target": "ein Haus " * (1 + i % 4)}) + "\n"
            for i in range(50)
        )
    )


EXAMPLES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "run_text_classification.py": ("train.csv", _csv),
    "run_clm.py": ("book.txt", _text),
    "run_translation.py": ("pairs.jsonl", _pairs),
}


def test_every_example_script_is_tuned_and_listed() -> None:
    assert sorted(p.name for p in SCRIPTS.glob("*.py")) == sorted(EXAMPLES)
    readme = (SCRIPTS.parent / "README.md").read_text()
    assert all(f"`scripts/{name}`" in readme for name in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unmodified_script_is_tuned_and_takes_the_flags_of_the_answer(name: str, tmp_path: Path) -> None:
    file, make = EXAMPLES[name]
    make(tmp_path / file)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"of an earlier run")
    before = contents(tmp_path)
    command = [
        str(SCRIPTS / name),
        "--train_file",
        file,
        "--output_dir",
        "out",
        "--do_train",
        "--bf16",
        "--use_cpu",
    ]
    command += [
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "4",
        "--save_strategy",
        "epoch",
    ]
    search = (
        "search",
        "--effective-batch",
        8,
        "--device",
        "cpu",
        "--batch-size",
        "4,8",
        "--precision",
        "fp32",
        "--checkpointing",
        "off",
    )
    search += (
        "--optim",
        "adamw_torch_fused",
        "--tolerance",
        "0.5",
        "--output",
        tmp_path.parent / f"{name}.json",
    )
    run = autofit(*search, "--", sys.executable, *command, cwd=tmp_path)
    assert run.status == 0, run.stderr
    assert contents(tmp_path) == before
    assert run.stderr.count("not predicted") == 1

    result = load(tmp_path.parent / f"{name}.json")
    assert result.spec.workload.script == tuple(command)
    assert result.best.config.effective_batch() == 8
    assert result.best.config.precision is Precision.FP32
    as_it_is = result.baselines["as_it_is"]
    assert as_it_is.config == TrialConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        precision=Precision.BF16,
        optim="adamw_torch_fused",
    )
    assert as_it_is.estimate is not None

    shown = run.stdout[run.stdout.index("python /") :]
    words = shlex.split(shown.replace("\\\n", " "))
    assert tuple(words[1 : len(command) + 1]) == tuple(command)
    assert "--bf16 False" in " ".join(words[len(command) + 1 :])
    probe = [sys.executable, *words[1:], "--max_steps", "1", "--report_to", "none"]
    done = subprocess.run(probe, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1000


@pytest.mark.slow
def test_a_module_is_tuned_and_lines_to_change_are_given_where_flags_do_not_reach(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(PREAMBLE + BUILD + "if __name__ == '__main__':\n    " + TRAIN)
    before = contents(package)
    search = (
        "search",
        "--effective-batch",
        4,
        "--device",
        "cpu",
        "--batch-size",
        "2,4",
        "--precision",
        "fp32",
        "--checkpointing",
        "off",
    )
    search += ("--optim", "adamw_torch_fused", "--tolerance", "0.5", "--output", "best.json")
    run = autofit(
        *search, "--", "python", "-m", "pkg.train", "out", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1"
    )
    assert run.status == 0, run.stderr
    assert contents(package) == before
    assert not (tmp_path / "out").exists()
    assert "change these lines of TrainingArguments in pkg.train" in " ".join(run.stdout.split())
    assert "    per_device_train_batch_size=" in run.stdout
    assert "As it is, the script trains at effective batch 3, not 4" in " ".join(run.stdout.split())


REFUSED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--model", "bert-tiny", "--", "python", "train.py"), ("--model", "script")),
    (("--seq-len", "64", "--", "python", "train.py"), ("--seq-len", "script")),
    (("--", "python", "missing.py"), ("missing.py", "does not exist")),
    (("--", "python", "notes.txt"), ("notes.txt", "not Python")),
    (("--", "torchrun", "train.py"), ("torchrun", "several processes")),
    (("--replay", "grid.json", "--", "python", "train.py"), ("--replay", "script")),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSED, ids=[" ".join(a[:4]) for a, _ in REFUSED])
def test_a_mistake_on_the_command_line_is_refused_at_once(
    tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit\n")
    (tmp_path / "notes.txt").write_text("dear diary, today\n")
    run = autofit("search", "--effective-batch", "8", *arguments, cwd=tmp_path)
    assert run.status == 2, run.stderr
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
    for part in parts:
        assert part in lines[0]


@pytest.mark.slow
def test_a_script_that_raises_shows_its_traceback_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def load():\n    raise ValueError('bad data')\nload()\n")
    run = autofit(
        "search", "--effective-batch", "8", "--device", "cpu", "--", "python", "train.py", cwd=tmp_path
    )
    assert run.status == 2
    assert run.stdout == ""
    assert "in load" in run.stderr
    assert "error: train.py raised before it trained: ValueError: bad data" in run.stderr
    assert not (tmp_path / "best.json").exists()
