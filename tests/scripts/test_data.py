"""The data of a script: what is said of it before the first trial, and which records may stand beside each other."""

from __future__ import annotations

from autofit.trials.trial import Outcome
from tests.scripts.place import BUILD, CONFIG, TRAIN, Place

#: rows of the lengths that a file holds
ROWS = """
rows = [{"input_ids": [1] * n, "attention_mask": [1] * n, "labels": i % 2} for i, n in enumerate(json.load(open(sys.argv[2])))]
"""


def test_other_rows_under_the_same_name_are_other_data(place: Place) -> None:
    lengths = place.directory / "lengths.json"
    found = []
    for text in ("[8, 8, 8]", "[8, 8, 8]", "[8, 8, 16]"):
        lengths.write_text(text)
        place.script(TRAIN, str(lengths), build=BUILD + ROWS)
        found.append(place.describe())
    assert [facts["sample_length"] for facts in found] == [8, 8, 16]
    assert [facts["data"]["uneven"] for facts in found] == [False, False, True]
    first, again, other = (facts["data"]["digest"] for facts in found)
    assert first == again != other


def test_the_same_rows_in_another_order_are_the_same_data(place: Place) -> None:
    lengths = place.directory / "lengths.json"
    found = []
    for text in ("[8, 8, 16, 4]", "[4, 16, 8, 8]"):
        lengths.write_text(text)
        place.script(TRAIN, str(lengths), build=BUILD + ROWS)
        found.append(place.describe()["data"]["digest"])
    assert found[0] == found[1]


def test_another_value_in_a_file_of_arguments_is_another_training(place: Place) -> None:
    build = "from transformers import HfArgumentParser\nargs, = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[2])\n"
    config = place.directory / "config.json"
    found = []
    for decay in (0.0, 0.0, 0.1):
        config.write_text(f'{{"output_dir": "o", "use_cpu": true, "report_to": "none", "weight_decay": {decay}}}')
        place.script(TRAIN, str(config), build=build)
        found.append(place.describe()["training"])
    assert found[0] == found[1] != found[2]


def test_a_path_in_the_output_directory_tells_no_trainings_apart(place: Place) -> None:
    build = """
from dataclasses import dataclass
@dataclass
class Own(TrainingArguments):
    cache: str = ""
    def __post_init__(self):
        super().__post_init__()
        self.cache = os.path.join(self.output_dir, "cache")
args = Own(OUT, report_to="none", use_cpu=True)
class Collator:
    def __init__(self, cache):
        self.cache = [cache]
    def __call__(self, rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
"""
    place.script("Trainer(model=model(), args=args, train_dataset=rows, data_collator=Collator(args.cache)).train()", build=build)
    assert place.describe()["training"] == place.describe()["training"]


def test_a_stream_is_said_to_show_no_longest_row(place: Place) -> None:
    place.script("""
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from rows
        args.max_steps = 9
        Trainer(model=model(), args=args, train_dataset=Stream()).train()
    """)
    facts = place.describe()
    assert any("is a stream: its longest rows cannot be looked up" in text for text in facts["warnings"])
    assert (facts["sample_length"], facts.get("data")) == (None, None)
    result = place.run()
    assert result.measurement is not None, result.failure
    assert (result.measurement.facts or {})["loader"]["repeats"] is True


def test_several_datasets_by_name_are_measured_as_their_loader_gives_them(place: Place) -> None:
    place.script("""
        class Mixed(Trainer):
            def get_train_dataloader(self):
                both = torch.utils.data.ConcatDataset(list(self.train_dataset.values()))
                return torch.utils.data.DataLoader(both, batch_size=self.args.train_batch_size, collate_fn=self.data_collator)
        Mixed(model=model(), args=args, train_dataset={"one": rows, "other": rows[:4]}).train()
    """)
    assert any("several datasets" in text for text in place.describe()["warnings"])
    result = place.run(CONFIG)
    assert result.outcome is Outcome.COMPLETED, result.failure


def test_rows_that_the_script_shuffles_anew_are_looked_at_anew(place: Place) -> None:
    place.script("""
        import random
        many = [{"input_ids": [1] * (16 if i == 0 else 8), "labels": 0} for i in range(500)]
        random.SystemRandom().shuffle(many)
        def pad(batch):
            longest = max(len(row["input_ids"]) for row in batch)
            ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch]
            return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in batch])}
        Trainer(model=model(), args=args, train_dataset=many, data_collator=pad).train()
    """)
    for _ in range(2):
        place.describe()
        result = place.run(CONFIG)
        assert result.measurement is not None, result.failure
        assert (result.measurement.facts or {})["data"]["prelude_longest"] == 16
