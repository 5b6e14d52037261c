"""Named datasets: read from every kind of file, tokenised as the example scripts do, and refused in one line where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import BertConfig, GPT2Config, PretrainedConfig, T5Config

from autofit.problem.data_source import DataSource
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.processes.protocol import SCRATCH
from autofit.trials.lengths import LengthSummary
from autofit.workload import models
from autofit.workload.data import prepared as prepared_module
from autofit.workload.data.collators import collator_of
from autofit.workload.data.files import load_rows
from autofit.workload.data.labels import tags_of
from autofit.workload.data.prepared import Prepared, prepare, sample
from tests.refusals import refused
from tests.uneven import SMALL, save_model, text, tokenizer

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

LENGTHS = (3, 30, 8, 12, 1, 20)
ROWS = {"text": [text(n, seed=n) for n in LENGTHS], "label": ["good", "bad", "good", "ugly", "bad", "good"]}
BERT = BertConfig(**SMALL)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private directory of a runner."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setenv(SCRATCH, str(place))
    return place


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def saved(rows: dict[str, list[Any]], place: Path, kind: str) -> str:
    """`rows` as a file or directory of a kind."""
    place.mkdir(exist_ok=True)
    data, path = datasets.Dataset.from_dict(rows), place / f"rows.{kind}"
    if kind in ("csv", "tsv"):
        data.to_csv(str(path), sep="," if kind == "csv" else "\t")
    elif kind in ("jsonl", "json"):
        data.to_json(str(path))
    elif kind == "parquet":
        data.to_parquet(str(path))
    elif kind == "dataset":
        data.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(path))
    return str(path)


def made(model: Path, dataset: str, task: Task = Task.SEQUENCE_CLASSIFICATION, config: PretrainedConfig = BERT, **more: Any) -> Prepared:
    seq_len = more.pop("seq_len", None)
    return prepare(Workload(model=str(model), seq_len=seq_len, data=DataSource(dataset=dataset, **more)), task, config)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet", "dataset", "splits"])
def test_every_kind_of_file_gives_the_same_rows(kind: str, model: Path, tmp_path: Path) -> None:
    found = made(model, saved(ROWS, tmp_path / "data", kind))
    rows = found.rows()
    assert [len(ids) for ids in rows["input_ids"]] == [n + 2 for n in LENGTHS], "[CLS] and [SEP] go around"
    assert found.label_names == ("bad", "good", "ugly")
    assert rows["labels"] == [1, 0, 1, 2, 0, 1]
    assert found.said == "text in 'text', labels in 'label'"
    assert found.longest() == 32


def test_a_hub_name_is_read_from_the_local_cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    read = datasets.load_dataset("csv", data_files=saved(ROWS, tmp_path / "data", "csv"), cache_dir=str(tmp_path / "hub"))
    assert len(read["train"]) == len(LENGTHS)
    (config,) = (tmp_path / "hub" / "csv").iterdir()
    home = tmp_path / "hub" / "someone___reviews"
    home.mkdir()
    config.rename(home / "default")
    for file in home.rglob("csv-train.arrow"):
        file.rename(file.with_name("reviews-train.arrow"))
    for file in home.rglob("dataset_info.json"):
        info = json.loads(file.read_text())
        file.write_text(json.dumps({**info, "builder_name": "reviews", "dataset_name": "reviews", "config_name": "default"}))
    found = load_rows(DataSource(dataset="someone/reviews"), tmp_path / "cache")
    assert found["label"] == ROWS["label"]
    with refused("neither a path nor in the local cache"):
        load_rows(DataSource(dataset="nobody/nothing"), tmp_path / "cache")


def test_a_later_child_reads_what_the_first_one_made(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(ROWS, tmp_path / "data", "csv")
    first = made(model, file)
    monkeypatch.setattr(prepared_module, "load_rows", None)
    assert made(model, file) == first
    Path(file).unlink()
    assert made(model, file).rows()["labels"] == first.rows()["labels"]


def test_long_texts_are_cut_at_the_asked_length_or_at_the_models(tmp_path: Path) -> None:
    rows = saved({"text": [text(90), text(5)], "label": [0, 1]}, tmp_path / "data", "jsonl")
    model = save_model(tmp_path / "model", max_length=64)
    assert made(model, rows, config=BertConfig(**SMALL, max_position_embeddings=64)).lengths().inputs.tolist() == [64, 7]
    assert made(model, rows, seq_len=16).lengths().inputs.tolist() == [16, 7]
    with refused("longer than the 64 positions"):
        made(model, rows, config=BertConfig(**SMALL, max_position_embeddings=64), seq_len=128)
    with refused("the longest row has 72 tokens: more than the model's 64"):
        made(model, rows, config=BertConfig(**SMALL, max_position_embeddings=64), pad_to_multiple_of=24)


def test_pairs_of_texts_are_one_sequence(model: Path, tmp_path: Path) -> None:
    rows = saved({"premise": [text(4)], "hypothesis": [text(6)], "label": [0]}, tmp_path / "data", "jsonl")
    assert made(model, rows).lengths().inputs.tolist() == [4 + 6 + 3]


@pytest.mark.parametrize(
    ("labels", "count", "problem", "numbers"),
    [
        (["b", "a", "b"], 2, "single_label_classification", [1, 0, 1]),
        ([3, 1, 5], 3, "single_label_classification", [1, 0, 2]),
        ([True, False, True], 2, "single_label_classification", [1, 0, 1]),
        ([0.5, -1.0, 2.25], 1, "regression", [0.5, -1.0, 2.25]),
    ],
)
def test_labels_become_numbers_and_the_model_as_many_outputs(
    labels: list[Any], count: int, problem: str, numbers: list[Any], model: Path, tmp_path: Path
) -> None:
    found = made(model, saved({"text": [text(3)] * 3, "label": labels}, tmp_path / "data", "parquet"))
    config = found.fitted(BERT)
    assert (config.num_labels, config.problem_type) == (count, problem)
    assert BERT.num_labels == 2, "the config that was found is not changed"
    assert found.rows()["labels"] == numbers


@pytest.mark.parametrize("task", [Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM, Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.TOKEN_CLASSIFICATION])
def test_a_step_of_every_task_trains(task: Task, model: Path, tmp_path: Path) -> None:
    words = [row.split() for row in ROWS["text"]]
    columns: dict[str, list[Any]] = {"text": ROWS["text"], "label": ROWS["label"]}
    if task is Task.SEQ2SEQ_LM:
        columns = {"text": ROWS["text"], "target": [text(n, seed=9) for n in reversed(LENGTHS)]}
    if task is Task.TOKEN_CLASSIFICATION:
        columns = {"tokens": words, "tags": [[i % 3 for i in range(len(row))] for row in words]}
    config: PretrainedConfig = BERT
    if task is Task.CAUSAL_LM:
        config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2)
    if task is Task.SEQ2SEQ_LM:
        config = T5Config(vocab_size=100, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    place = tmp_path / "own"
    config.save_pretrained(place)
    tokenizer().save_pretrained(place)
    data = DataSource(dataset=saved(columns, tmp_path / "data", "jsonl"), pad_to_multiple_of=8)
    resolved = models.resolve(Workload(model=str(place), task=str(task), data=data))
    network = models.build(resolved, device="cpu")
    assert resolved.data is not None
    rows, collate = resolved.data.rows(), collator_of(resolved.data, network)
    batch = collate([rows[i] for i in range(len(rows))])
    assert batch["input_ids"].shape == (6, 32)
    assert resolved.seq_len == 32
    loss = network(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    if task is Task.SEQ2SEQ_LM:
        assert resolved.data.lengths().targets.tolist() == [n + 2 for n in reversed(LENGTHS)]
    if task is Task.TOKEN_CLASSIFICATION:
        assert network.config.num_labels == 3
        assert (batch["labels"] != -100).sum() == sum(LENGTHS), "one label a word"


def test_packed_texts_are_blocks_of_one_length(model: Path, tmp_path: Path) -> None:
    rows = saved({"text": ROWS["text"]}, tmp_path / "data", "jsonl")
    found = made(model, rows, task=Task.CAUSAL_LM, seq_len=16, packing=True)
    tokens = sum(LENGTHS) + 2 * len(LENGTHS)
    assert found.lengths().inputs.tolist() == [16] * (tokens // 16)
    assert not found.lengths().uneven
    with refused("shorter than one block"):
        made(model, rows, task=Task.CAUSAL_LM, seq_len=500, packing=True)
    with refused("packing is for causal-lm"):
        made(model, rows, task=Task.MASKED_LM, packing=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"text": ["a", None], "label": [0, 1]}, "row 1 has no text in column 'text'"),
        ({"text": ["a", "b"], "label": [0, None]}, "row 1 has no label in column 'label'"),
        ({"text": ["a", "b"], "label": [0, -1]}, "label -1 in column 'label' is out of range"),
        ({"text": ["a"] * 30, "label": [f"name {i}" for i in range(30)]}, "30 different values"),
        ({"text": ["a", "b"], "label": [1.0, float("inf")]}, "label of row 1 in column 'label' is not finite"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(rows: dict[str, Any], words: str, model: Path, tmp_path: Path) -> None:
    with refused(words):
        made(model, saved(rows, tmp_path / "data", "parquet"))


@pytest.mark.parametrize(
    ("words", "tags", "said"),
    [
        ([["w1", "w2"]], [[0]], "row 0 has 2 words in column 'tokens' and 1 labels in column 'ner_tags'"),
        ([["w1"], ["w2"]], [[0], [0, 1]], "row 1 has 1 words .* 2 labels"),
        ([["w1", None]], [[0, 1]], "row 0 has a word without text"),
        ([["w1", "w2"], ["w3", "w4"]], [[0, 1], [0, None]], "row 1 has no label"),
        ([["w1", "w2"], ["w3"]], [[0, 1], None], "row 1 has no label"),
    ],
)
def test_words_and_tags_that_do_not_match_are_refused(words: list[Any], tags: list[Any], said: str, model: Path, tmp_path: Path) -> None:
    with refused(said):
        made(model, saved({"tokens": words, "ner_tags": tags}, tmp_path / "data", "jsonl"), task=Task.TOKEN_CLASSIFICATION)


def test_a_word_without_a_label_is_found_in_its_row_however_the_rows_are_stored() -> None:
    parts = [datasets.Dataset.from_dict({"tags": tags}) for tags in ([[0, 1]] * 10, [[0, 1], [], [0, None]])]
    whole = datasets.concatenate_datasets(parts)
    for rows, row in ((whole, 12), (whole.select(range(4, 13)), 8), (whole.select([3, 12, 0]), 1)):
        with refused(f"row {row} has no label"):
            tags_of(rows, "tags")


def test_a_length_without_room_for_text_is_refused(model: Path, tmp_path: Path) -> None:
    rows = saved(ROWS, tmp_path / "data", "csv")
    assert made(model, rows, seq_len=3).longest() == 3
    with refused("cannot be cut to 2 tokens: the tokenizer puts 2 around each", hint="--seq-len 3 or more"):
        made(model, rows, seq_len=2)
    pairs = saved({"text_a": ["w1 w2"], "text_b": ["w3"], "label": [0]}, tmp_path / "pairs", "csv")
    with refused("puts 3 around each", hint="--seq-len 5 or more"):
        made(model, pairs, seq_len=3)


def test_rows_that_were_saved_as_tensors_are_read_as_values(model: Path, tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS | {"label": [0, 1, 0, 2, 1, 0]}).with_format("torch").save_to_disk(tmp_path / "tensors")
    assert made(model, str(tmp_path / "tensors")).rows()["labels"] == [0, 1, 0, 2, 1, 0]


def test_the_multiple_that_batches_are_padded_to_is_part_of_what_the_data_is(model: Path, tmp_path: Path) -> None:
    rows = saved(ROWS, tmp_path / "data", "csv")
    plain, padded = made(model, rows).facts(), made(model, rows, pad_to_multiple_of=8).facts()
    assert plain["lengths"] == padded["lengths"]
    assert plain["digest"] != padded["digest"]


def test_class_labels_outside_their_classes_are_refused(model: Path, tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    good = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    good.save_to_disk(str(tmp_path / "good"))
    assert made(model, str(tmp_path / "good")).label_names == ("no", "yes")
    good.map(lambda row: {"label": -1}).save_to_disk(str(tmp_path / "bad"))
    with refused("label -1 .* classes are 0 to 1", hint="without a label"):
        made(model, str(tmp_path / "bad"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, "does not exist"),
        ("empty.csv", "", "is empty"),
        ("header.csv", "text,label\n", "is empty"),
        ("empty.jsonl", "", "is empty"),
        ("empty.parquet", "", "is empty"),
        ("null.json", " null", "first row is no JSON object"),  # ends the process that lets datasets read it
        ("null.jsonl", 'null\n{"text": "a"}\n', "first row is no JSON object"),
        ("x" * 300, None, "neither a path nor in the local cache"),
        ("torn.csv", "text,label\na,b\nc,d,e,f\n", "cannot be read"),
        ("torn.jsonl", '{"text": 1}\n{oops\n', "cannot be read"),
        ("torn.parquet", "oops", "cannot be read"),
        ("rows.xlsx", "oops", "format of .* is not known"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with refused(words):
        load_rows(DataSource(dataset=str(path) if len(name) < 256 else name), tmp_path / "cache")


def test_a_split_or_a_part_of_one_is_taken_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    splits = saved(ROWS, tmp_path / "data", "splits")
    assert len(load_rows(DataSource(dataset=splits, split="test"), tmp_path / "cache")) == 1
    for dataset in (splits, saved(ROWS, tmp_path / "data", "csv"), saved(ROWS, tmp_path / "data", "dataset")):
        with refused("no split 'validation'"):
            load_rows(DataSource(dataset=dataset, split="validation"), tmp_path / "cache")
    for dataset in (splits, saved(ROWS, tmp_path / "data", "dataset"), saved(ROWS, tmp_path / "data", "csv")):
        part = load_rows(DataSource(dataset=dataset, split="train[1:3]"), tmp_path / "cache")
        assert part["text"] == ROWS["text"][1:3], dataset
    assert len(load_rows(DataSource(dataset=splits, split="train[:50%]+test"), tmp_path / "cache")) == 4
    with refused(r"no split 'test\[a\]'", hint=r"train \(6 rows\), test \(1 rows\)"):
        load_rows(DataSource(dataset=splits, split="test[a]"), tmp_path / "cache")
    datasets.Dataset.from_dict(ROWS).select([]).save_to_disk(tmp_path / "no rows")
    datasets.DatasetDict({}).save_to_disk(tmp_path / "no splits")
    for name in ("no rows", "no splits"):
        with refused("is empty"):
            load_rows(DataSource(dataset=str(tmp_path / name)), tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    with refused("was not saved by datasets"):
        load_rows(DataSource(dataset=str(tmp_path / "folder")), tmp_path / "cache")


def test_a_model_without_a_tokenizer_is_refused_and_another_one_can_be_named(tmp_path: Path) -> None:
    BERT.save_pretrained(tmp_path / "bare")
    rows = saved(ROWS, tmp_path / "data", "csv")
    with refused("no tokenizer in directory", hint="--tokenizer"):
        made(tmp_path / "bare", rows)
    tokenizer().save_pretrained(tmp_path / "tokens")
    for name in (tmp_path / "tokens", tmp_path / "tokens" / "tokenizer.json"):
        assert made(tmp_path / "bare", rows, tokenizer=str(name)).longest() >= 30


def test_a_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    with refused("the model has 20 tokens only", hint="--tokenizer"):
        made(model, saved(ROWS, tmp_path / "data", "csv"), config=BertConfig(**{**SMALL, "vocab_size": 20}))


def test_of_very_many_rows_a_sample_holds_the_longest_of_every_kind() -> None:
    longest = "the longest of them all"
    texts = ["short"] * 2000 + [longest] + ["short"] * 2000
    words = [row.split() for row in texts[1:]] + [None]
    rows = datasets.Dataset.from_dict({"text": texts, "words": words, "even": ["even"] * 4001})
    for columns in ([("text",)], [("even", "text")], [("even",), ("text",)]):
        found = sample(rows, columns, most=500)
        assert 500 <= len(found) <= 1100
        assert longest in found["text"], columns
    assert longest.split() in sample(rows, [("words",)], most=500)["words"]
    assert sample(rows, [("text",)], most=5000) is rows


def test_rows_without_a_token_are_no_rows_that_nobody_looked_at(tmp_path: Path) -> None:
    place = save_model(tmp_path / "bare")
    bare = tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")  # type: ignore[assignment]
    bare.save_pretrained(place)
    found = made(place, saved({"text": ["", text(3), "", text(5)]}, tmp_path / "data", "jsonl"), task=Task.CAUSAL_LM)
    summary = LengthSummary.from_json(found.facts()["lengths"])
    assert (summary.rows, summary.scanned) == (2, 2)
    assert summary.complete


def test_targets_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    rows = saved({"source": ["w1 w2"], "target": ["w55"]}, tmp_path / "data", "jsonl")
    with refused("the model has 50 tokens only", hint="--tokenizer"):
        made(model, rows, task=Task.SEQ2SEQ_LM, config=T5Config(vocab_size=50))
