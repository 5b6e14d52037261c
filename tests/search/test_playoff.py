"""The play-off: ties, separation, order of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autofit.problem.config import TrialConfig
from autofit.search.playoff import LOOKS, Verdict, decide, run_of, student_quantile
from autofit.trials.measurement import Measurement, Memory, t_quantile
from autofit.trials.trial import Failure, Outcome, Reason, Role, TrialRecord
from autofit.units import GIB
from tests.builders import make_config, make_record

OPTIMS = ("adamw_torch_fused", "adafactor", "adamw_torch", "sgd")


class Stage:
    """Configurations with known true speeds, run with jitter within runs and a random walk between them."""

    def __init__(self, slower: Sequence[float], *, jitter: float, drift: float = 0.0, seed: int = 0) -> None:
        self.configs = [
            TrialConfig(per_device_train_batch_size=8, optim=OPTIMS[i]) for i in range(len(slower))
        ]
        self._slower, self._jitter, self._drift = slower, jitter, drift
        self._rng, self._walk = np.random.default_rng(seed), 0.0
        self.records: list[TrialRecord] = []
        for config in self.configs:
            self.run(config, Role.SEARCH)

    def run(self, config: TrialConfig, role: Role) -> None:
        """Add one completed run; the later a configuration stands, the less memory it needs."""
        place = self.configs.index(config)
        self._walk = 0.8 * self._walk + 0.6 * float(self._rng.normal(0.0, self._drift))
        seconds = 0.1 * (1 + self._slower[place]) * math.exp(self._walk)
        samples = tuple(float(s) for s in seconds * np.exp(self._rng.normal(0.0, self._jitter, 12)))
        memory = Memory(peak_reserved_bytes=(20 - place) * GIB)
        measurement = Measurement(micro_step_seconds=samples, memory=memory)
        self.records.append(
            TrialRecord(
                number=len(self.records),
                config=config,
                role=role,
                outcome=Outcome.COMPLETED,
                measurement=measurement,
            )
        )

    def play(self) -> tuple[Verdict, list[tuple[TrialConfig, ...]]]:
        """Run rounds until the verdict stands; also the rounds."""
        rounds = []
        while (verdict := decide(self.records, tolerance=0.01)).next_round:
            rounds.append(verdict.next_round)
            for config in verdict.next_round:
                self.run(config, Role.PLAYOFF)
        return verdict, rounds


@pytest.mark.parametrize(("jitter", "drift"), [(0.01, 0.005), (0.02, 0.02), (0.2, 0.1)])
def test_equal_configurations_are_tied_at_least_95_percent_of_the_time(jitter: float, drift: float) -> None:
    verdicts = [Stage((0.0, 0.0), jitter=jitter, drift=drift, seed=s).play()[0] for s in range(120)]
    assert sum(len(v.tied) == 2 for v in verdicts) >= 0.95 * 120 - 4  # 4: two standard errors of 120 draws


def test_a_tie_goes_to_the_lower_memory() -> None:
    stage = Stage((0.0, 0.0), jitter=0.01, drift=0.005)
    verdict, _ = stage.play()
    assert set(verdict.tied) == set(stage.configs)
    assert verdict.winner == stage.configs[1]


def test_a_difference_of_two_percent_is_found_on_a_quiet_machine() -> None:
    wins = 0
    for seed in range(20):
        stage = Stage((0.0, 0.02), jitter=0.01, drift=0.003, seed=seed)
        wins += stage.play()[0].winner == stage.configs[0]
    assert wins == 20


def test_rounds_are_interleaved_and_turn_around() -> None:
    _, rounds = Stage((0.0, 0.0, 0.0), jitter=0.01).play()
    assert all(len(order) == 3 for order in rounds[:3])
    assert rounds[1] == rounds[0][::-1]
    assert rounds[2] == rounds[0]


def test_it_ends_after_the_last_look_however_noisy_the_machine() -> None:
    _, rounds = Stage((0.0, 0.0), jitter=0.5, drift=0.3).play()
    assert len(rounds) <= LOOKS[-1]


def test_a_clear_winner_plays_no_round() -> None:
    verdict, rounds = Stage((0.0, 0.5), jitter=0.01).play()
    assert rounds == []
    assert verdict.tied == (verdict.winner,)


def test_who_is_out_of_memory_in_the_playoff_has_lost() -> None:
    stage = Stage((0.0, 0.0), jitter=0.01)
    failure = Failure(reason=Reason.OUT_OF_MEMORY, message="out of memory")
    stage.records.append(
        TrialRecord(
            number=9,
            config=stage.configs[1],
            role=Role.PLAYOFF,
            outcome=Outcome.INFEASIBLE,
            failure=failure,
        )
    )
    verdict, _ = stage.play()
    assert verdict.winner == stage.configs[0]


def test_the_order_of_the_records_does_not_matter() -> None:
    stage = Stage((0.0, 0.01, 0.02), jitter=0.02)
    verdict, _ = stage.play()
    assert decide(stage.records[::-1], tolerance=0.01) == verdict


def test_without_a_completed_record_there_is_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match="no configuration completed"):
        decide((), tolerance=0.01)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 30])
def test_quantiles_agree_with_the_table(freedom: int) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(t_quantile(freedom), rel=0.0005)


def met(speeds: Sequence[float], scatter: float, rng: np.random.Generator, within: float = 0.003) -> list[TrialRecord]:
    """Twelve rounds of leaders with noise of their own in each run, beside the drift of the round and the jitter within runs."""
    configs = [TrialConfig(per_device_train_batch_size=2**i) for i in range(len(speeds))]
    drift = rng.normal(0.0, 0.02, LOOKS[-1])

    def record(config: TrialConfig, role: Role, log_speed: float) -> TrialRecord:
        seconds = 0.1 * config.per_device_train_batch_size * math.exp(-log_speed)
        samples = tuple(float(s) for s in seconds * np.exp(rng.normal(0.0, within * 12**0.5, 12)))
        return TrialRecord(number=0, config=config, role=role, outcome=Outcome.COMPLETED, measurement=Measurement(micro_step_seconds=samples))

    found = [record(c, Role.SEARCH, s) for c, s in zip(configs, speeds)]
    for shift in drift:
        found += [record(c, Role.PLAYOFF, s + float(shift + rng.normal(0.0, scatter))) for c, s in zip(configs, speeds)]
    return [replace(r, number=n) for n, r in enumerate(found)]


@pytest.mark.parametrize("leaders", [2, 5])
@pytest.mark.parametrize("scatter", [0.0, 0.01])
def test_equal_configurations_are_tied_whether_or_not_runs_have_noise_of_their_own(leaders: int, scatter: float) -> None:
    rng, plays = np.random.default_rng(1), 120
    tied = sum(len(decide(met([0.0] * leaders, scatter, rng), tolerance=0.01).tied) == leaders for _ in range(plays))
    assert tied >= 0.95 * plays - 4


@pytest.mark.parametrize("leaders", [2, 5])
@pytest.mark.parametrize("scatter", [0.003, 0.01])
def test_three_percent_are_found_though_runs_have_noise_of_their_own(leaders: int, scatter: float) -> None:
    rng = np.random.default_rng(2)
    verdicts = [decide(met([0.03] + [0.0] * (leaders - 1), scatter, rng), tolerance=0.01) for _ in range(40)]
    assert sum(len(v.tied) == 1 and v.winner.per_device_train_batch_size == 1 for v in verdicts) >= 36


def test_noise_within_runs_is_no_drift_between_them() -> None:
    """Rounds show what whole runs drift: what is assumed of it for a single run is not added to them."""
    rng = np.random.default_rng(3)
    verdicts = [decide(met([0.07, 0.0], 0.0, rng, within=0.03), tolerance=0.01) for _ in range(40)]
    assert sum(len(v.tied) == 1 and v.winner.per_device_train_batch_size == 1 for v in verdicts) >= 30


def test_a_playoff_that_is_cut_off_keeps_the_rules_of_ties_and_names_all_that_are_not_separated() -> None:
    plain, lossy, slower = make_config(8), make_config(8, optim="adafactor"), make_config(4)
    records = [
        make_record(0, plain, 998.0, jitter=0.05, needed_bytes=9 * GIB),
        make_record(1, lossy, 1000.0, jitter=0.05, needed_bytes=8 * GIB),
        make_record(2, slower, 970.0, jitter=0.05, needed_bytes=7 * GIB),
    ]
    verdict = decide(records, tolerance=0.01, keeps=lambda config: config != lossy)
    assert verdict.next_round
    assert not verdict.settled
    assert verdict.winner == plain, "as fast but for the tolerance, and it leaves the mathematics as it is"
    assert set(verdict.tied) == {plain, lossy, slower}, "one that needs less memory than the fastest is not dropped"
    assert decide(records, tolerance=0.01).winner == lossy, "the lower memory of those as fast, where nothing else is known"


@pytest.mark.parametrize("workers", [0, 4])
def test_leaders_are_compared_at_the_speeds_that_the_report_shows(workers: int) -> None:
    """Four workers deliver four batches in a burst: a median of the waits would not see what they cost."""
    config = make_config(64)
    measurement = Measurement(
        micro_step_seconds=(0.3,) * 16,
        fetch_seconds=(0.001, 0.001, 0.001, 1.6) * 4,
        update_seconds=(0.01,) * 16,
        facts={"loader": {"dataloader_num_workers": workers}},
    )
    record = TrialRecord(number=0, config=config, outcome=Outcome.COMPLETED, measurement=measurement)
    assert math.exp(run_of(record).log_speed) == pytest.approx(record.samples_per_second)


def test_runs_that_were_cut_off_put_nobody_out() -> None:
    fast, slow = make_config(32), make_config(16)
    records = [make_record(0, fast, 1000.0, jitter=0.05), make_record(1, slow, 960.0, jitter=0.05)]
    before = decide(records, tolerance=0.01)
    records += [make_record(n, fast, role=Role.PLAYOFF, reason=Reason.INTERRUPTED) for n in (2, 3)]
    assert decide(records, tolerance=0.01) == before


def test_what_the_confirmation_takes_does_not_change_the_winner() -> None:
    one, other = make_config(32), make_config(16)
    records = [make_record(n, c, 1000.0, needed_bytes=GIB + n) for n, c in enumerate((one, other))]
    records += [
        make_record(2 + n, c, 1000.0, needed_bytes=GIB + n % 2, role=Role.PLAYOFF)
        for n, c in enumerate((one, other) * LOOKS[-1])
    ]
    assert decide(records, tolerance=0.01).winner == one
    records.append(make_record(99, one, 1000.0, needed_bytes=2 * GIB, role=Role.CONFIRMATION))
    assert decide(records, tolerance=0.01).winner == one


def test_of_configurations_as_fast_as_each_other_those_that_keep_the_mathematics_come_first() -> None:
    plain, lossy = make_config(8), make_config(8, optim="adafactor")
    records = [make_record(0, plain, 1000.0, needed_bytes=9 * GIB), make_record(1, lossy, 1000.0, needed_bytes=8 * GIB)]
    records += [
        make_record(2 + n, config, 1000.0, needed_bytes=(9 - n % 2) * GIB, role=Role.PLAYOFF)
        for n, config in enumerate((plain, lossy) * LOOKS[-1])
    ]
    assert decide(records, tolerance=0.01).winner == lossy, "the lower memory, where nothing else is known"
    verdict = decide(records, tolerance=0.01, keeps=lambda config: config.optim != "adafactor")
    assert verdict.winner == plain
    assert verdict.tied == (plain, lossy)


def test_a_faster_configuration_is_not_given_up_for_the_mathematics() -> None:
    plain, lossy = make_config(8), make_config(8, optim="adafactor")
    records = [make_record(0, plain, 900.0, jitter=0.001), make_record(1, lossy, 1000.0, jitter=0.001)]
    assert decide(records, tolerance=0.01, keeps=lambda config: config == plain).winner == lossy


def test_memory_is_no_reason_to_take_a_chance_with_speed() -> None:
    """Cut off before the first look, or too noisy to tell: nothing shows that the smaller one costs no more than the tolerance."""
    large, small = make_config(8), make_config(4)
    records = [make_record(0, large, 1000.0, jitter=0.05, needed_bytes=9 * GIB), make_record(1, small, 995.0, jitter=0.05, needed_bytes=2 * GIB)]
    assert decide(records, tolerance=0.01).winner == large
    rng = np.random.default_rng(5)
    for _ in range(LOOKS[-1]):
        drawn = [(c, speed * math.exp(rng.normal(0.0, 0.05)), gib) for c, speed, gib in ((large, 1000.0, 9), (small, 995.0, 2))]
        records += [make_record(0, c, speed, needed_bytes=gib * GIB, role=Role.PLAYOFF) for c, speed, gib in drawn]
    records = [replace(record, number=n) for n, record in enumerate(records)]
    verdict = decide(records, tolerance=0.01)
    faster = max((large, small), key=lambda c: math.fsum(run_of(r).log_speed for r in records if r.config == c and r.role is Role.PLAYOFF))
    assert set(verdict.tied) == {large, small}
    assert verdict.winner == faster


def test_the_rounds_end_when_no_other_can_be_expected_to_gain_much() -> None:
    """Whether the second is 0.5 or 2 % slower is open after the first look, but it is not faster by anything that matters."""
    lengths = [len(Stage((0.0, 0.012), jitter=0.012, drift=0.0, seed=seed).play()[1]) for seed in range(20)]
    assert sum(length <= LOOKS[0] for length in lengths) >= 15


def test_one_that_keeps_the_mathematics_needs_not_be_proved_the_fastest() -> None:
    plain, lossy = make_config(8), make_config(8, optim="adafactor")
    rng = np.random.default_rng(4)
    records = [make_record(0, plain, 1000.0), make_record(1, lossy, 1004.0)]
    for n in range(LOOKS[0]):
        for place, (config, speed) in enumerate(((plain, 1000.0), (lossy, 1004.0))):
            records.append(make_record(2 + 2 * n + place, config, speed * math.exp(rng.normal(0.0, 0.002)), role=Role.PLAYOFF))
    kept = decide(records, tolerance=0.01, keeps=lambda config: config == plain)
    assert (kept.winner, kept.next_round) == (plain, ())


def test_a_round_that_was_cut_off_compares_nobody() -> None:
    """The machine has become slow since the search: who ran in the new round is not slower for that than who did not."""
    fast, slow = make_config(8), make_config(4)
    records = [make_record(0, fast, 1000.0, jitter=0.05), make_record(1, slow, 950.0, jitter=0.05)]
    records.append(make_record(2, fast, 400.0, jitter=0.05, role=Role.PLAYOFF))
    assert decide(records, tolerance=0.01).winner == fast


def test_who_joins_late_is_compared_in_the_rounds_that_all_have_run() -> None:
    """The last rounds were slow for all; the one that joined late ran in the first rounds' numbers at the speed of today."""
    one, other = make_config(8), make_config(4)
    records = [make_record(0, one, 1000.0, jitter=0.01), make_record(1, other, 990.0, jitter=0.01)]
    speeds = [(one, 1000.0), (other, 980.0), (other, 980.0), (one, 1000.0), (one, 500.0)]
    records += [make_record(2 + n, config, speed, jitter=0.01, role=Role.PLAYOFF) for n, (config, speed) in enumerate(speeds)]
    assert decide(records, tolerance=0.001).winner == one


