"""What each knob was worth: measured where it was measured, fitted where it can be, and said to be unknown where it cannot."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.problem.config import Precision, TrialConfig
from autofit.reports.report_trials import knob_lines
from autofit.results.knob_worth import Evidence, Share, Waterfall, knob_worths, waterfall
from autofit.results.result import TuneResult
from autofit.trials.estimates import estimates
from autofit.trials.trial import Reason, Role, TrialRecord
from tests.builders import make_config, make_record, make_result

FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
FUSED, BNB = "adamw_torch_fused", "adamw_bnb_8bit"
BASE = make_config(8)


def result_of(speeds: dict[TrialConfig, float], *, best: TrialConfig | None = None) -> TuneResult:
    records = [make_record(i, c, s, jitter=0.0) for i, (c, s) in enumerate(speeds.items())]
    return make_result(records, defaults=BASE, best=best)


def fall(result: TuneResult) -> Waterfall:
    found = waterfall(result)
    assert found is not None
    return found


def by_knobs(found: Waterfall) -> dict[tuple[str, ...], Share]:
    return {tuple(c.knob for c in share.changes): share for share in found.shares}


def test_one_changed_knob_is_one_measured_share() -> None:
    found = fall(result_of({BASE: 100.0, BASE.but(precision=BF16): 300.0}))
    (share,) = found.shares
    assert share.evidence is Evidence.MEASURED
    assert share.factor == pytest.approx(3.0)
    assert (share.changes[0].knob, share.changes[0].before, share.changes[0].after) == (
        "precision",
        "fp32",
        "bf16",
    )
    assert found.miss is None
    assert found.fitted_trials == 0


def test_a_measured_way_from_defaults_to_winner_needs_no_fit() -> None:
    middle, end = BASE.but(precision=BF16), make_config(64, precision=BF16)
    last = end.but(optim=BNB)
    found = fall(result_of({BASE: 100.0, middle: 250.0, end: 500.0, last: 520.0}))
    assert [s.changes[0].knob for s in found.shares] == ["precision", "per_device_train_batch_size", "optim"]
    assert [s.factor for s in found.shares] == pytest.approx([2.5, 2.0, 1.04])
    assert {s.evidence for s in found.shares} == {Evidence.MEASURED}


def test_a_direct_pair_is_not_used_when_it_mixes_in_a_third_value() -> None:
    """fp16 is neither the defaults' nor the winner's precision: that trial is no step of the walk."""
    aside, end = BASE.but(precision=FP16), make_config(64, precision=BF16)
    found = fall(result_of({BASE: 100.0, aside: 240.0, end: 500.0}))
    assert len(found.shares) == 1
    assert len(found.shares[0].changes) == 2


def test_knobs_that_were_only_changed_together_stay_together() -> None:
    end = make_config(64, precision=BF16)
    (share,) = fall(result_of({BASE: 100.0, end: 400.0})).shares
    assert {c.knob for c in share.changes} == {"precision", "per_device_train_batch_size"}
    assert share.factor == pytest.approx(4.0)
    assert share.evidence is Evidence.MEASURED


def additive(config: TrialConfig) -> float:
    speed = 100.0 * (config.per_device_train_batch_size / 8) ** 0.3
    speed *= {FP32: 1.0, BF16: 2.5, FP16: 2.2}[config.precision]
    return speed * (0.8 if config.gradient_checkpointing else 1.0) * (1.1 if config.optim == BNB else 1.0)


def test_where_the_world_is_additive_the_fit_finds_each_knob_exactly() -> None:
    """Batch is known from the bf16 trials, so the jump from fp32 at 8 to bf16 at 64 can be split."""
    end = make_config(64, precision=BF16)
    configs = [BASE, make_config(16, precision=BF16), make_config(32, precision=BF16), end]
    found = fall(result_of({c: additive(c) for c in configs}, best=end))
    shares = by_knobs(found)
    assert shares[("precision",)].factor == pytest.approx(2.5)
    assert shares[("per_device_train_batch_size",)].factor == pytest.approx(8**0.3)
    assert {s.evidence for s in found.shares} == {Evidence.FITTED}
    assert found.fitted_trials == 4
    assert found.miss == pytest.approx(0.0, abs=1e-9)


def test_a_fit_without_a_trial_left_to_check_it_has_no_miss() -> None:
    end = make_config(64, precision=BF16)
    found = fall(result_of({c: additive(c) for c in (BASE, make_config(16, precision=BF16), end)}, best=end))
    assert {s.evidence for s in found.shares} == {Evidence.FITTED}
    assert found.miss is None


def test_what_the_fit_cannot_explain_is_shared_equally_as_shapley_says() -> None:
    """Against the definition: the mean over all orders, inner mixtures additive, the whole measured."""
    end = make_config(64, precision=BF16, optim=BNB)
    others = [
        make_config(b, precision=p, optim=o)
        for b, p, o in itertools.product((16, 32), (FP32, BF16), (FUSED, BNB))
    ]
    speeds = {c: additive(c) for c in [BASE, *others]} | {end: 1.3 * additive(end)}
    found = fall(result_of(speeds, best=end))
    shares = by_knobs(found)
    assert set(shares) == {("precision",), ("optim",), ("per_device_train_batch_size",)}
    assert math.prod(s.factor for s in found.shares) == pytest.approx(speeds[end] / 100.0)
    factors = [s.factor for s in found.shares]
    assert shares[("precision",)].factor > 2.0
    assert min(factors) > 1.0
    assert found.miss is not None
    assert 0.0 < found.miss < 0.3


def test_part_of_a_step_may_be_fitted_and_the_rest_stay_together() -> None:
    """The optimizer's effect is known from elsewhere; precision and checkpointing were only changed together."""
    end = make_config(8, precision=BF16, optim=BNB, gradient_checkpointing=True)
    aside = make_config(8, precision=FP16)
    speeds = {BASE: 100.0, aside: 200.0, aside.but(optim=BNB): 220.0, end: 260.0}
    found = fall(result_of(speeds, best=end))
    shares = by_knobs(found)
    assert shares[("optim",)].factor == pytest.approx(1.1)
    assert set(shares) == {("optim",), ("gradient_checkpointing", "precision")}
    assert math.prod(s.factor for s in found.shares) == pytest.approx(2.6)


