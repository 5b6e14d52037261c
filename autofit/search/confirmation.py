"""A long run of an answer at full length: does it survive, and is it as fast as the search said?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autofit.errors import UserError
from autofit.problem.script_command import HIDDEN
from autofit.processes.process import ProcessRunner
from autofit.results.result import TuneResult
from autofit.trials.runner import TrialRequest, TrialResult
from autofit.units import format_seconds

MAX_SECONDS = 7 * 86400.0


def confirm(
    result: TuneResult, *, steps: int, timeout_seconds: float | None = None, say: Callable[[str], None] = lambda text: None
) -> TrialResult:
    """Run the winner for `steps` optimizer steps under the search's memory limit.

    Args:
        result: from a search on a real device by model name (live objects do not travel in a file).
        steps: optimizer steps, at least 2.
        timeout_seconds: None = a week.
        say: told what differs from the conditions of the search, and how long the run may take.

    Raises:
        UserError: the result came from live objects or a replay, or the device is not there.
    """
    if any(warning.code == "replayed" for warning in result.warnings):
        raise UserError("the result comes from a replayed landscape: there is nothing to run", hint="search on a device first")
    if result.model.get("source") == "object":
        raise UserError(
            "the result is about live Python objects, which a file cannot hold", hint="call autofit.tune again, or train with it"
        )
    if HIDDEN in " ".join(result.spec.workload.script or ()):
        raise UserError(
            "the script's command line holds a secret, which the result file does not keep", hint="hand it over through the environment, and search again"
        )
    with ProcessRunner(result.spec.workload, result.device.torch_name) as runner:
        facts = runner.describe()
        runner.context_bytes = facts["device"]["context_bytes"]
        if facts["device"]["name"] != result.device.name:
            say(f"note: searched on {result.device.name}, confirming on {facts['device']['name']}")
        for name in ("torch", "transformers"):
            if facts["software"].get(name) != result.software.get(name):
                say(f"note: searched with {name} {result.software.get(name)}, confirming with {facts['software'].get(name)}")
        for what in _changed(result.model, facts["model"]):
            say(f"note: the {what} is not that of the search")
        best = result.best
        seconds = steps * best.config.effective_batch() / best.samples_per_second
        say(f"running {steps} optimizer steps of {best.config.label()}: about {format_seconds(seconds)} at the speed of the search")
        return runner.run(
            TrialRequest(
                config=best.config,
                memory_limit_bytes=result.memory_limit_bytes,
                timeout_seconds=timeout_seconds or MAX_SECONDS,
                full_length=True,
                optimizer_steps=steps,
                seed=result.spec.seed,
            )
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which of model and data are others than a search found, as far as both descriptions tell."""
    digests = {
        "model": (before.get("digest"), now.get("digest")),
        "data": tuple((facts.get("data") or {}).get("digest") for facts in (before, now)),
    }
    return [what for what, (one, other) in digests.items() if None not in (one, other) and one != other]
