"""Watching torch.compile in a trial: when it has finished, how long it took, and whether it goes on compiling.

A step in which something was compiled is not measured: compile time is paid once, as cost of the search and of each training, and is not speed. Ragged
shapes can make it compile again and again; after `PATIENCE` such steps they are measured as they are, because the training would be like that as well.
"""

from __future__ import annotations

from typing import Any

PATIENCE = 12  #: steps that may compile before they count


class CompileWatch:
    """Asked after each optimizer step whether anything was compiled in it.

    Args:
        active: whether the training compiles at all; if not, nothing of torch's compiler is imported.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._before = self._graphs() if active else 0
        self._seen = self._before
        self._busy_steps = self._late = 0

    @property
    def graphs(self) -> int:
        """Graphs compiled since the beginning."""
        return self._graphs() - self._before if self.active else 0

    def busy(self) -> bool:
        """Whether the step that has just ended compiled something and is to be left out."""
        if not self.active:
            return False
        now = self._graphs()
        grew, self._seen = now > self._seen, now
        if not grew:
            return False
        if self._busy_steps >= PATIENCE:
            self._late += 1
            return False
        self._busy_steps += 1
        return True

    def facts(self) -> dict[str, Any]:
        """`{"compile": {...}}`: graphs, seconds, steps left out for it, measured steps that compiled; empty when nothing is compiled."""
        if not self.active:
            return {}
        return {
            "compile": {
                "graphs": self.graphs,
                "seconds": compile_seconds(),
                "steps_left_out": self._busy_steps,
                "measured_steps_that_compiled": self._late,
            }
        }

    def _graphs(self) -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"].get("unique_graphs", 0))


def compile_seconds() -> float:
    """Seconds that compilation took in this process, forward and backward, by torch's own clock."""
    from torch._dynamo.utils import calculate_time_spent

    spent = calculate_time_spent()
    total = spent.get("total_wall_time")
    if total is None:
        total = sum(v for name, v in spent.items() if name.startswith("entire_"))
    return float(total)
