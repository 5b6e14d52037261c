"""What may still run, and why not the rest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autofit.beliefs.predict import MemoryForecast
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.search.eligibility import Eligibility, failed_for_good, overprediction
from autofit.trials.trial import Reason
from autofit.units import GIB
from tests.builders import make_config, make_record

LIMIT = 10 * GIB
SMALL, MIDDLE, LARGE = (make_config(batch) for batch in (8, 16, 32))
OTHER = make_config(32, optim="adafactor")
SPACE = Space(configs=(SMALL, MIDDLE, LARGE, OTHER))


@dataclass(frozen=True)
class PerSample:
    """Memory that grows with the batch."""

    bytes_per_sample: int

    def needed(self, config: TrialConfig) -> MemoryForecast:
        guess = config.per_device_train_batch_size * self.bytes_per_sample
        return MemoryForecast(low_bytes=int(0.95 * guess), bytes=guess, high_bytes=int(1.05 * guess))


def test_everything_may_run_while_nothing_is_known() -> None:
    assert Eligibility(SPACE, limit_bytes=LIMIT).open(()) == list(SPACE.configs)


def test_what_completed_does_not_run_again() -> None:
    assert SMALL not in Eligibility(SPACE, limit_bytes=LIMIT).open([make_record(0, SMALL, 10.0)])


def test_what_needs_as_much_as_one_that_did_not_fit_is_dominated() -> None:
    eligible, records = Eligibility(SPACE, limit_bytes=LIMIT), [make_record(0, MIDDLE, reason=Reason.OUT_OF_MEMORY)]
    reason = eligible.reason_to_skip(LARGE, records)
    assert reason is not None
    assert reason.reason is Reason.DOMINATED
    assert MIDDLE.label() in reason.message
    assert eligible.open(records) == [SMALL, OTHER]
    assert eligible.untested_counts(records) == {"not_promising": 2, "dominated": 1}


def test_what_is_predicted_clearly_too_big_does_not_run_and_what_is_in_the_band_does() -> None:
    eligible = Eligibility(SPACE, limit_bytes=LIMIT, memory=PerSample(LIMIT // 16))
    assert eligible.open(()) == [SMALL, MIDDLE]
    assert eligible.predicted_bytes(MIDDLE) == LIMIT
    assert (eligible.likely_fits(MIDDLE, ()), eligible.likely_fits(LARGE, ())) == (True, False)
    assert eligible.untested_counts(()) == {"not_promising": 2, "predicted_too_big": 2}


def test_what_was_skipped_may_run_once_the_reason_is_gone() -> None:
    skipped, memory = make_record(0, LARGE, reason=Reason.PREDICTED_TOO_BIG), PerSample(GIB)
    assert Eligibility(SPACE, limit_bytes=40 * GIB, memory=memory).may_run(LARGE, [skipped])
    assert not Eligibility(SPACE, limit_bytes=LIMIT, memory=memory).may_run(LARGE, [skipped])


def test_forecasts_that_were_too_high_no_longer_keep_anything_out() -> None:
    eligible = Eligibility(SPACE, limit_bytes=LIMIT, memory=PerSample(LIMIT // 28))
    assert LARGE not in eligible.open(())
    measured = make_record(0, SMALL, 10.0, predicted_bytes=8 * LIMIT // 28, needed_bytes=int(0.7 * 8 * LIMIT / 28))
    assert overprediction([measured]) == pytest.approx(0.7, rel=1e-6)
    assert LARGE in eligible.open([measured])


def test_without_a_prediction_what_was_learned_says_what_is_likely() -> None:
    assert Eligibility(SPACE, limit_bytes=LIMIT).likely_fits(SMALL, ()) is None
    eligible = Eligibility(SPACE, limit_bytes=LIMIT, learned=lambda config, records: config == SMALL)
    assert (eligible.likely_fits(SMALL, ()), eligible.likely_fits(LARGE, ())) == (True, False)


@pytest.mark.parametrize(
    ("reasons", "ended"),
    [
        ((), False),
        ((Reason.INTERRUPTED, Reason.INTERRUPTED), False),
        ((Reason.CRASH,), False),
        ((Reason.CRASH, Reason.UNREADABLE_ANSWER), True),
        ((Reason.ERROR,), True),
        ((Reason.CRASH, Reason.ERROR), True),
    ],
)
def test_a_crash_has_a_second_chance_and_an_exception_none(reasons: tuple[Reason, ...], ended: bool) -> None:
    records = [make_record(0, SMALL, reason=reason) for reason in reasons]
    assert failed_for_good(records) is ended
    assert Eligibility(SPACE, limit_bytes=LIMIT).may_run(SMALL, records) is not ended
