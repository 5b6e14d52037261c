"""What the soundness check runs, what its answer means, and that a search heeds it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from autofit.errors import SearchFailed, WorkerError
from autofit.problem.config import Precision, TrialConfig
from autofit.results.checking import (
    SPLIT_TOLERANCE,
    STEPS,
    CheckOrder,
    FormResult,
    batch_for,
    forms_for,
    split_warnings,
    summary,
    unsound_precision,
)
from autofit.search.search import Search
from autofit.search.soundness_check import SoundnessCheck
from autofit.testing import simulated_landscape
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord
from tests.builders import make_config, make_record
from tests.searching import Play, prepare

WINNER = make_config(16, precision=Precision.BF16)
ORDER = CheckOrder(workload={"model": "m"}, device="cpu", forms=(), batch=1, seed=3)


def ran(batch: int, **fields: Any) -> TrialRecord:
    return make_record(0, make_config(batch, **fields), 1.0, role=Role.DEFAULTS)


def form(loss: float, norm: float, items: Sequence[int] = ()) -> dict[str, Any]:
    return FormResult(losses=(loss,) * STEPS, gradient_norms=(norm,) * STEPS, items=tuple(items)).to_json()


def answer(
    *, parts: tuple[float, float] = (2.0, 1.0), again: tuple[float, float] = (2.0, 1.0), asked: float | None = None, **facts: Any
) -> dict[str, Any]:
    """An answer in which fp32 in one piece has loss 2 and gradient norm 1."""
    forms = {"whole": form(2.0, 1.0, facts.pop("whole_items", ())), "again": form(*again), "parts": form(*parts, items=facts.pop("items", (4, 4)))}
    if asked is not None:
        forms["asked"] = form(asked, 1.0)
    return {"forms": forms, "facts": {"model": "MyModel", "trainer": "MyTrainer", **facts}}


def warned(**fields: Any) -> list[str]:
    return [w.message for w in split_warnings(summary(WINNER, 8, answer(**fields)))]


class TestPlan:
    """Which batch, which forms."""

    @pytest.mark.parametrize(
        ("records", "batch"),
        [
            ([ran(8)], 8),
            ([ran(4)], 4),
            ([ran(8, precision=Precision.BF16)], 4),
            ([ran(2, precision=Precision.BF16)], None),
            ([ran(64)], 8),
            ([ran(16, gradient_checkpointing=True)], None),
            ([ran(16, optim="sgd")], None),
            ([make_record(0, make_config(8), reason=Reason.OUT_OF_MEMORY)], None),
            ([], None),
        ],
    )
    def test_the_batch_is_one_that_trials_have_shown_to_fit(self, records: list[TrialRecord], batch: int | None) -> None:
        assert batch_for(WINNER, records) == batch

    def test_it_is_no_larger_than_the_effective_batch(self) -> None:
        assert batch_for(make_config(2, effective_batch=4), [ran(64)]) == 4

    def test_splits_are_compared_in_fp32_at_the_same_effective_batch(self) -> None:
        whole, again, parts = forms_for(WINNER, 8, split=True, precision=False)
        assert {f.config.effective_batch() for f in (whole, again, parts)} == {8}
        assert (parts.config.per_device_train_batch_size, parts.config.gradient_accumulation_steps) == (2, 4)
        assert {f.config.precision for f in (whole, again, parts)} == {Precision.FP32}
        assert whole.random_state != again.random_state

    def test_the_precision_is_compared_with_the_winners_attention_and_without_compilation(self) -> None:
        winner = WINNER.but(extra=(("attn_implementation", "eager"), ("torch_compile", True)))
        whole, asked = forms_for(winner, 8, split=False, precision=True)
        assert asked.config.extra == (("attn_implementation", "eager"),)
        assert asked.config.precision is Precision.BF16
        assert whole.config.extra == ()
        assert whole.steps == asked.steps == STEPS

    def test_an_order_survives_json(self) -> None:
        order = replace(ORDER, forms=forms_for(WINNER, 8, split=True, precision=True), batch=8)
        assert CheckOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


class TestMeaning:
    """What the figures say."""

    def test_splits_that_agree_need_no_word(self) -> None:
        assert warned(parts=(2.0 * (1 + SPLIT_TOLERANCE / 2), 1.0)) == []

    def test_a_model_that_ignores_num_items_in_batch_is_named(self) -> None:
        (text,) = warned(parts=(8.0, 4.0), accepts_loss_kwargs=True)
        assert "MyModel takes loss keywords but ignores num_items_in_batch" in text
        assert "4.00 times as large" in text

    def test_a_trainer_that_does_not_normalise_is_named(self) -> None:
        (text,) = warned(parts=(8.0, 4.0), accepts_loss_kwargs=True, own_compute_loss=True)
        assert "MyTrainer.compute_loss does not divide by the items of the whole batch" in text

    def test_a_mean_of_means_over_uneven_micro_batches_is_named(self) -> None:
        (text,) = warned(parts=(2.1, 1.05), items=(9, 3, 5, 7))
        assert "loss by 5 %, gradient norm by 5 %" in text
        assert "MyModel is a mean over each micro-batch" in text

    def test_a_routers_loss_is_named_before_labels_that_are_uneven(self) -> None:
        (text,) = warned(parts=(2.1, 1.05), items=(9, 3, 5, 7), router_loss=True, accepts_loss_kwargs=True)
        assert "MyModel adds its router's auxiliary loss to each micro-batch, undivided" in text
        (text,) = warned(parts=(2.1, 1.05), router_loss=True)
        assert "of that micro-batch's samples alone" in text

    def test_a_sum_is_named(self) -> None:
        (text,) = warned(parts=(0.5, 0.25), items=(2, 2, 2, 2))
        assert "the loss of MyModel is a sum over its micro-batch" in text
        assert "0.25 times as large" in text
        (text,) = warned(parts=(0.5, 0.25), own_compute_loss=True)
        assert "the loss of MyTrainer.compute_loss is a sum" in text
        (text,) = warned(parts=(1.0, 0.4))
        assert "depends on which samples share a micro-batch" in text

    def test_batch_norm_is_named_whether_or_not_these_samples_show_it(self) -> None:
        (shown,) = warned(parts=(2.2, 1.1), batch_norms=["a", "b", "c", "d"])
        (silent,) = warned(batch_norms=["net.bn"], sync_batch_norms=["net.bn"])
        assert "MyModel has BatchNorm (a, b, c and 1 more)" in shown
        assert "synchronised BatchNorm (net.bn)" in silent

    def test_a_loss_of_chance_cannot_be_judged(self) -> None:
        (text,) = warned(parts=(2.2, 1.1), again=(2.1, 1.1))
        assert "draws random numbers of its own" in text

    def test_a_collator_that_makes_other_labels_of_the_same_samples_is_not_the_models_fault(self) -> None:
        masked: dict[str, Any] = {"whole_items": (11,), "items": (4, 3, 2, 3), "accepts_loss_kwargs": True}
        for again in ((2.0, 1.0), (2.1, 1.1)):  # drawn with a seed of its own, or by the process's
            (text,) = warned(parts=(2.1, 1.05), again=again, **masked)
            assert text.startswith("the collator makes other labels of the same samples")
        (text,) = warned(parts=(8.0, 4.0), **masked)
        assert "ignores num_items_in_batch" in text
        assert warned(whole_items=(11,), items=(4, 3, 2, 3)) == []

    def test_a_difference_far_beyond_chance_is_told_all_the_same(self) -> None:
        (text,) = warned(parts=(8.0, 4.0), again=(2.01, 1.0), accepts_loss_kwargs=True)
        assert "ignores num_items_in_batch" in text

    def test_figures_that_are_not_finite_stay_sayable(self) -> None:
        found = summary(WINNER, 8, answer(parts=(float("nan"), float("inf"))))
        json.dumps(found, allow_nan=False)
        (warning,) = split_warnings(found)
        assert "more than can be said" in warning.message

    def test_the_precision_is_judged_by_its_losses(self) -> None:
        assert unsound_precision(WINNER, answer(asked=2.05)) is None
        failure = unsound_precision(WINNER, answer(asked=2.5))
        assert failure is not None
        assert failure.reason is Reason.DEPARTS_FROM_FP32
        assert unsound_precision(WINNER, answer()) is None


class Asked:
    """A child that answers as told, and keeps what it was asked."""

    def __init__(self, reply: Mapping[str, Any] | Exception) -> None:
        self.reply, self.orders, self.seconds = reply, [], []  # type: ignore[var-annotated]

    def __call__(self, payload: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        self.orders.append(CheckOrder.from_json(payload))
        self.seconds.append(seconds)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    @property
    def names(self) -> list[list[str]]:
        return [[f.name for f in order.forms] for order in self.orders]


class TestWhen:
    """One child per search, when it matters, within the time."""

    def test_splits_once_and_each_precision_once(self) -> None:
        asked = Asked(answer(asked=2.0))
        check = SoundnessCheck(asked, ORDER, facts={})
        for winner in (WINNER, WINNER, WINNER.but(precision=Precision.FP16)):
            assert check(winner, [ran(8)], None) is None
        assert asked.names == [["whole", "again", "parts", "asked"], ["whole", "asked"]]
        assert check.summary["split_loss_difference"] == 0.0

    def test_nothing_is_run_for_fp32_at_the_split_of_the_baseline(self) -> None:
        asked = Asked(answer())
        winner = make_config(8, effective_batch=8)
        assert SoundnessCheck(asked, ORDER, facts={})(winner, [make_record(0, winner, 1.0, role=Role.DEFAULTS)], None) is None
        assert asked.orders == []

    @pytest.mark.parametrize(
        ("facts", "records", "seconds", "reason"),
        [
            ({"script": {}}, [ran(8)], None, "script"),
            ({}, [ran(8)], 1.0, "time budget"),
            ({}, [ran(1)], None, "no batch of 2"),
        ],
    )
    def test_why_it_was_not_run_is_kept(
        self, facts: dict[str, Any], records: list[TrialRecord], seconds: float | None, reason: str
    ) -> None:
        asked = Asked(answer())
        check = SoundnessCheck(asked, ORDER, facts=facts)
        assert check(WINNER, records, seconds) is None
        assert asked.orders == []
        assert reason in check.summary["skipped"]

    @pytest.mark.parametrize("facts", [{"weights_dtype": "bfloat16"}, {"quantization": "4bit"}])
    def test_a_model_without_fp32_weights_has_nothing_to_be_compared_with(self, facts: dict[str, Any]) -> None:
        asked = Asked(answer())
        check = SoundnessCheck(asked, ORDER, facts=facts)
        assert check(WINNER, [ran(8)], None) is None
        assert asked.orders == []
        assert "not float32" in check.summary["skipped"]

    def test_it_takes_no_longer_than_is_left(self) -> None:
        asked = Asked(answer(asked=2.0))
        SoundnessCheck(asked, ORDER, facts={})(WINNER, [ran(8)], 12.0)
        assert asked.seconds == [12.0]

    def test_a_failure_of_the_check_is_a_word(self) -> None:
        asked = Asked(WorkerError("the check request failed", hint="Traceback ...\nRuntimeError: out of luck"))
        check = SoundnessCheck(asked, ORDER, facts={})
        assert check(WINNER, [ran(8)], None) is None
        (warning,) = check.warnings
        assert warning.code == "unchecked"
        assert "RuntimeError: out of luck" in warning.message


def checked_search(*unsound: Precision) -> tuple[Play, list[TrialConfig]]:
    """A search on a simulated card whose check refuses some precisions."""
    play = prepare(simulated_landscape(32, ruggedness=0.05), sampler="auto")
    asked: list[TrialConfig] = []

    def check(winner: TrialConfig, records: Sequence[TrialRecord], seconds: float | None) -> Failure | None:
        asked.append(winner)
        refused = winner.precision in unsound
        return Failure(reason=Reason.DEPARTS_FROM_FP32, message="it departs") if refused else None

    search: Search = play.search
    search._check = check
    return play, asked


def test_where_nothing_is_sound_that_is_the_error() -> None:
    """The space is the precision that departs; the baseline outside it is no answer."""
    landscape = simulated_landscape(8, precisions=(Precision.BF16,))
    play = prepare(landscape, sampler="grid")
    play.search._check = lambda winner, records, seconds: Failure(reason=Reason.DEPARTS_FROM_FP32, message="it departs")
    with pytest.raises(SearchFailed, match=r"^no configuration trains soundly: it departs") as caught:
        play.run()
    assert "fp32" in str(caught.value.hint)


class TestSearch:
    """The check's verdict decides who wins."""

    def test_a_sound_winner_stays(self) -> None:
        play, asked = checked_search()
        finding = play.run()
        assert asked == [finding.winner]
        assert finding.winner.precision is Precision.BF16
        assert finding.confirmed

    def test_an_unsound_precision_does_not_win_and_is_not_tried_again(self) -> None:
        play, asked = checked_search(Precision.BF16)
        finding = play.run()
        assert [c.precision for c in asked] == [Precision.BF16, Precision.FP32]
        assert finding.winner.precision is Precision.FP32
        assert finding.confirmed
        where = next(i for i, r in enumerate(play.records) if r.failure and r.failure.reason is Reason.DEPARTS_FROM_FP32)
        later = play.records[where + 1 :]
        assert all(r.outcome is Outcome.SKIPPED or r.config.precision is Precision.FP32 for r in later)
        assert play.records[where].outcome is Outcome.INFEASIBLE
        assert finding.winner in {r.config for r in play.records if r.outcome is Outcome.COMPLETED}
