"""Live objects on their way to a child: a model, a dataset, a collator, by cloudpickle in a private temporary file.

The caller's objects are read, never changed; tensors on an accelerator travel as host copies (the child may number its devices differently).
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cloudpickle

from autofit.errors import UserError

MODEL_HINT = "pass a function that builds it inside the trial (model_init=...)"
OBJECT_HINT = "leave open files, locks and connections out of its state (`__getstate__`), and open them on first use"


class ObjectFile:
    """A private file (mode 0600, in a directory of its own) that holds objects for children; removed on exit.

    Args:
        objects: name -> object, see `workload.objects.load_objects`; None values are left out.

    Raises:
        UserError: an object cannot be pickled, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="autofit-objects-"))
        self.path = str(self._directory / "objects.pkl")
        try:
            given = {name: value for name, value in objects.items() if value is not None}
            data = _pickled(given)
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
                handle.write(data)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file."""
        shutil.rmtree(self._directory, ignore_errors=True)


def kept_arguments(args: Any) -> dict[str, Any]:
    """Fields of the user's `TrainingArguments` that differ from the class's defaults, enums as values."""
    kept = {}
    for field in dataclasses.fields(args):
        if not field.init:
            continue
        value = getattr(args, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value, default = (v.value if isinstance(v, Enum) else v for v in (value, default))
        if value != default:
            kept[field.name] = value
    return kept


def arguments_class(args: Any) -> type[Any] | None:
    """The class of the user's arguments where it is one of its own, else None (nothing need be sent)."""
    cls = type(args)
    return None if cls.__module__.startswith("transformers.") and cls.__name__ == "TrainingArguments" else cls


def sent_arguments(args: Any) -> dict[str, Any]:
    """What a child needs of the user's arguments: `arguments`, what differs from the defaults, and `arguments_cls`."""
    return {} if args is None else {"arguments": kept_arguments(args), "arguments_cls": arguments_class(args)}


class _HostPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles accelerator tensors as CPU tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__.startswith("torch") and type(obj).__name__ == "Tensor" and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(2)
        if type(obj).__module__.startswith("bitsandbytes.") and hasattr(type(obj), "_make_subclass"):
            # A parameter's own way to pickle forgets its class, and with it how quantised weights are moved.
            state = {k: v for k, v in vars(obj).items() if k != "data"}
            return rebuilt_parameter, (type(obj), obj.data, obj.requires_grad), state, None, None, restored
        return super().reducer_override(obj)


def rebuilt_parameter(cls: type[Any], data: Any, requires_grad: bool) -> Any:
    """A parameter of bitsandbytes around its packed values; what else it knows comes by `restored`."""
    return type(data)._make_subclass(cls, data, requires_grad)


def restored(parameter: Any, state: Mapping[str, Any]) -> None:
    """Give a rebuilt parameter its scales and settings back."""
    vars(parameter).update(state)


def _pickled(objects: Mapping[str, Any]) -> bytes:
    try:
        return _dumps(dict(objects))
    except Exception as error:
        for name, value in objects.items():
            try:
                _dumps(value)
            except Exception as own:  # pickling runs the objects' own code, which may raise anything
                raise UserError(
                    f"{name} cannot be sent to a trial's process: {type(own).__name__}: {str(own).splitlines()[0] if str(own) else ''}",
                    hint=MODEL_HINT if name == "model" else OBJECT_HINT,
                ) from own
        raise UserError(f"the objects cannot be sent to a trial's process: {error!r}") from error


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _HostPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