def test_the_winner_that_is_the_defaults_has_no_shares() -> None:
    assert fall(result_of({BASE: 100.0, BASE.but(precision=BF16): 50.0})).shares == ()


def test_without_plain_defaults_the_walk_starts_at_the_hand_recipe() -> None:
    recipe, end = make_config(4, precision=BF16), make_config(4, precision=BF16, optim=BNB)
    records = [
        make_record(0, BASE, reason=Reason.OUT_OF_MEMORY, role=Role.DEFAULTS),
        make_record(1, recipe, 50.0, role=Role.HAND_RECIPE),
        make_record(2, end, 55.0),
    ]
    found = fall(make_result(records))
    assert found.baseline == "hand_recipe"
    assert [s.changes[0].knob for s in found.shares] == ["optim"]


def test_without_any_baseline_there_is_no_waterfall() -> None:
    records = [
        make_record(0, BASE, reason=Reason.OUT_OF_MEMORY, role=Role.DEFAULTS),
        make_record(1, make_config(4), 5.0),
    ]
    assert waterfall(make_result(records)) is None


def test_an_extra_that_is_not_set_is_a_value_too() -> None:
    compiled = BASE.but(extra=(("torch_compile", True),))
    (share,) = fall(result_of({BASE: 100.0, compiled: 130.0})).shares
    assert (share.changes[0].knob, share.changes[0].before, share.changes[0].after) == (
        "torch_compile",
        None,
        True,
    )


