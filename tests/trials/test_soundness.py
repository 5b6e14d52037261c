"""Bounds for what makes a run unsound: skipped steps, losses that are not finite, a precision that departs from fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autofit.problem.config import Precision
from autofit.trials.estimates import estimates
from autofit.trials.measurement import Measurement
from autofit.trials.soundness import (
    MAX_SKIPPED_STEPS,
    SMALL_LOSS,
    departed,
    departure,
    departure_bound,
    relative_departure,
    unsound,
)
from autofit.trials.trial import Outcome, Reason, Role
from tests.builders import make_config, make_record

REFERENCE = (2.0, 1.9, 1.8)


def run(**fields: Any) -> Measurement:
    return Measurement(**{"micro_step_seconds": (0.1,), "optimizer_steps": 40, "losses": (1.0,) * 40, **fields})


def off(share: float) -> tuple[float, ...]:
    return tuple(x * (1 + share) for x in REFERENCE)


def test_as_many_skipped_steps_as_the_search_for_a_scale_takes_are_sound_and_one_more_is_not() -> None:
    assert 65536 / 2**MAX_SKIPPED_STEPS == 1
    assert unsound(run(skipped_steps=MAX_SKIPPED_STEPS)) is None
    failure = unsound(run(skipped_steps=MAX_SKIPPED_STEPS + 1))
    assert failure is not None
    assert failure.reason is Reason.STEPS_SKIPPED
    assert failure.message.startswith("17 of 40 optimizer steps were skipped")


def test_a_scale_that_grows_again_in_a_long_run_may_skip_a_step_each_time() -> None:
    more = MAX_SKIPPED_STEPS + 5
    assert unsound(run(skipped_steps=more, optimizer_steps=10_000)) is None
    assert unsound(run(skipped_steps=more, optimizer_steps=9_999)) is not None


def test_when_all_are_skipped_that_is_what_is_said() -> None:
    failure = unsound(run(skipped_steps=40))
    assert failure is not None
    assert failure.reason is Reason.ALL_STEPS_SKIPPED


def test_the_bound_is_sixteen_roundings_of_the_format() -> None:
    assert departure_bound(Precision.BF16) == departure_bound(Precision.PURE_BF16) == 1 / 16
    assert departure_bound(Precision.FP16) == departure_bound(Precision.TF32) == 1 / 128


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.FP32])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_departure_within_the_bound_is_rounding_and_beyond_it_is_unsound(precision: Precision, sign: int) -> None:
    bound = departure_bound(precision)
    assert departure(off(0.99 * sign * bound), REFERENCE, precision) is None
    failure = departure(off(1.01 * sign * bound), REFERENCE, precision)
    assert failure is not None
    assert failure.reason is Reason.DEPARTS_FROM_FP32
    assert "off fp32's" in failure.message


def test_a_loss_that_is_finite_in_fp32_alone_is_unsound_and_one_that_never_is_is_not_the_precisions_fault() -> None:
    failure = departure((math.nan, 1.0, 1.0), REFERENCE, Precision.BF16)
    assert failure is not None
    assert "not finite where it is 1.9 in fp32" in failure.message
    assert departure(REFERENCE, (math.nan, 1.0, 1.0), Precision.BF16) is None


def test_what_follows_a_skipped_step_is_not_compared() -> None:
    assert departure((2.0, 9.0, 9.0), REFERENCE, Precision.FP16, skipped=(True, False, False)) is None
    assert departure((2.0, 9.0, 9.0), REFERENCE, Precision.FP16, skipped=(False, True, False)) is not None
    with pytest.raises(ValueError, match="no step"):
        departure((), REFERENCE, Precision.FP16)


def test_a_loss_near_nothing_counts_as_if_it_were_larger() -> None:
    assert relative_departure((0.002,), (0.001,)) == pytest.approx(0.001 / SMALL_LOSS)
    assert departure((0.002,), (0.001,), Precision.BF16) is None


def test_no_configuration_of_a_precision_that_departed_is_an_answer() -> None:
    config = make_config(8, precision=Precision.BF16)
    records = [
        make_record(0, config, 100.0),
        make_record(1, config.but(optim="adafactor"), 90.0),
        make_record(2, make_config(8), 50.0),
    ]
    assert departed(records) == frozenset()
    assert len(estimates(records)) == 3
    found = [*records, make_record(3, config, reason=Reason.DEPARTS_FROM_FP32, role=Role.CONFIRMATION)]
    assert found[-1].outcome is Outcome.INFEASIBLE
    assert departed(found) == {Precision.BF16}
    assert list(estimates(found)) == [make_config(8).key()]
