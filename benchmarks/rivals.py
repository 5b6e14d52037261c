"""Rivals: how others look for a configuration, each as its published method, on the same landscapes.

A rival is a generator: it yields configurations, is sent samples/s (None: out of memory), and ends when its method ends; what it returns is the best it
has measured, except where the method says otherwise. Published methods that drift from the effective batch are made exact (divisors only).

- Optuna TPE, random, GP: ask and tell; out of memory told as a violated constraint; repeats are answered for free (a favour: the
  published samplers would run them again); grid order: the space from front to back.
- Ludwig (`ludwig/utils/batch_size_tuner.py`): the batch doubles until out of memory or until throughput falls; best throughput kept.
- Lightning (`BatchSizeFinder`, mode `binsearch`): doubles until out of memory, then bisects; the largest that fits is the answer.
- Trainer (`auto_find_batch_size`): starts at the whole batch, times 0.9 after each out of memory, rounded down to a divisor; the first that fits is the answer.
- DeepSpeed (`autotuner.py`): finds the largest batch by doubling and bisection, then three strided sizes below it; stops at a
  plateau (gain under 5 %).
- hand recipe: half precision, default optimizer, largest power of two that fits.

The last five search the batch only, at half precision without checkpointing and with the default optimizer, as a careful user of them would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.search.baselines import half_precision
from autofit.study.sampler import GridOrderSampler

Speed = float | None
Rival = Generator[TrialConfig, Speed, None]
REPEATS = 30
DEFAULT_OPTIM = "adamw_torch_fused"
PLATEAU = 0.05


def optuna_rival(make: Callable[[Space, int], BaseSampler]) -> Callable[[Space, int], Rival]:
    """A rival around an Optuna sampler; ends when it proposes nothing new `REPEATS` times in a row."""

    def rival(space: Space, seed: int) -> Rival:
        distributions: dict[str, optuna.distributions.BaseDistribution] = {
            n: optuna.distributions.CategoricalDistribution(choices=v) for n, v in space.choices().items()
        }
        study = optuna.create_study(direction="maximize", sampler=make(space, seed))
        known: dict[str, Speed] = {}
        repeats = 0
        while repeats < REPEATS:
            trial = study.ask(distributions)
            config = space.config_of(trial.params)
            key = config.key() if config is not None else None
            if config is not None and key is not None and key not in known:
                known[key] = yield config
                repeats = 0
            else:
                repeats += 1
            speed = known.get(key) if key is not None else None
            trial.set_constraint("memory", 1.0 if speed is None else -1.0)
            study.tell(trial, speed or 0.0)

    return rival


def _ladder(space: Space) -> dict[int, TrialConfig]:
    """Batch size -> configuration of the careful hand, ascending."""
    half = half_precision(tuple({c.precision for c in space.configs}))
    optims = [c.optim for c in space.configs]
    optim = DEFAULT_OPTIM if DEFAULT_OPTIM in optims else optims[0]
    found: dict[int, TrialConfig] = {}
    for config in space.configs:
        if config.precision is half and not config.gradient_checkpointing and config.optim == optim:
            found.setdefault(config.per_device_train_batch_size, config)
    return dict(sorted(found.items()))


def hand_recipe(space: Space, seed: int) -> Rival:
    """The largest power of two, halved until it fits."""
    ladder = _ladder(space)
    for size in reversed([s for s in ladder if s & (s - 1) == 0]):
        if (yield ladder[size]) is not None:
            return


def ludwig(space: Space, seed: int) -> Rival:
    """Doubling while throughput grows."""
    ladder, last = _ladder(space), 0.0
    for size in [s for s in ladder if s & (s - 1) == 0]:
        speed = yield ladder[size]
        if speed is None or speed < last:
            return
        last = speed


def _largest(ladder: dict[int, TrialConfig], seen: dict[int, Speed]) -> Generator[TrialConfig, Speed, int]:
    """Doubling, then bisection over the divisors; fills `seen` and returns the largest size that fits, 0 for none."""
    sizes = list(ladder)
    good, bad = -1, len(sizes)
    wanted = 1
    while wanted <= sizes[-1] and good + 1 < bad:
        place = max(i for i, s in enumerate(sizes) if s <= wanted)
        if place > good:
            seen[sizes[place]] = yield ladder[sizes[place]]
            if seen[sizes[place]] is None:
                bad = place
                break
            good = place
        wanted *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        seen[sizes[middle]] = yield ladder[sizes[middle]]
        if seen[sizes[middle]] is None:
            bad = middle
        else:
            good = middle
    return sizes[good] if good >= 0 else 0


def lightning(space: Space, seed: int) -> Rival:
    """Power-of-two bisection on the batch alone."""
    yield from _largest(_ladder(space), {})


def trainer(space: Space, seed: int) -> Rival:
    """`auto_find_batch_size`: times 0.9 after each out of memory."""
    ladder = _ladder(space)
    wanted = max(ladder, default=0)
    tried: set[int] = set()
    while wanted >= 1:
        size = max((s for s in ladder if s <= wanted), default=0)
        if size == 0:
            return
        if size not in tried:
            tried.add(size)
            if (yield ladder[size]) is not None:
                return
        wanted = int(wanted * 0.9)


def deepspeed(space: Space, seed: int) -> Rival:
    """Largest batch, then strided sizes below it until a plateau."""
    ladder, seen = _ladder(space), dict[int, Speed]()
    largest = yield from _largest(ladder, seen)
    last = 0.0
    for part in (1, 2, 3):
        size = max((s for s in ladder if s <= max(1, largest * part // 3)), default=0)
        if size == 0:
            return
        if size not in seen:
            seen[size] = yield ladder[size]
        speed = seen[size]
        if speed is None or speed < last * (1 + PLATEAU):
            return
        last = speed


def _gp(space: Space, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.GPSampler(seed=seed)


RIVALS: dict[str, Callable[[Space, int], Rival]] = {
    "Optuna TPE": optuna_rival(lambda space, seed: TPESampler(seed=seed)),
    "Optuna random": optuna_rival(lambda space, seed: RandomSampler(seed=seed)),
    "Optuna GP": optuna_rival(_gp),
    "grid order": optuna_rival(lambda space, seed: GridOrderSampler(space)),
    "Ludwig doubling": ludwig,
    "Lightning bisection": lightning,
    "Trainer x0.9": trainer,
    "DeepSpeed stride": deepspeed,
    "hand recipe": hand_recipe,
}
SLOW = ("Optuna GP",)  #: run with fewer seeds


__all__ = ["RIVALS", "SLOW", "Rival", "Speed"]