def test_who_joins_late_is_not_compared_with_what_others_ran_before() -> None:
    """Two have met three times when the machine becomes slower by a fifth and a third comes, which is the fastest."""
    speeds = {make_config(8): 1000.0, make_config(4): 1000.0, make_config(2): 1050.0}
    first, second, late = speeds
    rng = np.random.default_rng(6)
    records = [make_record(n, config, 1000.0, jitter=0.02) for n, config in enumerate(speeds)]

    def run(config: TrialConfig, machine: float) -> None:
        speed = machine * speeds[config] * math.exp(rng.normal(0.0, 0.003))
        records.append(make_record(len(records), config, speed, jitter=0.02, role=Role.PLAYOFF))

    for config in (first, second, second, first, first, second):
        run(config, 1.0)
    rounds = []
    while (verdict := decide(records, tolerance=0.01)).next_round:
        rounds.append(verdict.next_round)
        for config in verdict.next_round:
            run(config, 0.8)
    assert verdict.winner == late
    assert rounds[0] == (late,), "in the turn that the others have just run"
    assert all(set(turn) == set(speeds) for turn in rounds[1:3])


def test_of_runs_that_are_the_same_to_the_last_digit_the_lowest_memory_wins() -> None:
    """One batch each: nothing is sure, and what arithmetic leaves in the last digits of a speed is no difference."""
    configs = [make_config(8, optim=optim) for optim in OPTIMS]
    for seconds in (0.1, 0.3137, 0.0717):
        records = []
        for role in (Role.SEARCH, *(Role.PLAYOFF,) * LOOKS[-1]):
            for place, config in enumerate(configs):
                measurement = Measurement(micro_step_seconds=(seconds,), memory=Memory(peak_reserved_bytes=(20 - place) * GIB))
                number = len(records)
                records.append(TrialRecord(number=number, config=config, role=role, outcome=Outcome.COMPLETED, measurement=measurement))
        assert decide(records, tolerance=0.01).winner == configs[-1]


def test_only_those_that_played_are_levelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds that never played would cost their number's cube after every round, and no round says anything of them."""
    configs = [TrialConfig(per_device_train_batch_size=1 + n) for n in range(200)]
    records = [make_record(n, config, 1000.0 - n, jitter=0.001) for n, config in enumerate(configs)]
    records += [make_record(200 + n, config, 1000.0 - n, jitter=0.001, role=Role.PLAYOFF) for n, config in enumerate(configs[:2])]
    sizes, solve = [], np.linalg.lstsq
    monkeypatch.setattr(np.linalg, "lstsq", lambda design, *rest, **more: sizes.append(design.shape) or solve(design, *rest, **more))
    assert decide(records, tolerance=0.01).winner == configs[0]
    assert sizes == [(4, 3)]