def test_worth_of_a_value_is_its_best_measured_speed_against_the_winner() -> None:
    end = make_config(64, precision=BF16)
    records = [
        make_record(0, BASE, 100.0, jitter=0.0),
        make_record(1, make_config(64), reason=Reason.OUT_OF_MEMORY),
        make_record(2, make_config(16), 150.0, jitter=0.0),
        make_record(3, end, 400.0, jitter=0.0),
        make_record(4, make_config(64, precision=FP16), reason=Reason.PREDICTED_TOO_BIG),
    ]
    worths = {w.knob: w for w in knob_worths(make_result(records))}
    assert set(worths) == {"precision", "per_device_train_batch_size"}
    bf16, fp32 = worths["precision"].values
    assert (bf16.value, bf16.relative) == ("bf16", pytest.approx(1.0))
    assert (fp32.value, fp32.relative) == ("fp32", pytest.approx(0.375))
    assert (fp32.completed, fp32.misfits, fp32.unsound) == (2, 1, 0)


def test_an_unsound_value_is_not_one_that_does_not_fit() -> None:
    records = [
        make_record(0, BASE, 100.0, jitter=0.0),
        make_record(1, make_config(64, precision=FP16), reason=Reason.NON_FINITE_LOSS),
        make_record(2, make_config(64, precision=BF16), reason=Reason.OUT_OF_MEMORY),
    ]
    result = make_result(records)
    text = "\n".join(knob_lines(result, {e.config: e for e in estimates(records).values()}, 100))
    assert "fp16 did not train soundly" in text
    assert "bf16 did not fit" in text


def test_a_value_that_completed_in_a_precision_that_departs_is_not_said_to_have_failed() -> None:
    half = make_config(16, precision=BF16)
    records = [
        make_record(0, BASE, 100.0, jitter=0.0),
        make_record(1, half, 300.0, jitter=0.0),
        make_record(2, half.but(optim=BNB), 200.0, jitter=0.0),
        make_record(3, half, reason=Reason.DEPARTS_FROM_FP32, role=Role.CONFIRMATION),
    ]
    result = make_result(records)
    text = "\n".join(knob_lines(result, {e.config.key(): e for e in estimates(records).values()}, 140))
    assert "did not complete" not in text
    assert "bf16 did not train soundly" in text
    assert "16 ran only in a precision that departs from fp32" in text
    assert f"{BNB} ran only in a precision that departs from fp32" in text


def test_a_run_that_was_cut_off_does_not_hide_that_another_did_not_fit() -> None:
    fp16 = make_config(64, precision=FP16)
    records = [make_record(0, BASE, 100.0), make_record(1, fp16, reason=Reason.OUT_OF_MEMORY), make_record(2, fp16, reason=Reason.INTERRUPTED)]
    text = "\n".join(knob_lines(make_result(records), estimates(records), 140))
    assert "fp16 did not fit" in text


def test_a_value_that_never_completed_has_no_speed() -> None:
    records = [make_record(0, BASE, 100.0), make_record(1, BASE.but(optim=BNB), reason=Reason.OUT_OF_MEMORY)]
    (worth,) = knob_worths(make_result(records))
    assert worth.values[1].best is None
    assert worth.values[1].relative is None


@st.composite
def searches(draw: st.DrawFn) -> list[TrialRecord]:
    configs = draw(
        st.lists(
            st.builds(
                make_config,
                st.sampled_from((1, 2, 4, 8, 16, 32, 64)),
                precision=st.sampled_from((FP32, BF16, FP16)),
                optim=st.sampled_from((FUSED, BNB, "adafactor")),
                gradient_checkpointing=st.booleans(),
            ),
            min_size=1,
            max_size=12,
            unique=True,
        )
    )
    speeds = [draw(st.floats(1.0, 1000.0)) for _ in range(len(configs) + 1)]
    named = dict(zip([BASE, *configs], speeds, strict=True))
    return [make_record(i, c, s, jitter=0.0, samples=2) for i, (c, s) in enumerate(named.items())]


@settings(max_examples=40, deadline=None)
@given(records=searches())
def test_shares_multiply_to_the_whole_and_name_every_changed_knob_once(records: list[TrialRecord]) -> None:
    result = make_result(records, defaults=BASE)
    found = fall(result)
    assert math.prod(s.factor for s in found.shares) == pytest.approx(result.speedup["defaults"])
    named = [c.knob for s in found.shares for c in s.changes]
    assert len(named) == len(set(named))
    assert all(s.factor > 0 for s in found.shares)
    assert all(len(s.changes) == 1 or s.evidence is not None for s in found.shares)
