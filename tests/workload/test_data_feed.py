"""How batches reach the real Trainer: the longest first, then its own sampler's, by its own collator; even data as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from autofit.problem.config import TrialConfig
from autofit.trials.lengths import Lengths
from autofit.workload.clock import StepClock, Window
from autofit.workload.data.feed import DataFeed, feed_of, uneven_window
from autofit.workload.data.measured import data_facts, epoch_counts, measured_sizes
from autofit.workload.data.order import EndlessBatches, Plan
from autofit.workload.token_count import TokenCounter, padding_share, tokens_per_sample
from tests.uneven import SMALL, OwnLoader, Sentences, pad, pad_to_16

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

LENGTHS = [5 + (37 * i) % 40 for i in range(60)] + [120, 90]
BATCH = 4


class Seen:
    """A collator that remembers what it was given."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.lengths = collate, list[list[int]]()

    def __call__(self, rows: Any) -> Any:
        self.lengths.append([len(row["input_ids"]) for row in rows])
        return self.collate(rows)


def train(
    tmp_path: Path, data: Any, collator: Any, *, steps: int, accumulation: int = 1, cls: type[Trainer] = Trainer, batch: int = BATCH, **arguments: Any
) -> tuple[StepClock, DataFeed]:
    """`steps` optimizer steps as a trial runs them."""
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1000,
        use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, **arguments,
    )  # fmt: skip
    model = BertForSequenceClassification(BertConfig(**SMALL))
    trainer = cls(model=model, args=args, train_dataset=data, data_collator=collator)
    feed = feed_of(trainer, TrialConfig(per_device_train_batch_size=batch), user_data=True)
    clock = StepClock(
        Window(optimizer_steps=steps),
        enter=lambda phase: None,
        on_warm=lambda: None,
        prelude_steps=feed.prelude_steps(trainer),
    )
    feed.attach(trainer, lambda: clock.in_prelude)
    clock.attach(trainer)
    trainer.train()
    return clock, feed


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_optimizer_steps_see_the_longest_rows_whatever_the_sampler(strategy: str, accumulation: int, tmp_path: Path) -> None:
    seen = Seen(pad)
    clock, feed = train(tmp_path, Sentences(LENGTHS), seen, steps=6, accumulation=accumulation, train_sampling_strategy=strategy)
    longest = sorted(LENGTHS, reverse=True)[:BATCH]
    shown = [lengths for lengths in seen.lengths if lengths == longest]
    assert len(shown) >= 2 * accumulation, "in every micro-step of both"
    assert [count.length for count in clock.prelude_counts] == [120] * 2 * accumulation
    facts = data_facts(feed, clock)["data"]
    assert (facts["prelude_steps"], facts["prelude_longest"]) == (2, 120)
    assert facts["lengths"]["longest"] == 120
    assert len(clock.samples.micro) == 3 * accumulation, "prelude and the step after it are not measured"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_single_rows_show_the_longest_input_and_the_longest_target(accumulation: int, tmp_path: Path) -> None:
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [1] * m} for n, m in [(6, 5), (7, 4), (90, 2), (5, 80), (8, 3)]]
    seen: list[tuple[int, int]] = []

    def noting(batch: Any) -> Any:
        seen.extend((len(row["input_ids"]), len(row["labels"])) for row in batch)
        return pad([{**row, "labels": 0} for row in batch])

    clock, feed = train(tmp_path, rows, noting, steps=6, accumulation=accumulation, batch=1)
    beside_state = seen[accumulation : len(clock.prelude_counts)]
    assert set(beside_state) == {(90, 2), (5, 80)}
    sizes = measured_sizes(feed, clock)
    assert sizes is not None
    assert sizes.longest in (92, 85)
    assert len(sizes.longest_seconds) == 1


def test_the_users_collator_pads_the_longest_batch_too(tmp_path: Path) -> None:
    clock, _ = train(tmp_path, Sentences(LENGTHS), pad_to_16, steps=4)
    assert {count.length for count in clock.prelude_counts} == {128}
    assert all(count.length % 16 == 0 for count in clock.counts)


