"""What a result says of uneven data: the lengths, which of them decided the memory, and how much of the batches was padding. Pure.

Computed from the records: a trial notes what it showed to the model, a child's description what the dataset holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.problem.config import TrialConfig
from autofit.trials.lengths import LengthSummary
from autofit.trials.trial import Role, TrialRecord

COUNTED = ("tokens", "samples of audio")  #: units of a row in which its batch is counted too


def data_of(model: Mapping[str, Any], records: Sequence[TrialRecord], winner: TrialConfig) -> dict[str, Any]:
    """Return the result's `data`; empty where rows have no lengths that were looked at.

    Args:
        model: a child's description, its facts of named or live data under `data`.
        records: all trials.
        winner: whose trials say what was padded.

    Returns:
        `source`, `columns`, `uneven`, `lengths` (a `LengthSummary`), and for uneven rows `memory_decided_by`
        (`length`, `unit`, `shown`: whether a trial of the winner had a batch of the longest rows, `expected`: its length, only where a longer one came)
        and `padding_share`.
    """
    own = [r for r in records if r.config == winner and r.measurement is not None]
    seen = [facts for r in own if (facts := _facts(r))]
    described = dict(model.get("data") or {})
    lengths = described.get("lengths") or (seen[0].get("lengths") if seen else None)
    if not lengths:
        return {}
    uneven = bool(described.get("uneven", seen[0].get("uneven") if seen else False))
    kept = {name: described[name] for name in ("source", "split", "columns", "num_labels", "packing") if described.get(name)}
    found = {**kept, "uneven": uneven, "lengths": lengths}
    if uneven:
        found["memory_decided_by"] = _decided(LengthSummary.from_json(lengths), seen)
        found["padding_share"] = _padding(own)
    return found


def data_lines(data: Mapping[str, Any]) -> list[str]:
    """The data in sentences, for the report; empty where nothing is known of it."""
    if not data:
        return []
    summary = LengthSummary.from_json(data["lengths"])
    lines = [_source(data, summary)] if data.get("source") else []
    if not data["uneven"]:
        return [*lines, f"Every row has {summary.longest} {summary.unit}."] if data.get("columns") else []
    scanned = "all rows" if summary.complete else f"{summary.scanned:,} of {summary.rows:,} rows"
    lines.append(
        f"Lengths in {summary.unit}: shortest {summary.shortest}, median {summary.median:.0f}, mean {summary.mean:.1f}, "
        f"95 % up to {summary.p95:.0f}, longest {summary.longest} ({scanned})."
    )
    decided = data.get("memory_decided_by") or {}
    if decided.get("shown") and "expected" not in decided:
        lines.append(f"Memory was decided by length {decided['length']}: every trial began with a batch of the longest rows.")
    if data.get("padding_share") is not None:
        lines.append(f"Padding was {100 * data['padding_share']:.0f} % of the tokens.")
    return lines


def data_problems(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(code, message, next step) of what weakens the answer."""
    if not data or not data["uneven"]:
        return []
    summary = LengthSummary.from_json(data["lengths"])
    found = []
    if not summary.complete:
        found.append(
            (
                "partial_scan",
                f"the lengths of {summary.scanned:,} of {summary.rows:,} rows are known: a longer row than {summary.longest} {summary.unit} would need more memory than was measured",
                "cut rows at a fixed length with --seq-len"
                if data.get("columns")
                else "add a column `length` to the dataset, which is read in no time, or cut rows at a fixed length",
            )
        )
    decided = data.get("memory_decided_by") or {}
    if "expected" in decided:
        found.append(
            (
                "longer_came",
                f"a batch of length {decided['length']} came, and the rows of most {summary.unit} had made one of {decided['expected']}: a longer one may come, which would need more memory than was measured",
                "add a column `length` with the tokens of each row to the dataset, or tokenise it beforehand",
            )
        )
    elif not decided.get("shown"):
        found.append(
            (
                "longest_not_shown",
                "the Trainer has a data loader of its own: no batch of the longest rows could be put in front, so memory holds for the batches that came",
                "confirm the answer over a whole epoch: autofit confirm best.json --steps N",
            )
        )
    return found


def _decided(summary: LengthSummary, seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shown = [facts for facts in seen if facts.get("prelude_steps")]
    lengths = [facts["prelude_longest"] for facts in shown if facts.get("prelude_longest")]
    longest = max(lengths, default=summary.longest)
    came = max((facts["measured_longest"] for facts in shown if facts.get("measured_longest") and lengths), default=0)
    unit = summary.unit if not lengths or summary.unit in COUNTED else "tokens"
    return {"length": max(longest, came), "unit": unit, "shown": bool(shown), **({"expected": longest} if came > longest else {})}


def _padding(own: Sequence[TrialRecord]) -> float | None:
    """Mean share over the runs that timed many batches; a confirmation times few."""
    counted = [r for r in own if r.role is not Role.CONFIRMATION] or own
    shares = [share for r in counted if (share := _facts(r).get("padding_share")) is not None]
    return statistics.fmean(shares) if shares else None


def _facts(record: TrialRecord) -> Mapping[str, Any]:
    facts = None if record.measurement is None else record.measurement.facts
    return dict((facts or {}).get("data") or {})


def _source(data: Mapping[str, Any], summary: LengthSummary) -> str:
    parts = [f"{data['source']}{', split ' + data['split'] if data.get('split') else ''}: {summary.rows:,} rows"]
    if data.get("packing"):
        parts = [f"{data['source']}: {summary.rows:,} packed blocks"]
    parts += [str(data["columns"])] if data.get("columns") else []
    if data.get("num_labels"):
        parts.append("a number to predict" if data["num_labels"] == 1 else f"{data['num_labels']} labels")
    return f"{', '.join(parts)}."
