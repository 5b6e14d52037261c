"""Recording a landscape: every legal configuration, in one or more rounds, resumable point by point."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from autofit.beliefs.predict import MEMORY_REASONS, dominates
from autofit.devices.device import Device
from autofit.errors import FileFormatError, SearchFailed, UserError
from autofit.problem.config import TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.processes.process import ProcessRunner
from autofit.results.wording import format_speed
from autofit.search.scene import choose_device, data_identity, memory_limit, space_of
from autofit.trials.landscape import ENFORCED, Landscape, Point, recorded
from autofit.trials.measurement import Measurement
from autofit.trials.runner import Runner, TrialRequest
from autofit.trials.trial import Outcome
from autofit.units import format_bytes

FAILURES_BEFORE_STOP = 5  #: in a row, while nothing is recorded
FAILURES_LATER = 20  #: in a row, where there are points: more than a precision that fails with every optimizer takes
FAILURES_OF_A_KIND = 2  #: in a row, after which its other batch sizes are left out
GIVEN_UP = "its other batch sizes are left out until the next call"
WHERE_GIVEN = ("adaptation", "attention", "data")  #: in a landscape's own words only where they were asked for


def record_landscape(
    spec: SearchSpec,
    path: str | Path,
    *,
    timeout_seconds: float | None = None,
    window_seconds: float = 1.0,
    rounds: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Landscape:
    """Run every configuration that `spec` allows and write the landscape after each.

    A configuration that needs at least as much memory as one that did not fit is recorded as out of memory without a run. One that fails, or
    trains unsoundly, is left out (said), and tried again by the next call; so are the other batch sizes of a kind that fails again and again, so
    that an optimizer that does not work here costs its own points only. Further rounds run the grid again in another order, so that a
    machine's slow minutes do not fall on neighbours; the samples of all rounds are kept.

    Args:
        spec: workload, effective batch, device, limit and restrictions; its search budgets are not looked at.
        path: landscape file; an existing one is gone on with.
        timeout_seconds: stop after this time, with what there is.
        window_seconds: measured time per configuration and round.
        rounds: runs of each configuration, at least 1.
        say: told of each point.

    Raises:
        UserError: an input cannot be used.
        FileFormatError: the existing file is another landscape.
        SearchFailed: many configurations in a row failed for other reasons than memory.
    """
    if rounds < 1:
        raise UserError(f"rounds must be at least 1, got {rounds}")
    begin = time.monotonic()
    with ProcessRunner(spec.workload, choose_device(spec.device)) as runner:
        facts = runner.describe()
        device = Device.from_json(facts["device"])
        runner.context_bytes = device.context_bytes
        described, limit = _described(spec, facts), memory_limit(spec, device, None)
        points, earlier = _existing(path, described, device)
        recording = Recording(
            path=Path(path),
            device=replace(device, holders=()),
            described={**described, ENFORCED: min(limit, earlier or limit)},
            software=facts["software"],
            request_of=partial(
                TrialRequest,
                memory_limit_bytes=limit,
                timeout_seconds=spec.trial_timeout_seconds,
                window_seconds=window_seconds,
                seed=spec.seed,
            ),
            points=points,
        )
        space = space_of(spec, facts)
        for number, config in enumerate(in_order(space.configs, rounds, spec.seed)):
            this_round = number // len(space) + 1
            if not recording.wants(config, this_round):
                continue
            if timeout_seconds is not None and time.monotonic() - begin > timeout_seconds:
                say(f"stopped after the time given: {recording.progress(len(space), rounds)}")
                break
            where = f"{number % len(space) + 1}/{len(space)}" + (f" round {this_round}" if rounds > 1 else "")
            say(f"[{where}] {config.label()}: {recording.run(config, runner)}")
        else:
            if recording.points and len(recording.points) < len(space):
                say(f"{recording.progress(len(space), rounds)}; the same command tries the others again")
        return recording.landscape()


@dataclass(kw_only=True)
class Recording:
    """The points so far and the file that holds them.

    Attributes:
        path: the file.
        device, described, software: what the file says beside the points.
        request_of: makes the order for `config=...`.
        points: by the configuration's key.
        failures: trials in a row that failed for other reasons than memory.
        failed_kinds: such trials in a row of each kind (a configuration but for its batch size).
        unsound: why a configuration was left out, the last one's reason.
    """

    path: Path
    device: Device
    described: Mapping[str, Any]
    software: Mapping[str, str]
    request_of: Callable[..., TrialRequest]
    points: dict[str, Point] = field(default_factory=dict)
    failures: int = 0
    failed_kinds: dict[str, int] = field(default_factory=dict)
    unsound: str | None = None

    def wants(self, config: TrialConfig, this_round: int) -> bool:
        """Whether the configuration has to run (again) in this round, and has run before or is not of a kind that fails."""
        point = self.points.get(config.key())
        if point is None:
            return self.failed_kinds.get(_kind(config), 0) < FAILURES_OF_A_KIND
        return point.measurement is not None and point.runs < this_round

    def run(self, config: TrialConfig, runner: Runner) -> str:
        """Run or answer one configuration, write the file, and return what became of it.

        Raises:
            SearchFailed: the last of several failures in a row.
        """
        known = self.points.get(config.key())
        if any(p.measurement is None and dominates(config, p.config) for p in self.points.values()):
            return self._keep(Point(config=config), "out of memory (needs no less than one that did not fit)")
        result = runner.run(self.request_of(config=config))
        if result.measurement is not None:
            measured = replace(recorded(result.measurement), facts=None)
            point = known.joined(measured) if known is not None else Point(config=config, measurement=measured)
            return self._keep(point, _speed(config, measured))
        assert result.failure is not None
        reason = result.failure.reason.value.replace("_", " ")
        if result.outcome is Outcome.INFEASIBLE and result.failure.reason in MEMORY_REASONS:
            return self._keep(Point(config=config), reason)
        if result.outcome is Outcome.INFEASIBLE:
            self.failures, self.unsound = 0, reason
            return f"left out: {reason}"
        return self._failed(config, result.failure.message)

    def _failed(self, config: TrialConfig, message: str) -> str:
        kind = _kind(config)
        self.failures += 1
        self.failed_kinds[kind] = self.failed_kinds.get(kind, 0) + 1
        if self.failures >= (FAILURES_LATER if self.points else FAILURES_BEFORE_STOP):
            raise SearchFailed(f"{self.failures} configurations failed in a row: {message}")
        if self.failed_kinds[kind] >= FAILURES_OF_A_KIND:
            return f"{message} ({GIVEN_UP})"
        return message

    def landscape(self) -> Landscape:
        """All points so far.

        Raises:
            UserError: there are none, and the time was too short for any.
            SearchFailed: there are none, because those that ran failed.
        """
        if not self.points and self.unsound is not None:
            raise SearchFailed(f"no configuration trains soundly: {self.unsound}", hint="look at the loss of this training in fp32 first")
        if not self.points and not self.failures:
            raise UserError("the time given was too short to record a configuration", hint="raise --timeout")
        if not self.points:
            raise SearchFailed("no configuration could be recorded", hint="raise --timeout, or see the messages above")
        return Landscape(
            points=tuple(self.points.values()), device=self.device, spec=self.described, software=self.software
        )

    def progress(self, configurations: int, rounds: int) -> str:
        """How much of the grid is recorded."""
        text = f"{len(self.points)} of {configurations} configurations are recorded"
        if rounds > 1:
            done = sum(1 for p in self.points.values() if p.measurement is None or p.runs >= rounds)
            text += f", {done} of them in all {rounds} rounds"
        return text

    def _keep(self, point: Point, message: str) -> str:
        self.failures = 0
        self.failed_kinds.pop(_kind(point.config), None)
        self.points[point.config.key()] = point
        self.landscape().save(self.path)
        return message


def _kind(config: TrialConfig) -> str:
    return config.but(per_device_train_batch_size=1, gradient_accumulation_steps=1).key()


def _described(spec: SearchSpec, facts: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, as the file says it; a file with other values is another landscape."""
    adaptation, attention, data = spec.workload.adaptation, spec.workload.attn_implementation, data_identity(facts["model"])
    return {
        **({} if adaptation is None else {"adaptation": adaptation.to_json()}),
        **({} if attention is None else {"attention": attention}),
        **data,
        "model": spec.workload.model,
        "digest": facts["model"]["digest"],
        "task": facts["model"]["task"],
        "seq_len": facts["model"]["seq_len"],
        "effective_batch": spec.effective_batch,
        "memory_limit_bytes": spec.memory_limit_bytes,
    }


