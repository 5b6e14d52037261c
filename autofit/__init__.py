"""Find the fastest Hugging Face Trainer configuration that fits in memory, by measuring it.

    result = autofit.tune("bert-large-uncased", effective_batch=64)
    args = result.training_arguments(output_dir="out")

Importing this package imports neither torch nor transformers nor optuna.

Where things are, lowest floor first; each imports only what stands before it (`tests/test_imports.py`):

- `problem`: what is asked. `devices`: what it runs on. `memory`: traces, the allocator's model, laws. `trials`: what became of configurations.
- `beliefs`: speed and memory of what was not tried. `processes`: children, seen from the parent. `forecasts`: what is said before any trial.
- `results`: the answer as data. `study`: Optuna's side.
- `reports`: what a person sees, while a search runs and afterwards.
- `workload`, `tracing`, `children`: what runs inside children, and alone imports torch and transformers.
- `search`: from a question to an answer. `cli`: the commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.errors import (
        AutofitError,
        FileFormatError,
        NothingFits,
        ScriptError,
        SearchFailed,
        StudyError,
        UserError,
        WorkerError,
    )
    from autofit.forecasts.estimation import MemoryEstimate, estimate
    from autofit.results.result import TuneResult, load
    from autofit.search.tuning import tune

_HOMES = {
    "AutofitError": "autofit.errors",
    "FileFormatError": "autofit.errors",
    "MemoryEstimate": "autofit.forecasts.estimation",
    "NothingFits": "autofit.errors",
    "ScriptError": "autofit.errors",
    "SearchFailed": "autofit.errors",
    "StudyError": "autofit.errors",
    "TuneResult": "autofit.results.result",
    "UserError": "autofit.errors",
    "WorkerError": "autofit.errors",
    "estimate": "autofit.forecasts.estimation",
    "load": "autofit.results.result",
    "tune": "autofit.search.tuning",
}

__version__ = "0.1.0"
__all__ = [
    "AutofitError",
    "FileFormatError",
    "MemoryEstimate",
    "NothingFits",
    "ScriptError",
    "SearchFailed",
    "StudyError",
    "TuneResult",
    "UserError",
    "WorkerError",
    "estimate",
    "load",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autofit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
