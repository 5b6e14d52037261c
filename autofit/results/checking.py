"""The soundness check: what it runs, and what its answer means. Pure; `workload.check` runs it in one child per search.

Forms of one training, all on the same weights and samples, without dropout, and without clipping:

    whole    an effective batch as one micro-batch, in fp32
    again    the same with another random state: what chance alone changes
    parts    the same samples in micro-batches of a quarter (of a half, for a batch of 2), accumulated
    asked    the first steps of `whole` in the winner's precision, with its attention

`whole` and `parts` must agree, or the answer of a search that trades batch against accumulation changes what is trained: in fp32 they differ by about
1e-6 where the loss is normalised over the effective batch, so `SPLIT_TOLERANCE` = 1e-3 is a thousand times rounding and far below what matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.numerics import ADAMW, rule_of
from autofit.results.result import Warning
from autofit.trials.soundness import departure, relative_departure
from autofit.trials.trial import Failure, Outcome, TrialRecord

SPLIT_TOLERANCE = 1e-3
SUM_TOLERANCE = 1e-2  #: of a ratio of gradients that is one over the number of micro-batches
LARGEST_BATCH = 8
STEPS = 3
KEPT_EXTRAS = ("attn_implementation",)  #: of the winner: what changes rounding, and costs no compilation


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way of training: its configuration, optimizer steps, and what is added to the seed of the random state."""

    name: str
    config: TrialConfig
    steps: int = 1
    random_state: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FormResult:
    """What one form showed, by optimizer step; `items` are label items by micro-batch (empty where labels are no tensor)."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    skipped: tuple[bool, ...] = ()
    items: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON; what is not finite is null."""
        data = {name: list(values) for name, values in asdict(self).items()}
        for name in ("losses", "gradient_norms"):
            data[name] = [x if math.isfinite(x) else None for x in data[name]]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FormResult:
        """Inverse of `to_json`."""
        read = {name: tuple(data.get(name, ())) for name in ("skipped", "items")}
        for name in ("losses", "gradient_norms"):
            read[name] = tuple(math.nan if x is None else float(x) for x in data[name])
        return cls(**read)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """What the child is asked for; `batch` samples make the effective batch of every form, the first of which gives the weights."""

    workload: Mapping[str, Any]
    device: str
    forms: tuple[Form, ...]
    batch: int
    memory_limit_bytes: int | None = None
    context_bytes: int = 0
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON for the pipe."""
        forms = [{**asdict(form), "config": form.config.to_json()} for form in self.forms]
        return {**{name: getattr(self, name) for name in self.__slots__}, "workload": dict(self.workload), "forms": forms}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckOrder:
        """Inverse of `to_json`."""
        forms = tuple(Form(**{**form, "config": TrialConfig.from_json(form["config"])}) for form in data["forms"])
        return cls(**{**data, "forms": forms})


def batch_for(winner: TrialConfig, records: Sequence[TrialRecord]) -> int | None:
    """The effective batch of the check: the largest of 8, 4 and 2 that trials show to fit in fp32; None when none is.

    A trial shows it when it kept no less: as much checkpointing or less, and as much optimizer state (AdamW has the most); in 16 bit activations are
    half as large.
    """
    known = 0
    for record in records:
        config = record.config
        if record.outcome is not Outcome.COMPLETED or (config.gradient_checkpointing and not winner.gradient_checkpointing):
            continue
        if config.optim != winner.optim and rule_of(config.optim) != ADAMW:
            continue
        full = config.precision in (Precision.FP32, Precision.TF32)
        known = max(known, config.per_device_train_batch_size // (1 if full else 2))
    return next((size for size in (8, 4, 2) if size <= min(known, winner.effective_batch(), LARGEST_BATCH)), None)


def forms_for(winner: TrialConfig, batch: int, *, split: bool, precision: bool) -> tuple[Form, ...]:
    """The forms to run.

    Args:
        winner: whose knobs are kept, but for batch, precision, and extras that change no rounding.
        batch: effective batch of each form.
        split: whether splits are compared.
        precision: whether the winner's precision is compared with fp32.
    """
    whole = winner.but(
        per_device_train_batch_size=batch, gradient_accumulation_steps=1, precision=Precision.FP32, extra=()
    )
    forms = [Form(name="whole", config=whole, steps=STEPS if precision else 1)]
    if split:
        parts = whole.but(per_device_train_batch_size=batch // _micro_batches(batch), gradient_accumulation_steps=_micro_batches(batch))
        forms += [Form(name="again", config=whole, random_state=1), Form(name="parts", config=parts)]
    if precision:
        extra = tuple(pair for pair in winner.extra if pair[0] in KEPT_EXTRAS)
        forms.append(Form(name="asked", config=whole.but(precision=winner.precision, extra=extra), steps=STEPS))
    return tuple(forms)


def unsound_precision(winner: TrialConfig, answer: Mapping[str, Any]) -> Failure | None:
    """Why the winner's precision is unsound; None when it is not, or was not compared."""
    asked, whole = _form(answer, "asked"), _form(answer, "whole")
    if asked is None or whole is None:
        return None
    return departure(asked.losses, whole.losses, winner.precision, skipped=asked.skipped)


