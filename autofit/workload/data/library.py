"""The `datasets` package and its `pyarrow`, imported at first use: named data needs them, everything else works without."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from autofit.errors import UserError

__all__ = ["Late", "arrow_column", "datasets", "is_a", "pa", "pc"]


class Late:
    """A module that is imported when something of it is asked for.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """What the module has under this name; UserError where it is not installed."""
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            package = self._name.partition(".")[0]
            raise UserError(f"--dataset needs the package {package}: {error}", hint="pip install datasets") from None
        return getattr(module, name)


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    datasets, pa, pc = Late("datasets"), Late("pyarrow"), Late("pyarrow.compute")


def is_a(thing: object, *names: str) -> bool:
    """Whether `thing` is of one of these classes of `datasets`; no where nobody has imported it, which a thing of it would need."""
    package = sys.modules.get("datasets")
    return package is not None and isinstance(thing, tuple(getattr(package, name) for name in names))


def arrow_column(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """A column as arrow holds it, in the order of the rows, without making a Python object of any."""
    return rows.select_columns([name]).with_format("arrow")[:][name]
