"""The largest per-device batch that fits: what `autofit estimate --max-batch` says, beside what trials under that limit find.

    python -m benchmarks.hollow -- python -m benchmarks.largest_batch --date 2026-11-22      # or, on a card, without the first part
    python -m benchmarks.largest_batch --show FILE.json                                       # the report of recorded rows again

Each limit is enforced on PyTorch's own caching allocator; trials of eight optimizer steps go up or down from the prediction until one fits and the
next does not. Writes a report and its rows to `benchmarks/reports/`, after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.devices.device import Device
from autofit.errors import AutofitError, UserError
from autofit.files import write_json
from autofit.forecasts.laws import Setting, collect, law_class, uneven, versions
from autofit.problem.config import TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import Kind
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome, Reason
from autofit.units import GIB, format_bytes
from benchmarks.evidence.plan import ADAFACTOR, BF16, FOREACH, FP16, FP32, FUSED, ROOT
from benchmarks.evidence.reading import HOLLOW_WARNING

REPORTS = ROOT / "benchmarks" / "reports"
HOLLOW_CAVEATS = (
    "- A card's cuDNN and cuBLAS choose workspaces of their own, which are taken to be empty here.",
    "- What is computed on this device is zeros, token ids too; embedding gradients follow them.",
)
STEPS, TRIAL_SECONDS = 8, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and the two limits under which its largest batches are asked for."""

    workload: Workload
    limits: tuple[int, int]


QUESTIONS = tuple(
    Question(workload=Workload(model=model, seq_len=seq_len), limits=(int(small * GIB), int(large * GIB)))
    for model, seq_len, small, large in (
        ("bert-base-uncased", 128, 4, 9),
        ("gpt2", 256, 6, 13),
        ("t5-small", 128, 3, 7),
        ("vit-base-patch16-224", None, 4, 9),
        ("tinyllama-1.1b", 256, 20, 30),
    )
)
CLASSES = tuple(
    TrialConfig(per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, gradient_checkpointing=on, precision=precision, optim=optim)
    for precision, on, optim, accumulation in (
        (BF16, False, FUSED, 2),
        (BF16, False, FUSED, 1),
        (BF16, True, FUSED, 2),
        (FP32, False, FOREACH, 2),
        (FP16, True, ADAFACTOR, 2),
    )
)


def boundary(fits: Callable[[int], bool], guess: int) -> int:
    """Largest batch that fits, 0 when 1 does not, looked for from `guess` outwards in growing steps and then between.

    `fits` is asked at most once per batch, and taken to be true up to some batch and false from there on.
    """
    low, high, step = 0, None, 1
    at = max(1, guess)
    while high is None or high - low > 1:
        if fits(at):
            low = at
        else:
            high = at
        if high is None:
            at, step = low + step, 2 * step
        elif low == 0:
            at, step = max(1, high - step), 2 * step
        else:
            at = (low + high) // 2
    return low


def found_in_trials(runner: ProcessRunner, config: TrialConfig, limit_bytes: int, guess: int) -> int:
    """Largest batch whose trial survives under the limit, and not by emptying the allocator's cache in every step.

    Raises:
        UserError: a trial failed for another reason than memory.
    """

    def fits(batch: int) -> bool:
        result = runner.run(
            TrialRequest(
                config=config.but(per_device_train_batch_size=batch),
                memory_limit_bytes=limit_bytes,
                optimizer_steps=STEPS,
                timeout_seconds=TRIAL_SECONDS,
            )
        )
        reason = None if result.failure is None else result.failure.reason
        if result.outcome is not Outcome.COMPLETED and reason not in (Reason.OUT_OF_MEMORY, Reason.ALLOCATOR_THRASH):
            raise UserError(f"a trial at batch {batch} of {config.label()} did not end for its memory: {result.failure}")
        return result.outcome is Outcome.COMPLETED

    return boundary(fits, guess)


