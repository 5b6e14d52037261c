"""How a script of this package gets its order and reports: one JSON argument, one JSON line per finding, flushed at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autofit.processes.lifeline import die_with_parent

Report = Callable[..., None]


def serve(main: Callable[[Mapping[str, Any], Report], None]) -> None:
    """Read the order from the command line and run `main(order, report)`; dies with the process that sent it."""
    order = json.loads(sys.argv[1])
    die_with_parent(order["parent"])
    path = order["out"]

    def report(**finding: Any) -> None:
        with open(path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(finding) + "\n")

    main(order, report)