def summary(winner: TrialConfig, batch: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are kept in the result: relative differences, and who computes the loss."""
    whole, again, parts, asked = (_form(answer, name) for name in ("whole", "again", "parts", "asked"))
    found: dict[str, Any] = {"batch": batch, **dict(answer.get("facts") or {})}
    if whole is not None and again is not None and parts is not None:
        found |= {
            "micro_batches": _micro_batches(batch),
            "split_loss_difference": _relative(parts.losses, whole.losses),
            "split_gradient_difference": _relative(parts.gradient_norms, whole.gradient_norms),
            "chance_loss_difference": _relative(again.losses, whole.losses),
            "chance_gradient_difference": _relative(again.gradient_norms, whole.gradient_norms),
            "gradient_ratio": _ratio(parts.gradient_norms, whole.gradient_norms),
            "uneven": len(set(parts.items)) > 1,
            "other_labels": bool(whole.items and parts.items) and whole.items[0] != sum(parts.items),
        }
    if whole is not None and asked is not None:
        found |= {
            "precision": str(winner.precision),
            "precision_loss_difference": _finite(relative_departure(asked.losses, whole.losses)),
            "precision_gradient_difference": _relative(asked.gradient_norms[:1], whole.gradient_norms[:1]),
        }
    return found


def split_warnings(found: Mapping[str, Any]) -> list[Warning]:
    """A model, loss or Trainer with which batch and accumulation are not interchangeable, by name."""
    if "split_loss_difference" not in found:
        return []
    loss, gradient = found["split_loss_difference"], found["split_gradient_difference"]
    chance = max(_large(found["chance_loss_difference"]), _large(found["chance_gradient_difference"]))
    worst = max(_large(loss), _large(gradient))
    grows = _large(loss) > 0.5  # with the accumulation: other labels would not do that
    if found.get("other_labels") and worst > SPLIT_TOLERANCE and not (grows or found.get("batch_norms")):
        message = (
            "the collator makes other labels of the same samples when they come in other batches, as masks do that are drawn at random: "
            "whether batch and accumulation are interchangeable cannot be told"
        )
        return [Warning(code="split", message=message, next_step="compare loss curves of two splits before you rely on the answer")]
    figures = f"loss by {_percent(loss)}, gradient norm by {_percent(gradient)}"
    if chance > SPLIT_TOLERANCE:
        if worst <= 3 * chance:
            message = f"{found['model']} draws random numbers of its own (the same step twice differs by {_percent(chance)}): whether batch and accumulation are interchangeable cannot be told"
            return [Warning(code="split", message=message, next_step="compare loss curves of two splits before you rely on the answer")]
    elif worst <= SPLIT_TOLERANCE:
        return _batch_norms(found)
    cause, step = _cause(found)
    message = f"one effective batch of {found['batch']} in one piece and in micro-batches does not train alike: {figures}; {cause}"
    return [Warning(code="split", message=message, next_step=step)]


def _batch_norms(found: Mapping[str, Any]) -> list[Warning]:
    """BatchNorm that made no difference in these few samples makes one in others."""
    if not found.get("batch_norms"):
        return []
    return [Warning(code="split", message=_batch_norm(found), next_step="keep the per-device batch that you validated, or freeze or replace the layers")]


def _cause(found: Mapping[str, Any]) -> tuple[str, str]:
    """(what explains the difference, what to do), the likeliest first."""
    ratio, model, trainer = found.get("gradient_ratio"), found["model"], found["trainer"]
    own = "compute_loss" if found.get("own_compute_loss") else "training_step" if found.get("own_training_step") else None
    scaled = ratio is not None and ratio > 1.5
    if found.get("batch_norms"):
        return _batch_norm(found), "keep the per-device batch that you validated, or freeze or replace the layers"
    if own is not None and scaled:
        cause = f"{trainer}.{own} does not divide by the items of the whole batch, and gradients grow with the accumulation ({ratio:.2f} times as large)"
        return cause, f"use num_items_in_batch in {trainer}.{own}, or set loss_is_scaled_for_ga = False on the Trainer"
    if found.get("compute_loss_func") and scaled:
        return f"compute_loss_func does not divide by num_items_in_batch (gradients are {ratio:.2f} times as large)", "divide the summed loss by num_items_in_batch"
    if found.get("accepts_loss_kwargs") and scaled:
        cause = f"{model} takes loss keywords but ignores num_items_in_batch, so that gradients grow with the accumulation ({ratio:.2f} times as large)"
        return cause, f"set accepts_loss_kwargs = False on {model}, or divide its summed loss by num_items_in_batch (Adam forgives the factor, gradient clipping and logged losses do not)"
    if found.get("router_loss"):
        how = "undivided: it weighs more the more micro-batches there are" if found.get("accepts_loss_kwargs") else "of that micro-batch's samples alone"
        return f"{model} adds its router's auxiliary loss to each micro-batch, {how}", "keep the split that you validated, or set output_router_logits=False in the config if you do not want that loss"
    if ratio is not None and abs(ratio * found["micro_batches"] - 1) < SUM_TOLERANCE:
        who = f"{trainer}.{own}" if own is not None else model
        return f"the loss of {who} is a sum over its micro-batch, which Trainer divides by the accumulation (gradients are {ratio:.2f} times as large)", "divide the loss by the rows of the micro-batch"
    if found.get("uneven"):
        who = f"{trainer}.{own}" if own is not None else model
        return f"the loss of {who} is a mean over each micro-batch, and micro-batches with fewer labels weigh as much as others", "use num_items_in_batch in the loss, or keep the per-device batch that you validated"
    who = f"{trainer}.{own}" if own is not None else model
    return f"the loss of {who} depends on which samples share a micro-batch", "keep the per-device batch that you validated"


def _micro_batches(batch: int) -> int:
    """Into how many an effective batch of 8, 4 or 2 is cut."""
    return batch // max(1, batch // 4)


def _batch_norm(found: Mapping[str, Any]) -> str:
    names = list(found["batch_norms"])
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    kind = "synchronised BatchNorm" if found.get("sync_batch_norms") else "BatchNorm"
    return f"{found['model']} has {kind} ({listed}), which normalises over the micro-batch: accumulation does not make it a larger batch"


def _form(answer: Mapping[str, Any], name: str) -> FormResult | None:
    data = (answer.get("forms") or {}).get(name)
    return None if data is None else FormResult.from_json(data)


def _relative(values: Sequence[float], reference: Sequence[float]) -> float | None:
    """Of the first step; None when it is not finite. Two values that are both next to nothing agree."""
    if not values or not reference:
        return None
    a, b = values[0], reference[0]
    size = max(abs(a), abs(b))
    return 0.0 if size < 1e-12 else _finite(abs(a - b) / abs(b) if b else math.inf)


def _ratio(values: Sequence[float], reference: Sequence[float]) -> float | None:
    return _finite(values[0] / reference[0]) if values and reference and reference[0] else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _large(value: float | None) -> float:
    return math.inf if value is None else value


def _percent(value: float | None) -> str:
    return "more than can be said" if value is None else f"{100 * value:.3g} %"
