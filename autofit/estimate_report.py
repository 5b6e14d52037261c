"""What `autofit estimate` prints: the parts of the peak as a table with bars, the three peaks, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from autofit.estimation import LargestBatch, MemoryEstimate, Target
from autofit.spec import Workload
from autofit.units import format_bytes

BAR_WIDTH = 24


def render_estimate(answer: MemoryEstimate, workload: Workload, console: Console) -> None:
    """Print one estimate."""
    console.print(f"{workload.model}  {answer.config.label()}  on {answer.device}", highlight=False, markup=False)
    console.print(verdict(answer), style="bold", highlight=False, markup=False)
    console.print()
    bar = "#" if console.options.ascii_only else "█"
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("at the peak")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, part in answer.anatomy["parts"].items():
        share = part["share"]
        table.add_row(name.replace("_", " "), format_bytes(part["bytes"]), f"{share:.1%}", bar * round(share * BAR_WIDTH))
    console.print(table)
    console.print()
    for line in (*peak_lines(answer), *(f"note: {warning}" for warning in answer.warnings)):
        console.print(line, highlight=False, markup=False)


def verdict(answer: MemoryEstimate) -> str:
    """The answer in one line."""
    confidence = "traced" if answer.confidence == "traced" else "by formula"
    used = f"{format_bytes(answer.device_used_bytes)} used on the device ({confidence})"
    if answer.fits is None or answer.memory_bytes is None or answer.spare_bytes is None:
        return used
    size = format_bytes(answer.memory_bytes)
    if not answer.fits:
        return f"does not fit into {size}: {format_bytes(-answer.spare_bytes)} are missing; {used}"
    return f"fits into {size} with {format_bytes(answer.spare_bytes)} to spare; {used}"


def peak_lines(answer: MemoryEstimate) -> list[str]:
    """The three peaks and where the peak is, a line each."""
    lines = [
        f"peak allocated   {format_bytes(answer.peak_allocated_bytes):>10}   in live tensors",
        f"peak reserved    {format_bytes(answer.peak_reserved_bytes):>10}   held by the allocator when memory is no limit",
        f"min capacity     {format_bytes(answer.min_capacity_bytes):>10}   the least it survives in, beside the context",
    ]
    peak = answer.anatomy.get("peak")
    if peak:
        where = f"{peak['moment']} of micro-step {peak['micro_step'] + 1}, optimizer step {peak['step'] + 1}"
        lines.append(f"the peak is in the {where}, at {peak['operator']} ({format_bytes(peak['operator_bytes'])})")
    return lines


def render_largest(rows: Sequence[LargestBatch], workload: Workload, target: Target, console: Console) -> None:
    """Print the largest batches as a table."""
    size = format_bytes(target.memory_bytes or 0)
    console.print(f"largest per-device batch of {workload.model} on {target.name} ({size})", highlight=False, markup=False)
    table = Table(box=box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD, pad_edge=False)
    for name in ("precision", "checkpointing", "optimizer"):
        table.add_column(name)
    table.add_column("batch", justify="right")
    for row in rows:
        batch = "?" if row.batch_size is None else "does not fit" if row.batch_size == 0 else str(row.batch_size)
        table.add_row(str(row.precision), "on" if row.gradient_checkpointing else "off", row.optim, batch)
    console.print(table)
    for note in dict.fromkeys([*(f"could not be traced: {r.note}" for r in rows if r.note), *target.warnings]):
        console.print(f"note: {note}", highlight=False, markup=False)
