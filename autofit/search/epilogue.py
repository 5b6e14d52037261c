"""What is run on the winner when the search has ended: other settings of its data loader where that holds it back, and its evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofit.problem.config import TrialConfig
from autofit.problem.spec import SearchSpec
from autofit.problem.terms import Finding
from autofit.results import evaluation, loader
from autofit.results.advisories import failed_confirmations
from autofit.results.evaluation import Evaluation
from autofit.results.result import Warning
from autofit.search.budget import OutOfBudget
from autofit.search.scene import Scene
from autofit.search.search import Search
from autofit.study.study import TrialStudy
from autofit.trials.observer import Observer
from autofit.trials.trial import Outcome, Role

EVALUATION_STEPS = 2  #: optimizer steps before the evaluation: its state appears in the first, its peak in the second


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What the search's finding became.

    Attributes:
        finding: the winner may have settings of its loader now.
        evaluation: None when none was asked for, or time ran out before the first attempt ended.
        warnings: what was not done, and why.
    """

    finding: Finding
    evaluation: Evaluation | None = None
    warnings: tuple[Warning, ...] = ()


class _Encore:
    """Trials on the winner, under what is left of the search's time."""

    def __init__(self, *, search: Search, study: TrialStudy, scene: Scene, spec: SearchSpec, limit_bytes: int) -> None:
        self._search, self._study, self._scene = search, study, scene
        self._spec, self._limit = spec, limit_bytes
        self.evaluation: Evaluation | None = None
        self.left = "the loader's settings were not all tried"  #: what is not done if it ends now

    def loader(self, finding: Finding) -> Finding:
        """Walk over the loader's settings; a winner that changed is confirmed anew."""
        winner = finding.winner
        while True:
            step = loader.next_step(
                winner,
                self._study.records,
                cores=cores(),
                cuda=self._scene.device.kind == "cuda",
                tolerance=self._spec.tolerance,
            )
            if step.next is None:
                break
            name, value = next(s for s in loader.kept_settings(step.next) if s not in step.kept)
            why = f"the loader takes {step.share:.0%} of the winner's time: {name}={value}"
            self._search.afterwards(
                step.next, Role.LOADER, why, window_seconds=loader.window_seconds(winner, self._study.records)
            )
        return finding if step.best == winner else self._confirmed(finding, step.best)

    def _confirmed(self, finding: Finding, config: TrialConfig) -> Finding:
        """The finding with another winner, if that also runs at full length; else as it was."""
        known = [r for r in self._study.records if r.config == config and r.role is Role.CONFIRMATION]
        if any(r.outcome is Outcome.INFEASIBLE for r in known):
            return finding
        done = next((r for r in known if r.outcome is Outcome.COMPLETED), None)
        if done is None:
            self.left = "the loader's settings that were faster were not confirmed"
            why = "confirmation at full length, with the loader's settings"
            done = self._search.afterwards(config, Role.CONFIRMATION, why, full_length=True)
        if done.outcome is not Outcome.COMPLETED:
            return finding
        return replace(finding, winner=config, tied=(config,))

    def evaluate(self, winner: TrialConfig, asked: int, data: str) -> None:
        """Try the evaluation batch that was asked for, then smaller ones, until one fits."""
        self.left = ""
        while True:
            own = [r for r in self._study.records if r.role is Role.EVALUATION and _same(r.config, winner)]
            tried = [r for r in own if not r.interrupted and evaluation.batch_of(r) <= asked]
            attempts = [r for r in tried if r.why == _why(evaluation.batch_of(r), data)]
            if attempts:
                self.evaluation = evaluation.conclude(
                    attempts, asked=asked, limit_bytes=self._limit, on_cpu=self._scene.device.kind == "cpu"
                )
            batch = evaluation.next_batch(attempts, asked)
            if batch is None:
                return
            config = evaluation.at_batch(winner, batch)
            self._search.afterwards(
                config, Role.EVALUATION, _why(batch, data), evaluate=True, optimizer_steps=EVALUATION_STEPS
            )


def play(
    finding: Finding, *, search: Search, study: TrialStudy, scene: Scene, spec: SearchSpec, limit_bytes: int, observer: Observer
) -> Epilogue:
    """Run what comes after the search. Nothing that happens here loses the answer.

    Args:
        finding: of the search; one that was interrupted, or not confirmed, is left as it is.
        search, study, scene, spec, limit_bytes: of the search.
        observer: told when evaluation is left out.
    """
    if finding.interrupted or not finding.confirmed or scene.replayed:
        return Epilogue(finding=finding, warnings=_untried(finding, scene, spec, study))
    encore = _Encore(search=search, study=study, scene=scene, spec=spec, limit_bytes=limit_bytes)
    asked, data = asked_batch(spec, scene.facts)
    warnings: tuple[Warning, ...] = ()
    begin = len(study.records)
    try:
        finding = encore.loader(finding)
        if asked is not None:
            encore.evaluate(finding.winner, asked, data)
    except (OutOfBudget, KeyboardInterrupt) as error:
        cause, step = (str(error), "give it more --timeout") if isinstance(error, OutOfBudget) else ("interrupted", "let the search end")
        untried = ["evaluation was not tried"] if asked is not None and encore.evaluation is None else []
        left = " and ".join(filter(None, (encore.left, *untried))) or "the largest evaluation batch that fits was not looked for to the end"
        warnings = (Warning(code="cut_short", message=f"{cause}: {left}", next_step=step),)
        observer.note(warnings[0].message)
    spent = sum(r.seconds for r in study.records[begin:])
    return Epilogue(finding=replace(finding, seconds=finding.seconds + spent), evaluation=encore.evaluation, warnings=warnings)


def _untried(finding: Finding, scene: Scene, spec: SearchSpec, study: TrialStudy) -> tuple[Warning, ...]:
    """That an evaluation was asked for and not tried, as a warning."""
    if scene.replayed or asked_batch(spec, scene.facts)[0] is None:
        return ()
    why, step = "the search was interrupted" if finding.interrupted else "the winner was not confirmed", "let the search end, with more --timeout"
    failed = failed_confirmations(finding.winner, study.records)
    return (Warning(code="cut_short", message=f"evaluation was not tried: {why}", next_step=None if failed else step),)


def asked_batch(spec: SearchSpec, facts: Mapping[str, Any]) -> tuple[int | None, str]:
    """The evaluation batch that was asked for (None: no evaluation), and a label of the data; a script's own where it says nothing."""
    model = facts.get("model") or {}
    own = (model.get("script") or {}).get("evaluation") or {}
    asked = spec.eval_batch_size or own.get("batch_size")
    label = model.get("evaluation_data") or own.get("data") or "the training data"
    return asked, str(label)


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _same(config: TrialConfig, winner: TrialConfig) -> bool:
    return evaluation.at_batch(config, 1) == evaluation.at_batch(winner, 1)


def _why(batch: int, data: str) -> str:
    return f"evaluation at batch {batch} on {data}"
