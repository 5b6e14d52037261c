"""What a script's text tells before it runs."""

from __future__ import annotations

import ast

import pytest

from autofit.problem.script_source import early_environment, output_directories, trains_often


@pytest.mark.parametrize(
    ("source", "often"),
    [
        ("t = Trainer(a)\nt.train()", False),
        ("trainer = Trainer(a)\nif x:\n    trainer.train(1)\nelse:\n    trainer.train()", False),
        ("trainer = Trainer(a) if x else Seq2SeqTrainer(a)\ntrainer.train()", False),
        ("trainer = Trainer(a)\ntrainer.train()\ntrainer = Trainer(b)\ntrainer.train()", True),
        ("model.train()\nother.train()", False),
        ("trainer = Trainer(a)\ntrainer.train()\nunfreeze(m)\ntrainer.train()", True),
        ("def main():\n    trainer = Trainer(a)\n    for fold in folds:\n        trainer.train()", True),
        ("trainer = Trainer(model_init=f)\nbest = trainer.hyperparameter_search(n_trials=9)", True),
        ("def main():\n    trainer = Trainer(a)\n    with x:\n        trainer.train()", False),
        ("trainer = Trainer(a)\ntry:\n    trainer.train()\nexcept OSError:\n    trainer.train(False)", False),
    ],
)
def test_several_trainings_are_seen_in_the_source(source: str, often: bool) -> None:
    assert trains_often(ast.parse(source)) is often


def test_the_environment_that_libraries_read_when_imported_is_found_in_plain_text_only() -> None:
    source = """
import os
from os import environ
os.environ["HF_HOME"] = "/data/hf"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_ENDPOINT", "https://mirror")
environ.update({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, TOKENIZERS_PARALLELISM="true")
os.environ["CUDA_VISIBLE_DEVICES"] = "3"
os.environ["TRANSFORMERS_CACHE"] = home()
os.environ["MINE"] = "kept out"
def main():
    os.environ["HF_TOKEN"] = "later"
"""
    assert early_environment(ast.parse(source), {"HF_ENDPOINT": "as it was"}) == {
        "HF_HOME": "/data/hf",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "true",
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('TrainingArguments("out")', ["out"]),
        ('args = SFTConfig(output_dir="runs/a", bf16=True)', ["runs/a"]),
        ('OUT = "out"\ndef main():\n    return Seq2SeqTrainingArguments(output_dir=OUT)', ["out"]),
        ('OUT = sys.argv[1]\nTrainingArguments(OUT)', []),
        ('OUT = "a"\nif x:\n    OUT = "b"\nTrainingArguments(OUT)', ["a", "b"]),
        ('open("data.txt")\nBertConfig(vocab_size=5)', []),
        ('TrainingArguments(f"{base}/out")', []),
    ],
)
def test_output_directories_that_the_text_names(text: str, found: list[str]) -> None:
    assert output_directories(ast.parse(text)) == found


def test_defaults_of_what_is_named_as_an_output_are_found() -> None:
    text = '''
p.add_argument("-o", "--out-dir", default="a")
p.add_argument("--data", default="data")
p.add_argument("--save", default=None)
@click.option("--save-path", default="b")
def main(model="bert", *, results="c", log_dir: str = typer.Option("d"), logs): ...
class Own:
    output_dir: str = "e"
    checkpoint_dir: str = field(default="f")
    ckpt: str
    name: str = "bert"
'''
    assert sorted(output_directories(ast.parse(text))) == ["a", "b", "c", "d", "e", "f"]