def _speed(config: TrialConfig, measurement: Measurement) -> str:
    speed = measurement.samples_per_second(
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    needed = measurement.memory.needed_bytes
    return f"{format_speed(speed)} samples/s" + (f", {format_bytes(needed)}" if needed is not None else "")


def in_order(configs: tuple[TrialConfig, ...], rounds: int, seed: int) -> Iterator[TrialConfig]:
    """The first round with small batches first, so that what follows an out-of-memory is known without a run; the others shuffled."""
    yield from sorted(configs, key=lambda c: (c.precision, c.optim, not c.gradient_checkpointing, c.per_device_train_batch_size))
    for number in range(1, rounds):
        yield from random.Random(f"{seed} {number}").sample(configs, len(configs))


def _existing(path: str | Path, described: dict[str, object], device: Device) -> tuple[dict[str, Point], int | None]:
    """The points of an earlier recording, and the limit that they were made under (None: there is none, or it does not say)."""
    if not Path(path).exists():
        return {}, None
    found = Landscape.load(path)
    different = [name for name in (*described, *WHERE_GIVEN) if found.spec.get(name) != described.get(name)]
    if different or found.device.name != device.name:
        what = {"digest": "model"}.get(different[0], different[0].replace("_", " ")) if different else "device"
        raise FileFormatError(f"{str(path)!r} is the landscape of another {what}", hint="give another --output")
    return {p.config.key(): p for p in found.points}, found.spec.get(ENFORCED)
