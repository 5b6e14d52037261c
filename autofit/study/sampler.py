"""Samplers in Optuna's own terms: the cost model (`auto`), and Optuna's TPE, random and grid on the same space.

`CostModelSampler` keeps no state that the study does not hold: it reads the records of the told trials, asks `advice`, and stores its
one sentence as the trial's user attribute `why`. Same study and seed, same proposal, also after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from autofit.beliefs.predict import MemoryBelief, MemoryModel
from autofit.beliefs.speed import SpeedModel, TimePrior
from autofit.errors import UserError
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.study.advice import Advice, Advisor, Certificate
from autofit.trials.trial import Outcome, Role, TrialRecord, given_up

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

NAMES = ("auto", "tpe", "random", "grid")
WHY, RECORD = "why", "record"
BATCH = "per_device_train_batch_size"
LIKELY = 0.8  #: a configuration is expected to fit from this probability on
TPE_STARTUP_TRIALS = 5


class CostModelSampler(BaseSampler):
    """Proposes the configuration with the highest expected improvement among those likely to fit.

    Args:
        space: what may be proposed.
        seed: of the posterior draws.
        tolerance: relative speed difference that does not matter.
        memory_limit_bytes: bytes of the device that a run may use; None = no limit.
        memory: predicts memory before the trials; None = learned from them.
        time: roofline; None = learned from the trials.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        tolerance: float = 0.01,
        memory_limit_bytes: int | None = None,
        memory: MemoryModel | None = None,
        time: TimePrior | None = None,
    ) -> None:
        self._space = space
        self._belief = MemoryBelief(space.configs, limit_bytes=memory_limit_bytes, model=memory)
        self._advisor = Advisor(
            space.configs,
            speed=SpeedModel(space.configs, time),
            memory=self._belief,
            tolerance=tolerance,
            seed=seed,
        )
        self._independent = RandomSampler(seed=seed)
        self._parsed: dict[int, TrialRecord] = {}
        self._forgotten: frozenset[int] = frozenset()
        self._last: tuple[tuple[int, ...], Advice] | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space, always the same."""
        return _distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal, and why (user attribute `why`). With nothing left to try, the best known again."""
        advice = self.advise(self._told(study))
        config = advice.config or advice.best or self._space.configs[0]
        study._storage.set_trial_user_attr(trial._trial_id, WHY, advice.why)
        return dict(self._space.params_of(config))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A random value for a parameter that is not of the space."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def advise(self, records: Sequence[TrialRecord]) -> Advice:
        """What to try next and whether to stop; computed once per set of records."""
        key = tuple(record.number for record in records)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._advisor.advise(records))
        return self._last[1]

    def certificate(self, records: Sequence[TrialRecord]) -> Certificate | None:
        """The proof that the search may stop; None while something may still win.

        It rests on the search's own trials: play-off and confirmation come after it, and rank, but do not reopen the search,
        unless one shows that a leader does not fit, or that it fails again and again.
        """
        later, left = (Role.PLAYOFF, Role.CONFIRMATION), given_up(records)
        searched = [r for r in records if r.role not in later or r.outcome is Outcome.INFEASIBLE or (r.config in left and r.outcome is Outcome.FAILED)]
        return self.advise(searched).certificate

    def likely_fits(self, config: TrialConfig, records: Sequence[TrialRecord]) -> bool | None:
        """Whether `config` is expected to fit, given all trials so far; None while nothing is known, or too little."""
        likely = self._advisor.likely_fits(config, records, LIKELY)
        unsure = likely is False and self._advisor.likely_fits(config, records, 1.0 - LIKELY)
        return None if unsure else likely

    def forget(self, numbers: Iterable[int]) -> None:
        """Leave out trials of an earlier search that say nothing about this one."""
        self._forgotten = frozenset(numbers)

    def _told(self, study: Study) -> list[TrialRecord]:
        """Records of the told trials that count, each parsed once."""
        for trial in study.get_trials(deepcopy=False):
            if trial.number not in self._parsed and trial.state.is_finished() and RECORD in trial.user_attrs:
                self._parsed[trial.number] = TrialRecord.from_json(trial.user_attrs[RECORD])
        told = [self._parsed[number] for number in sorted(self._parsed) if number not in self._forgotten]
        return [record for record in told if not record.after_search]


class GridOrderSampler(BaseSampler):
    """Every configuration once, in the order of the space; then the first again."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space, always the same."""
        return _distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The first configuration that no trial has; one that failed may be wanted once more."""
        trials = study.get_trials(deepcopy=False)
        taken = [
            self._space.config_of(t.params) for t in trials if t.params and t.state is not TrialState.FAIL
        ]
        seen = {config.key() for config in taken if config is not None}
        config = next((c for c in self._space.configs if c.key() not in seen), self._space.configs[0])
        return dict(self._space.params_of(config))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The first choice: every parameter of the space is sampled relatively."""
        assert isinstance(param_distribution, CategoricalDistribution)
        return param_distribution.choices[0]


def make_sampler(
    name: str,
    *,
    space: Space,
    seed: int = 0,
    tolerance: float = 0.01,
    memory_limit_bytes: int | None = None,
    memory: MemoryModel | None = None,
    time: TimePrior | None = None,
) -> BaseSampler:
    """Return the sampler called `name` (`auto`, `tpe`, `random`, `grid`) for `space`.

    TPE is multivariate and starts from its model after a few random trials; it sees batch sizes as unordered choices, because Optuna 5 has no distance
    for categories and divisors are no range.

    Raises:
        UserError: unknown name.
    """
    if name == "auto":
        return CostModelSampler(
            space,
            seed=seed,
            tolerance=tolerance,
            memory_limit_bytes=memory_limit_bytes,
            memory=memory,
            time=time,
        )
    if name == "tpe":
        return TPESampler(n_startup_trials=TPE_STARTUP_TRIALS, multivariate=True, seed=seed)
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "grid":
        return GridOrderSampler(space)
    raise UserError(f"unknown sampler {name!r}", hint=f"choose from {', '.join(NAMES)}")


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {name: CategoricalDistribution(choices=values) for name, values in space.choices().items()}