def test_columns_that_the_model_does_not_take_are_removed_as_ever(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{**Sentences(LENGTHS)[i], "text": "not for the model"} for i in range(len(LENGTHS))])
    clock, feed = train(tmp_path, rows, pad, steps=4)
    assert feed.shown == 2
    assert clock.steps == 4


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_rows_are_grouped_over_the_whole_accumulation_though_a_trial_shortens_it(strategy: str, tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, use_cpu=True, train_sampling_strategy=strategy
    )
    trainer = Trainer(model=BertForSequenceClassification(BertConfig(**SMALL)), args=args, train_dataset=Sentences(LENGTHS), data_collator=pad)
    config = TrialConfig(per_device_train_batch_size=BATCH, gradient_accumulation_steps=8)
    feed_of(trainer, config, user_data=True).attach(trainer, lambda: False)
    sampler: Any = trainer._get_train_sampler()
    grouped = getattr(sampler, "effective_batch_size", None) or sampler._inner.batch_size
    assert grouped == 8 * BATCH
    assert trainer.args.gradient_accumulation_steps == 2


def test_measured_batches_are_the_samplers_own_and_stand_for_the_epoch(tmp_path: Path) -> None:
    clock, feed = train(tmp_path, Sentences(LENGTHS), pad, steps=3 + 16, train_sampling_strategy="group_by_length")
    sizes = measured_sizes(feed, clock)
    assert sizes is not None
    assert sizes.mean is not None
    assert list(sizes.measured) == [float(count.padded) for count in clock.counts], "the plan is what the model got"
    assert np.mean(sizes.measured) == pytest.approx(sizes.mean, rel=0.15)
    assert sizes.longest == 120 * BATCH
    assert len(sizes.longest_seconds) == 1


def test_a_collator_that_flattens_is_measured_by_its_tokens(tmp_path: Path) -> None:
    def flatten(rows: Any) -> dict[str, torch.Tensor]:
        ids = [token for row in rows for token in row["input_ids"]]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([rows[0]["labels"]])}

    clock, feed = train(tmp_path, Sentences(LENGTHS), flatten, steps=3 + 8)
    sizes = measured_sizes(feed, clock)
    assert sizes is not None
    assert list(sizes.measured) == [float(count.padded) for count in clock.counts]
    assert sizes.mean is not None
    assert sizes.mean == pytest.approx(BATCH * np.mean(LENGTHS), rel=0.1)
    assert sizes.longest == sum(sorted(LENGTHS)[-BATCH:])


def test_even_rows_have_no_prelude_and_are_measured_as_ever(tmp_path: Path) -> None:
    clock, feed = train(tmp_path, Sentences([20] * 30), pad, steps=4)
    assert not feed.uneven
    assert measured_sizes(feed, clock) is None
    assert clock.prelude_counts == []
    assert len(clock.samples.micro) == 3, "only the first step is dropped"
    assert data_facts(feed, clock)["data"]["padding_share"] == 0.0


@pytest.mark.parametrize(("lengths", "alike"), [([5, 50, 20, 90] * 20, False), ([20] * 80, True)])
def test_batches_of_a_stream_are_told_apart_by_what_the_model_got(lengths: list[int], alike: bool, tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Sentences(lengths)[i] for i in range(len(lengths))])

    clock, feed = train(tmp_path, Stream(), pad, steps=8, batch=1)
    assert feed.may_differ, "a median would forget the long ones"
    sizes = measured_sizes(feed, clock)
    assert (sizes is None) == alike
    if sizes is not None:
        assert list(sizes.measured) == [float(count.padded) for count in clock.counts]
        assert sizes.mean is None


def test_a_loader_of_the_users_own_is_measured_as_it_comes_and_the_record_says_so(tmp_path: Path) -> None:
    class Other(torch.utils.data.Dataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner) // 2

        def __getitem__(self, index: int) -> Any:
            return self.inner[2 * index]

    class Halved(OwnLoader):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Other(self.train_dataset), batch_size=BATCH, collate_fn=self.data_collator)

    clock, feed = train(tmp_path, Sentences(LENGTHS), pad, steps=5, cls=Halved)
    assert data_facts(feed, clock)["data"]["prelude_steps"] == 0
    sizes = measured_sizes(feed, clock)
    assert sizes is not None
    assert sizes.mean is None
    clock, feed = train(tmp_path, Sentences(LENGTHS), pad, steps=5, cls=OwnLoader)
    assert data_facts(feed, clock)["data"]["prelude_longest"] == 120, "a DataLoader over the same rows can be fed"


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (3, 4), (8, 4), (1, 1)])
def test_epochs_follow_each_other_in_full_batches(rows: int, batch: int) -> None:
    plan = Plan()
    sampler = EndlessBatches(
        torch.utils.data.SequentialSampler(range(rows)), batch=batch, length=40 * batch, lengths=Lengths.of(range(1, rows + 1)), plan=plan
    )
    drawn = np.array(list(sampler)).reshape(-1, batch)
    assert len(drawn) == 40
    assert set(drawn.ravel()) <= set(range(rows))
    assert plan.padded.given[:40] == [float((max(row) + 1) * batch) for row in drawn]
    assert plan.flat.given[:40] == [float(sum(row + 1)) for row in drawn]
    if rows >= batch:
        assert all(list(row) == list(range(row[0], row[0] + batch)) for row in drawn), "batches are the sampler's"


