"""Stage *oom*: provoked out-of-memory with exact texts, a card that others have filled, and limits below the card's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.units import MIB
from benchmarks.evidence.bench import Bench, point, record
from benchmarks.evidence.box import Box
from benchmarks.evidence.store import Sheet

#: as in `inside.oom.CASES`, which imports torch
CASES = ("forward", "backward", "update", "second micro-step", "evaluation", "bit by bit", "beyond the card")
ROOMS = tuple(room * MIB for room in (64, 256, 512, 640, 768, 1024))
CASE_SECONDS = 30.0
FITS, EXCEEDS, AFTERWARDS = "limit: fits", "limit: exceeds", "limit: fits afterwards"


def planned(bench: Bench) -> list[str]:
    """Keys of this stage."""
    return [
        *(f"provoked {case}" for case in CASES),
        FITS,
        EXCEEDS,
        AFTERWARDS,
        *(_room_key(room) for room in ROOMS),
    ]


def run(bench: Bench, sheet: Sheet, box: Box) -> None:
    """Provoked cases, then limits in real trials, then the filled card."""
    _provoked(bench, sheet, box)
    _limits(bench, sheet, box)
    _full_card(bench, sheet, box)


def _provoked(bench: Bench, sheet: Sheet, box: Box) -> None:
    _keep_provoked(bench, sheet, bench.left_behind("oom"), "")
    cases = [case for case in CASES if not sheet.settled(f"provoked {case}")]
    if not cases or not box.holds(5.0):
        return
    context = bench.machine.context_bytes
    order = {
        "cases": cases,
        "seconds": CASE_SECONDS,
        "context_bytes": context,
        "limit_bytes": context + bench.plan.oom_limit_bytes,
    }
    *found, end = bench.inside("oom", order, box, most=len(cases) * CASE_SECONDS)
    _keep_provoked(bench, sheet, found, end["log"][-500:])
    _fail_rest(sheet, [f"provoked {case}" for case in cases], end)


def _keep_provoked(bench: Bench, sheet: Sheet, found: Sequence[dict[str, Any]], log: str) -> None:
    for line in found:
        key = f"provoked {line.pop('case')}"
        if sheet.settled(key):
            continue
        if "died" in line or line.get("error") is None:
            sheet.fail(key, f"no exception: {line}; {log}")
        else:
            sheet.put(key, **line)
            bench.say(f"{key}: {line['error']['types'][0]} in {line['phase']}")


def _limits(bench: Bench, sheet: Sheet, box: Box) -> None:
    """A limit below the card's size holds in real trials: one that fits, one that does not, and the first again."""
    fits, exceeds = bench.plan.limits
    limit = bench.plan.limit_bytes + bench.machine.context_bytes
    for key, case in ((FITS, fits), (EXCEEDS, exceeds), (AFTERWARDS, fits)):
        if not sheet.settled(key) and box.holds(bench.least_seconds):
            with point(sheet, key):
                result = bench.trial(
                    case.workload, case.config, box, memory_limit_bytes=limit, window_seconds=0.1
                )
                total = bench.machine.total_memory_bytes
                record(sheet, key, result, case.config, limit_bytes=limit, total_memory_bytes=total)
                bench.say(f"{key}: {result.outcome}")


def _full_card(bench: Bench, sheet: Sheet, box: Box) -> None:
    _keep_rooms(sheet, bench.left_behind("full_card"), "")
    rooms = [room for room in ROOMS if not sheet.settled(_room_key(room))]
    if not bench.on_cuda:
        rooms = rooms[:1]
        for room in ROOMS[1:]:
            sheet.skip(_room_key(room), "needs a CUDA device")
    if not rooms or not box.holds(5.0):
        return
    *found, end = bench.inside(
        "full_card", {"rooms": rooms, "seconds": CASE_SECONDS}, box, most=len(rooms) * CASE_SECONDS
    )
    _keep_rooms(sheet, found, end["log"][-500:])
    _fail_rest(sheet, [_room_key(room) for room in rooms], end)


def _keep_rooms(sheet: Sheet, found: Sequence[dict[str, Any]], log: str) -> None:
    for line in found:
        key = _room_key(line["room_bytes"])
        if sheet.settled(key):
            continue
        if "died" in line:
            sheet.fail(key, f"{line}; {log}")
        else:
            sheet.put(key, **line)


def _fail_rest(sheet: Sheet, keys: Sequence[str], end: Mapping[str, Any]) -> None:
    """Say why a script that did not come to its end left out what it should have tried."""
    for key in keys:
        if end["status"] != 0 and key not in sheet.rows:
            sheet.fail(key, f"the script ended with status {end['status']}: {end['log'][-500:]}")


def _room_key(room: int) -> str:
    return f"room of {room // MIB} MiB"
