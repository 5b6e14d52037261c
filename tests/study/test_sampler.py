"""The cost-model sampler on replayed landscapes, through the real coordinator; adversaries with known answers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import optuna
import pytest

from autofit.beliefs.predict import MemoryForecast
from autofit.errors import UserError
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import Space
from autofit.problem.terms import Finding, Terms
from autofit.search.search import Search
from autofit.study.advice import Certificate
from autofit.study.journal import open_study
from autofit.study.sampler import CostModelSampler, make_sampler
from autofit.study.study import TrialStudy
from autofit.trials.landscape import Landscape
from autofit.trials.replay import ReplayRunner
from autofit.trials.trial import Outcome, Role, TrialRecord
from autofit.units import GIB
from tests.adversaries import CONTEXT, grid, plain_bytes, plain_micro


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class ExactMemory:
    """Predicts what the landscape will show, with a band of a few percent."""

    def __init__(self, landscape: Landscape) -> None:
        self._bytes = {
            p.config: p.measurement.memory.peak_reserved_bytes or 0 for p in landscape.points if p.measurement
        }

    def needed(self, config: TrialConfig) -> MemoryForecast:
        """The truth, context included."""
        guess = CONTEXT + self._bytes[config]
        return MemoryForecast(low_bytes=int(0.97 * guess), bytes=guess, high_bytes=int(1.04 * guess))


@dataclass
class Searched:
    """A finished search and the truth it is judged by."""

    finding: Finding
    records: tuple[TrialRecord, ...]
    certificate: Certificate | None
    truth: dict[TrialConfig, float]

    @property
    def regret(self) -> float:
        """Relative loss of the winner."""
        return 1.0 - self.truth[self.finding.winner] / max(self.truth.values())

    @property
    def trials(self) -> list[TrialRecord]:
        """What ran before the play-off."""
        roles = (Role.DEFAULTS, Role.HAND_RECIPE, Role.SEARCH)
        return [r for r in self.records if r.role in roles and r.outcome is not Outcome.SKIPPED]

    @property
    def out_of_memory(self) -> int:
        """Events."""
        return sum(r.outcome is Outcome.INFEASIBLE for r in self.trials)


def search(landscape: Landscape, limit: int = 80 * GIB, *, predicted: bool = True, seed: int = 0) -> Searched:
    """Search a landscape as a user would."""
    space = Space(configs=tuple(p.config for p in landscape.points))
    memory = ExactMemory(landscape) if predicted else None
    sampler = CostModelSampler(space, seed=seed, memory_limit_bytes=limit, memory=memory)
    study = TrialStudy(open_study(None, sampler=sampler, identity={}), space)
    terms = Terms(
        effective_batch=landscape.effective_batch,
        memory_limit_bytes=limit,
        trials=60,
        seed=seed,
        native_precisions=tuple({c.precision for c in space.configs}),
        baselines_outside_space=False,
    )
    runner = ReplayRunner(landscape, seed=seed)
    finding = Search(terms=terms, space=space, study=study, runner=runner, memory=memory).run()
    truth = {
        p.config: p.measurement.samples_per_second(
            per_device_train_batch_size=p.config.per_device_train_batch_size,
            gradient_accumulation_steps=p.config.gradient_accumulation_steps,
        )
        for p in landscape.points
        if p.measurement and (p.measurement.memory.peak_reserved_bytes or 0) + CONTEXT <= limit
    }
    return Searched(
        finding=finding,
        records=tuple(study.records),
        certificate=sampler.certificate(study.records),
        truth=truth,
    )


class TestPlainLandscape:
    @pytest.mark.parametrize("predicted", [True, False])
    @pytest.mark.parametrize("limit", [80 * GIB, 16 * GIB])
    def test_it_finds_the_best_within_a_percent_and_stops_with_a_certificate(
        self, predicted: bool, limit: int
    ) -> None:
        found = search(grid(), limit, predicted=predicted)
        assert found.regret <= 0.01
        assert found.certificate is not None
        assert len(found.trials) <= 16

    def test_with_memory_predicted_nothing_runs_out_of_memory_twice(self) -> None:
        assert max(search(grid(), 12 * GIB, seed=seed).out_of_memory for seed in range(3)) <= 2

    def test_no_configuration_runs_twice_before_the_playoff(self) -> None:
        keys = [r.config.key() for r in search(grid(), 16 * GIB).trials]
        assert len(keys) == len(set(keys))

    def test_the_winner_has_a_passing_record_of_its_own(self) -> None:
        found = search(grid(), 10 * GIB)
        assert any(r.config == found.finding.winner and r.outcome is Outcome.COMPLETED for r in found.records)

    def test_same_seed_same_trials(self) -> None:
        first, second = (search(grid(), 16 * GIB, seed=3) for _ in range(2))
        assert [r.config for r in first.records] == [r.config for r in second.records]

    def test_each_proposal_says_why_in_one_sentence(self) -> None:
        reasons = [r.why for r in search(grid(), 16 * GIB).trials if r.role is Role.SEARCH]
        assert reasons
        assert all(why and "predicted" in why and "\n" not in why for why in reasons)

    def test_the_certificate_names_untested_contenders_with_intervals(self) -> None:
        certificate = search(grid(), 16 * GIB).certificate
        assert certificate is not None
        assert "at 95" in certificate.statement
        assert certificate.contenders
        for contender in certificate.contenders:
            assert contender.interval.low <= contender.samples_per_second <= contender.interval.high
            assert contender.beats_probability <= 0.05


class TestAdversaries:
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_checkpointing_that_is_faster_near_the_limit_wins(self, seed: int) -> None:
        limit = 8 * GIB

        def micro(config: TrialConfig) -> float:
            crowded = plain_bytes(config) + CONTEXT > 0.8 * limit and not config.gradient_checkpointing
            return plain_micro(config) * (2.0 if crowded else 1.0)

        found = search(grid(micro=micro, optims=("adamw_torch_fused", "adamw_torch")), limit, seed=seed)
        assert found.regret <= 0.02
        assert found.finding.winner.gradient_checkpointing

    def test_throughput_that_falls_with_the_batch_ends_at_a_small_batch(self) -> None:
        def micro(config: TrialConfig) -> float:
            gain = {Precision.BF16: 2.0, Precision.FP16: 1.9, Precision.TF32: 1.2}.get(config.precision, 1.0)
            ckpt = 4 / 3 if config.gradient_checkpointing else 1.0
            return float(0.05 * config.per_device_train_batch_size**1.3 / gain * ckpt)

        found = search(grid(micro=micro))
        assert found.regret <= 0.02
        assert found.finding.winner.per_device_train_batch_size <= 2

    def test_a_cliff_between_two_batches_is_not_climbed_over(self) -> None:
        def micro(config: TrialConfig) -> float:
            return plain_micro(config) * (1.6 if config.per_device_train_batch_size > 16 else 1.0)

        found = search(grid(micro=micro))
        assert found.regret <= 0.02
        assert found.finding.winner.per_device_train_batch_size == 16

    def test_an_optimizer_that_dominates_the_step_is_found(self) -> None:
        def update(config: TrialConfig) -> float:
            seconds = {"adamw_torch_fused": 0.5, "adamw_torch": 0.9, "adafactor": 0.12, "adamw_bnb_8bit": 0.4}
            return seconds[config.optim]

        found = search(grid(update=update))
        assert found.regret <= 0.02
        assert found.finding.winner.optim == "adafactor"

    def test_heavy_noise_with_drift_costs_less_than_the_noise(self) -> None:
        regrets = [
            search(grid(jitter=0.2, drift=0.05, seed=seed), 24 * GIB, seed=seed).regret for seed in range(3)
        ]
        assert sorted(regrets)[1] <= 0.1
        assert max(regrets) <= 0.2

    @pytest.mark.parametrize("predicted", [True, False])
    def test_the_only_feasible_configuration_is_found(self, predicted: bool) -> None:
        only = TrialConfig(
            per_device_train_batch_size=1,
            gradient_accumulation_steps=64,
            gradient_checkpointing=True,
            precision=Precision.BF16,
            optim="adafactor",
        )

        def needed(config: TrialConfig) -> int:
            return 4 * GIB if config == only else 12 * GIB + plain_bytes(config)

        found = search(grid(needed=needed), 8 * GIB, predicted=predicted)
        assert found.finding.winner == only
        if predicted:
            assert found.out_of_memory == 0

    def test_where_everything_is_equal_any_winner_is_right_and_it_stops(self) -> None:
        def micro(config: TrialConfig) -> float:
            return 0.01 * config.per_device_train_batch_size

        landscape = grid(micro=micro, update=lambda config: 1e-4, needed=lambda config: 4 * GIB)
        found = search(landscape)
        assert found.certificate is not None
        assert found.regret <= 0.06


class TestOptunaContract:
    def test_a_resumed_study_is_proposed_what_the_first_one_would_have_been(self) -> None:
        landscape = grid()
        space = Space(configs=tuple(p.config for p in landscape.points))
        records = search(landscape, 16 * GIB).records[:4]
        first = CostModelSampler(space, memory_limit_bytes=16 * GIB).advise(records)
        again = CostModelSampler(space, memory_limit_bytes=16 * GIB).advise(tuple(reversed(records)))
        assert first.config == again.config

    @pytest.mark.parametrize("name", ["auto", "tpe", "random", "grid"])
    def test_every_named_sampler_proposes_from_the_space(self, name: str) -> None:
        space = Space(configs=tuple(p.config for p in grid(effective_batch=8).points))
        study = TrialStudy(
            open_study(None, sampler=make_sampler(name, space=space, seed=1), identity={}), space
        )
        proposal = study.ask()
        assert proposal.config in space

    def test_an_unknown_sampler_is_refused_with_the_known_ones(self) -> None:
        space = Space(configs=tuple(p.config for p in grid(effective_batch=2).points))
        with pytest.raises(UserError, match="unknown sampler 'best'") as caught:
            make_sampler("best", space=space)
        assert "auto" in str(caught.value.hint)

    def test_grid_order_visits_every_configuration_once(self) -> None:
        space = Space(configs=tuple(p.config for p in grid(effective_batch=2).points))
        study = TrialStudy(open_study(None, sampler=make_sampler("grid", space=space), identity={}), space)
        seen = []
        for _ in range(len(space)):
            proposal = study.ask()
            assert proposal.config is not None
            seen.append(proposal.config)
            study.drop(proposal)
        assert seen == list(space.configs)

    def test_nothing_is_known_to_fit_before_the_first_trial(self) -> None:
        space = Space(configs=tuple(p.config for p in grid().points))
        sampler = CostModelSampler(space, memory_limit_bytes=16 * GIB)
        assert sampler.likely_fits(space.configs[0], ()) is None


class TestCost:
    def test_an_ask_on_six_hundred_configurations_is_quick(self) -> None:
        landscape = grid(effective_batch=1 << 18)  # 19 divisors: 608 configurations
        space = Space(configs=tuple(p.config for p in landscape.points))
        assert len(space) >= 600
        runner = ReplayRunner(landscape)
        from autofit.trials.runner import TrialRequest

        records = []
        for number, config in enumerate(space.configs[:: len(space) // 12][:12]):
            result = runner.run(TrialRequest(config=config))
            records.append(
                TrialRecord(
                    number=number, config=config, outcome=Outcome.COMPLETED, measurement=result.measurement
                )
            )
        seconds = []
        for count in range(2, 12):
            sampler = CostModelSampler(space, memory_limit_bytes=24 * GIB)
            begin = time.process_time()
            sampler.advise(records[:count])
            seconds.append(time.process_time() - begin)
        assert math.fsum(seconds) / len(seconds) < 0.1  # 0.05 s on a quiet core; tests share theirs