def test_what_an_epoch_takes_is_not_one_epochs_luck() -> None:
    lengths = Lengths.of(np.random.default_rng(0).lognormal(4, 1, 200).astype(int))

    def mean(seed: int) -> float:
        plan, sampler = Plan(), torch.utils.data.RandomSampler(range(200), generator=torch.Generator().manual_seed(seed))
        next(iter(EndlessBatches(sampler, batch=16, length=16, lengths=lengths, plan=plan)))
        assert plan.padded.mean is not None
        return plan.padded.mean

    means = [mean(seed) for seed in range(8)]
    assert max(means) / min(means) < 1.03


def test_tokens_and_padding_are_those_of_an_epoch_however_few_batches_are_measured(tmp_path: Path) -> None:
    lengths = [8 + i % 3 for i in range(77)] + [400] * 3
    clock, feed = train(tmp_path, Sentences(lengths), pad, steps=3 + 4)
    assert tokens_per_sample(clock.counts) != pytest.approx(np.mean(lengths), rel=0.1), "batches with a long row are one in seven"
    assert tokens_per_sample(epoch_counts(feed, clock)) == pytest.approx(np.mean(lengths), rel=0.02)
    plan = feed.plan
    assert plan.flat.mean is not None
    assert plan.padded.mean is not None
    assert data_facts(feed, clock)["data"]["padding_share"] == pytest.approx(1 - plan.flat.mean / plan.padded.mean)

    clock, feed = train(tmp_path, Sentences(lengths), lambda rows: {name: values[:, :12] if values.ndim > 1 else values for name, values in pad(rows).items()}, steps=3 + 4)
    assert epoch_counts(feed, clock) == clock.counts, "a collator that cuts makes other tokens of the rows"


def test_batches_of_a_wrapped_loader_keep_their_own_sizes(tmp_path: Path) -> None:
    class Wrapped:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Any:
            return iter(self.loader)

    class Wrapping(Trainer):
        def get_train_dataloader(self) -> Any:
            return Wrapped(super().get_train_dataloader())

    clock, feed = train(tmp_path, Sentences(LENGTHS), pad, steps=3 + 8, accumulation=2, cls=Wrapping)
    sizes = measured_sizes(feed, clock)
    assert feed.shown == 0
    assert sizes is not None
    assert list(sizes.measured) == [float(count.padded) for count in clock.counts]


def test_the_longest_rows_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, longest_batch = [], Lengths.longest_batch
    monkeypatch.setattr(Lengths, "longest_batch", lambda lengths, size: asked.append(size) or longest_batch(lengths, size))
    _, feed = train(tmp_path, Sentences(LENGTHS), pad, steps=4, accumulation=4)
    assert feed.shown == 2
    assert asked == [BATCH], "millions of rows take a second to sort"


def test_a_window_for_uneven_batches_wants_several() -> None:
    window = uneven_window(Window(seconds=1.0))
    assert not window.enough(steps=9, unskipped=9, micro_steps=6, seconds=60.0)
    assert not window.enough(steps=9, unskipped=9, micro_steps=12, seconds=2.0)
    assert window.enough(steps=9, unskipped=9, micro_steps=12, seconds=3.0)
    assert window.enough(steps=9, unskipped=9, micro_steps=24, seconds=1.5)


def test_padding_is_told_from_tokens() -> None:
    counter = TokenCounter(rows=2)
    counter.note({"input_ids": torch.ones(2, 5), "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])})
    counter.note({"input_ids": torch.ones(1, 12)})
    counter.note({"pixel_values": torch.ones(2, 3, 4, 4)})
    padded, packed = counter.close()
    assert (padded.rows, padded.length, padded.padded, padded.real) == (2, 5, 10, 6.0)
    assert (packed.rows, packed.padded, packed.real) == (2, 12, 12.0), "a packed batch holds the rows of one"
    assert tokens_per_sample([padded, packed]) == 4.5
    assert padding_share([padded]) == pytest.approx(0.4)
    assert counter.close() == []
