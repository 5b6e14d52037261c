"""Whether the winner's evaluation fits too: what to try next, and what to advise, decided from records alone. Pure.

An evaluation trial trains two optimizer steps, so that gradients and optimizer state have been there, and evaluates a few batches of the longest
rows. What `evaluation_loop` gathers grows with the whole evaluation set, which no short trial sees, so that is computed (`pile_up`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.beliefs.predict import is_memory_failure
from autofit.problem.config import TrialConfig
from autofit.trials.trial import EVAL_BATCH, Outcome, Role, TrialRecord
from autofit.units import format_bytes

ACCUMULATION = "eval_accumulation_steps"
DEFAULT_EVAL_BATCH = 8  #: of TrainingArguments
ROOM = 0.8  #: of what is left of the limit, that gathered results may take: the last concatenation is not the only thing that varies


@dataclass(frozen=True, slots=True, kw_only=True)
class Pile:
    """What the results of a whole evaluation set take on the device.

    Attributes:
        bytes_per_row: kept per row, at the longest row's width: shorter ones are padded to it.
        rows: of the evaluation set.
        peak_bytes: most bytes at a time.
        left_bytes: of the limit, beside training state and one evaluation step.
        steps: the `eval_accumulation_steps` to use; None where none is needed, or none helps.
        fits: whether the results fit, with `steps` where it is given.
    """

    bytes_per_row: float
    rows: int
    peak_bytes: int
    left_bytes: int
    steps: int | None
    fits: bool


def pile_up(
    *,
    bytes_per_row: float,
    rows: int,
    batch: int,
    left_bytes: int,
    concatenates: bool = True,
    accumulation_steps: int | None = None,
    moves_away: bool = True,
) -> Pile:
    """Return what piles up on the device while a whole set is evaluated.

    Trainer keeps what each batch gathers (logits, labels, losses) on the device until `eval_accumulation_steps` batches are together, or to the end. With
    `eval_do_concat_batches` (the default) every batch is appended by building the whole tensor anew, so old and new are there at once: twice the bytes.

    Args:
        bytes_per_row: gathered per row.
        rows: of the whole set.
        batch: rows per evaluation step.
        left_bytes: of the memory limit, for this.
        concatenates: whether batches are concatenated as they come.
        accumulation_steps: as the user has it; None = never moved before the end.
        moves_away: whether moving results to host memory frees the device's (not where the device is the CPU).
    """
    kept_rows = rows if accumulation_steps is None or not moves_away else min(rows, accumulation_steps * batch)
    factor = 2 if concatenates else 1
    peak = int(bytes_per_row * kept_rows * factor)
    if peak <= left_bytes * ROOM:
        return Pile(bytes_per_row=bytes_per_row, rows=rows, peak_bytes=peak, left_bytes=left_bytes, steps=None, fits=True)
    per_step = bytes_per_row * batch * factor
    steps = int(max(0, left_bytes) * ROOM / per_step) if moves_away and per_step > 0 else 0
    return Pile(
        bytes_per_row=bytes_per_row,
        rows=rows,
        peak_bytes=peak,
        left_bytes=left_bytes,
        steps=steps if steps >= 1 else None,
        fits=steps >= 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What became of the evaluation.

    Attributes:
        asked: rows per evaluation step that were asked for.
        fits: the largest that was seen to fit; None when none was.
        peak_bytes: needed for training and evaluation together at `fits`; None when unknown.
        pile: what the whole set's results take; None when unknown, or when it is a stream.
        advice: one sentence, None when there is nothing to do.
        failure: why there is no answer (not memory), one line; None when there is one.
        metric_error: what `compute_metrics` raised on the few rows tried; None when nothing.
        loss_only: whether nothing but the loss is kept.
        attempts: the trials.
    """

    asked: int
    fits: int | None = None
    peak_bytes: int | None = None
    pile: Pile | None = None
    advice: str | None = None
    failure: str | None = None
    metric_error: str | None = None
    loss_only: bool = False
    attempts: tuple[TrialRecord, ...] = ()

    @property
    def must_change(self) -> dict[str, int]:
        """Keywords of TrainingArguments without which evaluation is expected to run out of memory."""
        changed = {}
        if self.fits is not None and self.fits != self.asked:
            changed[EVAL_BATCH] = self.fits
        if self.pile is not None and self.pile.steps is not None:
            changed[ACCUMULATION] = self.pile.steps
        return changed

    @property
    def arguments(self) -> dict[str, int]:
        """Keywords of TrainingArguments for evaluating as it was tried."""
        return {} if self.fits is None else {EVAL_BATCH: self.fits, **self.must_change}

    def to_json(self) -> dict[str, Any]:
        """JSON for the result file."""
        pile = None if self.pile is None else {name: getattr(self.pile, name) for name in Pile.__slots__}
        plain = ("asked", "fits", "peak_bytes", "advice", "failure", "metric_error", "loss_only")
        found = {name: getattr(self, name) for name in plain}
        return {**found, "pile": pile, "arguments": self.arguments, "attempts": [r.to_json() for r in self.attempts]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_json`; unknown keys are ignored."""
        plain = ("asked", "fits", "peak_bytes", "advice", "failure", "metric_error", "loss_only")
        pile = data.get("pile")
        return cls(
            **{name: data[name] for name in plain if name in data},
            pile=None if pile is None else Pile(**{name: pile[name] for name in Pile.__slots__}),
            attempts=tuple(TrialRecord.from_json(r) for r in data.get("attempts", ())),
        )


def eval_batch_of(args: Any, eval_dataset: Any) -> int | None:
    """The evaluation batch that the user's arguments mean; None without an evaluation dataset."""
    if eval_dataset is None:
        return None
    return int(getattr(args, EVAL_BATCH, DEFAULT_EVAL_BATCH))


def at_batch(config: TrialConfig, batch: int) -> TrialConfig:
    """The configuration with an evaluation batch."""
    return config.but(extra=(*((k, v) for k, v in config.extra if k != EVAL_BATCH), (EVAL_BATCH, batch)))


def batch_of(record: TrialRecord) -> int:
    """The evaluation batch of an evaluation trial."""
    return int(dict(record.config.extra)[EVAL_BATCH] or 0)


def next_batch(attempts: Sequence[TrialRecord], asked: int) -> int | None:
    """The evaluation batch to try next; None when it is known what fits, or cannot be.

    Halved until it fits; then once more between what fits and what does not, which leaves at most a third unused. Attempts above what is asked
    for (of an earlier call) do not count.
    """
    attempts = [r for r in attempts if batch_of(r) <= asked]
    if any(r.outcome is not Outcome.COMPLETED and not is_memory_failure(r) for r in attempts):
        return None
    fitting = [batch_of(r) for r in attempts if r.outcome is Outcome.COMPLETED]
    failing = [batch_of(r) for r in attempts if r.outcome is not Outcome.COMPLETED]
    if not failing:
        return None if asked in fitting else asked
    if not fitting:
        smallest = min(failing)
        return smallest // 2 if smallest > 1 else None
    low, high = max(fitting), min(failing)
    middle = (low + high) // 2
    return middle if high > 1.5 * low and low < middle < high else None


def conclude(attempts: Sequence[TrialRecord], *, asked: int, limit_bytes: int, on_cpu: bool) -> Evaluation:
    """Return what the attempts say together.

    Args:
        attempts: evaluation trials of one configuration, in order; at least one.
        asked: the evaluation batch that was asked for.
        limit_bytes: enforced in each.
        on_cpu: whether host memory is the device's.
    """
    own = [r for r in attempts if r.role is Role.EVALUATION and batch_of(r) <= asked]
    completed = [r for r in own if r.outcome is Outcome.COMPLETED]
    broken = next((r for r in own if r.outcome is not Outcome.COMPLETED and not is_memory_failure(r)), None)
    failure = None if broken is None or broken.failure is None else broken.failure.message
    if not completed:
        advice = None if failure else _none_fits(min(batch_of(r) for r in own))
        return Evaluation(asked=asked, failure=failure, advice=advice, attempts=tuple(own))
    best = max(completed, key=batch_of)
    facts = evaluation_facts(best)
    measurement = best.measurement
    peak = None if measurement is None else measurement.memory.needed_bytes
    pile = _pile(facts, batch_of(best), None if peak is None else limit_bytes - peak, on_cpu=on_cpu)
    found = Evaluation(
        asked=asked,
        fits=batch_of(best),
        peak_bytes=peak,
        pile=pile,
        failure=failure,
        metric_error=facts.get("metric_error"),
        loss_only=bool(facts.get("loss_only")),
        attempts=tuple(own),
    )
    return Evaluation(**{**{n: getattr(found, n) for n in Evaluation.__slots__}, "advice": _advice(found, on_cpu=on_cpu)})


def evaluation_facts(record: TrialRecord) -> Mapping[str, Any]:
    """What the child said of its evaluation."""
    facts = (record.measurement.facts or {}) if record.measurement is not None else {}
    return facts.get("evaluation") or {}


def _pile(facts: Mapping[str, Any], batch: int, left: int | None, *, on_cpu: bool) -> Pile | None:
    rows, size = facts.get("rows"), facts.get("gathered_bytes_per_row")
    if not rows or size is None or left is None:
        return None
    concatenates = bool(facts.get("concatenates", True))
    tried = min(rows, batch * int(facts.get("batches") or 0)) * (2 if concatenates else 1)
    return pile_up(
        bytes_per_row=size,
        rows=rows,
        batch=batch,
        left_bytes=left + int(size * tried),  # what the trial itself had gathered is in its peak
        concatenates=concatenates,
        accumulation_steps=facts.get("accumulation_steps"),
        moves_away=not on_cpu,
    )


def _none_fits(smallest: int) -> str:
    if smallest > 1:
        return f"evaluation at batch {smallest} does not fit beside the training state, and smaller batches were not tried: use less than {smallest}"
    return "not even one row per evaluation step fits beside the training state: evaluate in a process of its own"


def _advice(found: Evaluation, *, on_cpu: bool) -> str | None:
    said = []
    if found.fits is not None and found.fits < found.asked:
        said.append(f"evaluation at batch {found.asked} does not fit beside the training state: use {EVAL_BATCH}={found.fits}")
    pile = found.pile
    if pile is not None and (pile.steps is not None or not pile.fits):
        what = f"the results of {pile.rows:,} rows take up to {format_bytes(pile.peak_bytes)} and {format_bytes(max(0, pile.left_bytes))} are left"
        cure = f"use {ACCUMULATION}={pile.steps}" if pile.steps is not None else _smaller(on_cpu)
        said.append(f"{what}: {cure}")
    return "; ".join(said) or None


def _smaller(on_cpu: bool) -> str:
    why = "host memory is all there is, so moving them does not help; " if on_cpu else ""
    return f"{why}reduce them with preprocess_logits_for_metrics, batch_eval_metrics or prediction_loss_only"
