"""Sections of the report about the machine: facts, tests, out of memory."""

from __future__ import annotations

import statistics
from typing import Any

from autofit.devices import cards
from autofit.errors import UserError
from benchmarks.evidence.gpu_tests import WHOLE
from benchmarks.evidence.oom import AFTERWARDS, EXCEEDS, FITS
from benchmarks.evidence.reading import Reading, cell, mib, percent


def machine(reading: Reading) -> list[str]:
    """Device, versions and commands: what makes the report reproducible."""
    row = reading.row("facts", "machine")
    software, device, host = row.get("software", {}), row.get("device", {}), row.get("host", {})
    lines = [f"- device: {reading.device_name}"]
    if device:
        lines.append(
            f"- memory: {mib(device['total_memory_bytes'])} MiB, {mib(device.get('free_memory_bytes') or 0)} MiB free at the start; context "
            f"{mib(device['context_bytes'])} MiB; compute capability {device.get('compute_capability')}; computes {', '.join(device['precisions'])}"
        )
    if row.get("nvidia_smi"):
        lines.append(
            "- nvidia-smi: " + ", ".join(f"{name} {value}" for name, value in row["nvidia_smi"].items())
        )
    lines.append("- software: " + ", ".join(f"{name} {version}" for name, version in software.items()))
    if row.get("missing_packages"):
        lines.append("- not installed: " + ", ".join(sorted(row["missing_packages"])))
    if host:
        lines.append(f"- host: {host['system']}, {host['cpus']} CPUs, {mib(host['memory_bytes'])} MiB")
    lines += ["- commands:", "", *(f"      {command}" for command in reading.commands), ""]
    return lines


def facts(reading: Reading) -> list[str]:
    """Context by step, matrix rates beside the data sheet, start-up."""
    row = reading.row("facts", "context")
    steps = [
        (
            s["step"],
            mib(s.get("context_bytes")),
            mib(s.get("reserved_bytes")),
            mib(s.get("driver_used_bytes")),
            s.get("seconds"),
        )
        for s in row.get("steps", [])
    ]
    lines = [
        "### Context",
        "",
        "Bytes that a process takes beside the allocator, after each library came up.",
        "",
    ]
    lines += reading.table(("after", "context MiB", "reserved MiB", "card used MiB", "seconds"), steps)
    lines += [
        "### Matrix rates",
        "",
        "Square products of random numbers, TFLOP/s, beside the data sheet's peak.",
        "",
    ]
    peaks = _peaks(reading.device_name)
    rates = [(name, rate, peaks.get(name)) for name, rate in row.get("matrix_tflops", {}).items()]
    lines += reading.table(("precision", "measured", "data sheet"), rates)
    return [
        *lines,
        "### Start-up",
        "",
        *reading.table(("what", "seconds, median", "least", "most", "runs"), _starts(reading)),
    ]


def _peaks(name: str) -> dict[str, float | None]:
    try:
        card = cards.find(name)
    except UserError:
        return {}
    return {
        "fp32": card.fp32_tflops,
        "tf32": card.tf32_tflops,
        "fp16": card.fp16_tflops,
        "bf16": card.bf16_tflops,
    }


def _starts(reading: Reading) -> list[tuple[object, ...]]:
    forked, spawned = reading.row("facts", "start forked"), reading.row("facts", "start spawned")
    trials = reading.row("facts", "trials")
    named: list[tuple[str, list[float | None]]] = [
        ("imports of the fork server, once", [forked["import_seconds"]] if forked else []),
        ("forked child, to its first word", forked.get("first_word_seconds", [])),
        ("spawned child, to its first word", spawned.get("first_word_seconds", [])),
        (
            f"whole trial of two steps ({trials.get('model')})",
            [run["seconds"] for run in trials.get("runs", [])],
        ),
    ]
    rows: list[tuple[object, ...]] = []
    for name, values in named:
        known = [value for value in values if value is not None]
        hung = len(values) - len(known)
        if known:
            rows.append(
                (
                    name,
                    statistics.median(known),
                    min(known),
                    max(known),
                    f"{len(known)}" + (f", {hung} never answered" if hung else ""),
                )
            )
        elif hung:
            rows.append((name, None, None, None, f"{hung} never answered"))
    if trials.get("fallback_reason"):
        rows.append((f"fork server given up: {trials['fallback_reason']}", None, None, None, None))
    return rows


def tests(reading: Reading) -> list[str]:
    """`pytest -m gpu`: counts, then every test that did not pass."""
    rows = {key: row for key, row in reading.sheet("tests").rows.items() if key != WHOLE}
    counts = {
        state: sum(row["state"] == state for row in rows.values()) for state in ("done", "failed", "skipped")
    }
    whole = reading.row("tests", WHOLE)
    ending = f"exit status {whole['exit_status']}" if whole else "not run to its end"
    lines = [
        f"{counts['done']} passed, {counts['failed']} failed, {counts['skipped']} skipped; {ending}.",
        "",
    ]
    other = [
        (key.rpartition("::")[2], row["state"], (row.get("error") or row.get("reason") or "")[-300:])
        for key, row in rows.items()
        if row["state"] != "done"
    ]
    return [*lines, *(reading.table(("test", "outcome", "why"), other) if other else [])]


def oom(reading: Reading) -> list[str]:
    """Texts, allocator afterwards, the filled card, limits."""
    provoked = reading.rows("oom", "provoked ")
    lines = ["### Provoked", ""]
    lines += reading.table(
        ("where", "phase", "exception", "judged", "reserved MiB", "after release MiB", "usable"),
        [
            (
                case,
                row["phase"],
                row["error"]["types"][0],
                row["judged"]["reason"],
                mib(row["at_failure"].get("reserved_bytes")),
                mib(row["after_release"].get("reserved_bytes")),
                row["usable"],
            )
            for case, row in provoked.items()
        ],
    )
    texts = dict.fromkeys(
        f"- {case}: `{cell(row['error']['message'])[:600]}`" for case, row in provoked.items()
    )
    lines += ["The texts:", "", *texts, ""] if texts else []
    return [*lines, *_full_card(reading), *_limits(reading)]


def _full_card(reading: Reading) -> list[str]:
    rows = [
        (
            key,
            row.get("held"),
            row.get("failed_at") or "nothing failed",
            (row.get("judged") or {}).get("reason"),
            (row.get("error") or {}).get("message", "")[:300],
        )
        for key, row in reading.rows("oom", "room of ").items()
    ]
    return [
        "### A card that somebody else has filled",
        "",
        *reading.table(("room left", "held", "first call that failed", "judged", "text"), rows),
    ]


def _limits(reading: Reading) -> list[str]:
    rows = []
    for key in (FITS, EXCEEDS, AFTERWARDS):
        row: Any = reading.row("oom", key)
        if row:
            memory = (row.get("measurement") or {}).get("memory", {})
            reserved, context = memory.get("peak_reserved_bytes"), memory.get("context_bytes") or 0
            needed = None if reserved is None else reserved + context
            rows.append(
                (
                    key,
                    mib(row["limit_bytes"]),
                    row["outcome"],
                    mib(needed),
                    mib(memory.get("device_used_bytes")),
                    percent(needed, row["limit_bytes"]),
                    (row.get("failure") or {}).get("reason"),
                )
            )
    return [
        "### Limits below the card's size",
        "",
        *reading.table(
            (
                "trial",
                "limit MiB",
                "outcome",
                "context + reserved MiB",
                "card used MiB",
                "to the limit",
                "reason",
            ),
            rows,
        ),
    ]
