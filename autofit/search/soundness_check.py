"""When a winner is checked for soundness, and what is kept of the answer. The check itself is one child; its failure is a word, never an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autofit.errors import UserError, WorkerError
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import Kind
from autofit.results.checking import (
    CheckOrder,
    batch_for,
    forms_for,
    split_warnings,
    summary,
    unsound_precision,
)
from autofit.results.result import Warning
from autofit.search.scene import Scene
from autofit.trials.trial import Failure, Role, TrialRecord

LONGEST_SECONDS, SHORTEST_SECONDS = 90.0, 3.0
BASELINES = (Role.DEFAULTS, Role.HAND_RECIPE)

Ask = Callable[[Mapping[str, Any], float], Mapping[str, Any]]


class SoundnessCheck:
    """Checks winners: the splits once in a search, each precision once.

    Args:
        ask: sends a check to a child: (payload, seconds) -> its answer.
        order: with all that is the same for every check; its forms are ignored.
        facts: what the child said of the model: one whose own weights are not fp32, or are quantised, has no fp32 to compare with.
        say: told before the child starts.

    Attributes:
        summary: figures of the last check, for the result; `skipped` says why there is none.
        warnings: for the result.
    """

    def __init__(
        self, ask: Ask, order: CheckOrder, *, facts: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._ask, self._order, self._say = ask, order, say
        self._full_weights = facts.get("weights_dtype") in (None, "float32") and not facts.get("quantization")
        self._script = facts.get("script") is not None
        self._compared: set[Precision] = {Precision.FP32}
        self._split_done = False
        self.summary: dict[str, Any] = {}
        self.warnings: list[Warning] = []

    def __call__(self, winner: TrialConfig, records: Sequence[TrialRecord], seconds: float | None) -> Failure | None:
        """Why the winner's precision is unsound; None when it is sound, or could not be checked.

        Args:
            winner: of the search.
            records: all trials, which show what fits.
            seconds: what is left of the search's time; None = no limit.
        """
        precision = winner.precision not in self._compared
        split = not self._split_done and _splits(winner, records)
        if not (precision or split):
            return None
        reason, batch = self._why_not(seconds), batch_for(winner, records)
        if reason is None and batch is None:
            reason = "no batch of 2 or more is known to fit in fp32"
        if reason is not None or batch is None:
            self.summary.setdefault("skipped", reason)
            return None
        self._compared.add(winner.precision)
        self._split_done = self._split_done or split
        return self._run(winner, batch, split=split, precision=precision, seconds=seconds)

    def _why_not(self, seconds: float | None) -> str | None:
        if not self._full_weights:
            return "the model's own weights are not float32, so that there is nothing exact to compare with"
        if self._script:
            return "a script builds its own Trainer: its splits and precisions are not compared"
        if seconds is not None and seconds < SHORTEST_SECONDS:
            return "the time budget was spent"
        return None

    def _run(
        self, winner: TrialConfig, batch: int, *, split: bool, precision: bool, seconds: float | None
    ) -> Failure | None:
        self._say("checking that splits and precision train alike")
        forms = forms_for(winner, batch, split=split, precision=precision)
        order = dataclasses.replace(self._order, forms=forms, batch=batch)
        allowed = LONGEST_SECONDS if seconds is None else min(LONGEST_SECONDS, seconds)
        try:
            answer = self._ask(order.to_json(), allowed)
        except (UserError, WorkerError) as error:
            self._note_failure(error)
            return None
        found = summary(winner, batch, answer)
        self.summary = {**self.summary, **found}
        self.warnings += split_warnings(found)
        return unsound_precision(winner, answer)

    def _note_failure(self, error: UserError | WorkerError) -> None:
        told = (error.hint or "").strip().splitlines()
        reason = f"{error.message}: {told[-1].strip()}" if isinstance(error, WorkerError) and told else error.message
        self.summary["skipped"] = reason
        self.warnings.append(
            Warning(
                code="unchecked",
                message=f"whether splits and precision train alike could not be checked: {reason}",
                next_step="compare loss curves before you rely on the answer",
            )
        )


def _splits(winner: TrialConfig, records: Sequence[TrialRecord]) -> bool:
    """Whether the winner's split is one that matters: it accumulates, or another than a baseline's."""
    others = {r.config.per_device_train_batch_size for r in records if r.role in BASELINES}
    return winner.gradient_accumulation_steps > 1 or bool(others - {winner.per_device_train_batch_size})


def check_of(
    scene: Scene, spec: SearchSpec, *, limit_bytes: int, say: Callable[[str], None]
) -> SoundnessCheck | None:
    """The check of a search in its scene; None where its runner cannot run one."""
    runner = scene.runner
    if not isinstance(runner, ProcessRunner):
        return None
    order = CheckOrder(
        workload=spec.workload.to_json(),
        device=runner.device,
        forms=(),
        batch=1,
        memory_limit_bytes=limit_bytes,
        context_bytes=runner.context_bytes,
        seed=spec.seed,
    )

    def ask(payload: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        return runner.ask(Kind.CHECK, payload, timeout=seconds)

    return SoundnessCheck(ask, order, facts=scene.facts.get("model") or {}, say=say)