def rows_of(question: Question, classes: Sequence[TrialConfig], device: str) -> Iterator[dict[str, Any]]:
    """Yield one row per class and limit, and first the facts about the machine."""
    with ProcessRunner(question.workload, device) as runner:
        facts = runner.describe()
        machine = Device.from_json(facts["device"])
        runner.context_bytes = machine.context_bytes
        setting = Setting(
            workload=question.workload,
            facts=facts["model"],
            compute_capability=machine.compute_capability,
            padded=uneven(facts["model"]),
        )
        yield {"device": facts["device"], "software": facts["software"], "versions": versions()}
        laws = collect(setting, classes, lambda payload: runner.ask(Kind.ESTIMATE, payload, timeout=600.0), workers=os.cpu_count() or 1, single=True)
        for config in classes:
            law = laws[law_class(setting, config)].laws
            if law is None:
                raise UserError(f"{question.workload.model} cannot be traced: {laws[law_class(setting, config)].reason}")
            for limit in question.limits:
                predicted = law.memory.max_batch(limit - machine.context_bytes)
                found = found_in_trials(runner, config, limit, predicted)
                yield {
                    "model": question.workload.model,
                    "seq_len": question.workload.seq_len,
                    "config": config.to_json(),
                    "limit_bytes": limit,
                    "context_bytes": machine.context_bytes,
                    "predicted": predicted,
                    "found": found,
                }


def report(data: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    rows, device = data["rows"], data["machine"]["device"]
    misses = [row["predicted"] - row["found"] for row in rows]
    software = ", ".join(f"{name} {version}" for name, version in data["machine"]["software"].items() if version)
    lines = [f"# Largest batches: predicted, and found in trials, {data['date']}", ""]
    hollow = device["name"].startswith("Hollow")
    lines += [HOLLOW_WARNING, ""] if hollow else []
    lines += [
        "## Caveats",
        "",
        *(HOLLOW_CAVEATS if hollow else ()),
        f"- A trial takes {STEPS} optimizer steps; what an allocator still does after them is not seen.",
        "- Fixed shapes only.",
        "",
        "## How",
        "",
        *(f"    {line.strip().partition('  ')[0]}" for line in (__doc__ or "").splitlines() if line.startswith("    ")),
        "",
        f"{device['name']}, {software}.",
        "",
        "## Found",
        "",
        f"Of {len(rows)} questions {misses.count(0)} were answered exactly, {_missed(m for m in misses if m > 0)} with a batch that is too large, "
        f"{_missed(-m for m in misses if m < 0)} with one that is too small.",
        "",
        "| model | configuration | limit | predicted | found |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        config, length = TrialConfig.from_json(row["config"]), f" {row['seq_len']}" if row["seq_len"] else ""
        told = f"{'' if row['predicted'] == row['found'] else '**'}{row['predicted']}{'' if row['predicted'] == row['found'] else '**'}"
        words = config.label().partition(" ")[2] + (", accumulating" if config.gradient_accumulation_steps > 1 else "")
        lines.append(f"| {row['model']}{length} | {words} | {format_bytes(row['limit_bytes'])} | {told} | {row['found']} |")
    return lines


def _missed(by: Iterable[int]) -> str:
    """`3 (by 2 at most)`, `none`."""
    found = list(by)
    return f"{len(found)} (by {max(found)} at most)" if found else "none"


def _kept(path: Path, machine: dict[str, Any], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of other models that this machine has recorded on the same day."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    return [row for row in before["rows"] if row["model"] not in wanted] if before["machine"]["versions"] == machine["versions"] else []


def main(arguments: list[str] | None = None) -> int:
    """Ask, try, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.largest_batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", help="of the report")
    parser.add_argument("--models", help="some of them, separated by commas")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--show", type=Path, metavar="FILE.json", help="print the report of recorded rows, and run nothing")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print("\n".join(report(json.loads(options.show.read_text()))))
        return 0
    if not options.date:
        parser.error("name the report's date with --date")
    wanted = options.models.split(",") if options.models else [q.workload.model for q in QUESTIONS]
    if unknown := sorted(set(wanted) - {q.workload.model for q in QUESTIONS}):
        parser.error(f"no such model: {', '.join(unknown)}")
    data: dict[str, Any] = {"date": options.date, "machine": None, "rows": []}
    path = REPORTS / f"{options.date}-largest-batch"
    try:
        for question in QUESTIONS:
            if question.workload.model not in wanted:
                continue
            rows = rows_of(question, CLASSES, options.device)
            data["machine"] = next(rows)
            if not data["rows"]:
                data["rows"] = _kept(path.with_suffix(".json"), data["machine"], wanted)
            for row in rows:
                data["rows"].append(row)
                print(f"{row['model']} {TrialConfig.from_json(row['config']).label()} in {format_bytes(row['limit_bytes'])}: {row['predicted']} predicted, {row['found']} found")
                write_json(path.with_suffix(".json"), data)
                path.with_suffix(".md").write_text("\n".join(report(data)) + "\n", encoding="utf-8")
    except AutofitError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    print(f"written: {path.relative_to(ROOT)}.md, .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
