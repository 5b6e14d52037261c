"""Watches every operator on the fake device and records the births and deaths of storages.

Views share the storage of their base, so nothing counts twice, and the C++ autograd engine drops saved tensors in the same order as
on a card, so lifetimes are right. What kernels take for themselves is added from `kernels`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.memory.events import Kind, Moment
from autofit.memory.trace_builder import TraceBuilder
from autofit.tracing import costs, kernels
from autofit.tracing.answers import RESULTS, answerable
from autofit.tracing.engine import EngineRules
from autofit.tracing.reductions import shared_sum, summed_rows
from autofit.tracing.sdpa import torch_version

aten = torch.ops.aten
_SCALAR_READS = aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default  # a third of all calls, and no work
_TRUTHS = frozenset((aten.all.default, aten.eq.Scalar, aten.eq.Tensor))
CONVOLUTION_NOTE = "convolutions: cuDNN chooses workspaces at run time, they are not in the trace"
CUDNN_ATTENTION_NOTE = (
    "attention runs in cuDNN on this card: its backward workspace is assumed, not published"
)


class OperatorRefused(Exception):
    """An operator does not run on fake tensors.

    Args:
        operator: its name.
        error: what it raised.
    """

    def __init__(self, operator: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        super().__init__(f"{operator} does not run on fake tensors: {lines[0]}")


class ScalarReader(TorchDispatchMode):
    """Answers `.item()` and `bool()` of fake tensors while a model is built, where they would raise.

    Args:
        number: the answer for numbers; 0 ends the rejection loops of weight initialisers at once.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _SCALAR_READS:
            return _as_python(args[0].dtype, self._number, truth=bool(self._number))
        return func(*args, **(kwargs or {}))


def _as_python(dtype: torch.dtype, number: int, *, truth: bool) -> bool | int | float:
    if dtype == torch.bool:
        return truth
    return float(number) if dtype.is_floating_point else number


class StorageTracer(TorchDispatchMode):
    """Records into a `TraceBuilder`. Push it inside a `FakeTensorMode` (or on real tensors, to check it).

    Args:
        builder: receives the events.
        device_type: storages on other devices are ignored.
        card: that is imitated; None (on a CPU) adds no hidden workspaces.
        padded: whether masks hold zeros, which decides what a test of a mask answers.
        answer_scalars: whether `.item()` is answered with a constant instead of being run.
        engine: restores what backward does in place on a card.
    """

    def __init__(
        self,
        builder: TraceBuilder,
        *,
        device_type: str = "cuda",
        card: kernels.Card | None = None,
        padded: bool = False,
        answer_scalars: bool = True,
        engine: EngineRules | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.builder = builder
        self.recording_costs = False
        self.notes: set[str] = set()
        self.birth_orders: Mapping[Any, tuple[int, ...]] = kernels.BIRTH_ORDERS
        self._device_type = device_type
        self.card = card
        self._padded = padded
        self._answer_scalars = answer_scalars
        self._lifts_on_host = False
        self._live: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._weights: set[int] = set()
        self._threads: set[tuple[int, bool]] = set()
        self._names: dict[Any, str] = {}

    def __enter__(self) -> Self:
        self._lifts_on_host = torch._C._only_lift_cpu_tensors()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is _SCALAR_READS and self._answer_scalars:
            truth = not self._padded and getattr(args[0], "_autofit_truth", False)
            return _as_python(args[0].dtype, 1, truth=truth)
        kwargs = kwargs or {}
        if self._answer_scalars:
            (func, args, kwargs), assumed = answerable(func, args, kwargs)
            if assumed is not None:
                self.notes.add(assumed)
        backward = self.engine is not None and self.builder.moment is Moment.BACKWARD
        if self._lifts_on_host:  # the fake mode told the thread that entered it; autograd's own, which recomputes checkpoints, was not told
            torch._C._set_only_lift_cpu_tensors(True)
        if backward:
            func = self.engine.in_place(func, args) or func  # type: ignore[union-attr]
        try:
            out = RESULTS.get(func, func)(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:  # what fake tensors raise for an operator that they do not describe
            raise OperatorRefused(self._name(func), error) from error
        if backward:
            self.engine.note(func, out)  # type: ignore[union-attr]
        if isinstance(out, Tensor):
            self._see(out, func, args)
            if func in _TRUTHS and out.dim() == 0:
                out._autofit_truth = True  # type: ignore[attr-defined]
        elif isinstance(out, tuple | list):
            order = self.birth_orders.get(func) if self.card is not None else None
            for item in out if order is None else [out[index] for index in order]:
                if isinstance(item, Tensor):
                    self._see(item, func, args)
                elif isinstance(item, list | tuple):
                    for inner in item:
                        if isinstance(inner, Tensor):
                            self._see(inner, func, args)
        self._hidden(func, args)
        if self.recording_costs:
            costs.record(self.builder, func, args, kwargs, out)
        return out

    def _see(self, tensor: Tensor, func: Any, args: Sequence[Any]) -> None:
        """A new storage is a birth."""
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        kind = Kind.TEMPORARIES
        if func is aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            kind = Kind.AUTOCAST_COPIES
        self._born(storage, self._name(func), kind)

    def _name(self, func: Any) -> str:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        return name

    def _born(self, storage: Any, operator: str, kind: Kind) -> None:
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        key = storage._cdata
        number = self.builder.alloc(nbytes, operator, kind)
        self._live[key] = number

        def gone(_reference: Any) -> None:
            if self._live.get(key) == number:
                del self._live[key]
            self._watches.pop(number, None)
            self.builder.free(number)

        self._watches[number] = weakref.ref(storage, gone)

    def _hidden(self, func: Any, args: Sequence[Any]) -> None:
        """Memory that the kernel of `func` takes without the dispatcher's knowledge."""
        composite = kernels.COMPOSITES.get(func)
        if composite is not None:
            self._borrow(func, composite(args, self.card or kernels.Card(capability=(0, 0))))
        if self.card is None:
            return
        if func in kernels.GEMMS:
            self._multiply(func, kernels.cublas_workspace_bytes(self.card.capability))
            return
        if func in kernels.SUMS:
            self._borrow_shared(func, args)
            return
        workspace = kernels.WORKSPACES.get(func)
        if workspace is not None:
            self._borrow(func, workspace(args, self.card))
            if func is aten._scaled_dot_product_cudnn_attention_backward.default:
                self.notes.add(CUDNN_ATTENTION_NOTE)
        elif func in kernels.CONVOLUTIONS:
            self.notes.add(CONVOLUTION_NOTE)

    def _borrow(self, func: Any, groups: kernels.Groups) -> None:
        """Births and deaths of a kernel's own memory."""
        name = f"{self._name(func)} workspace"
        for group in groups:
            numbers = [self.builder.alloc(nbytes, name, Kind.WORKSPACE) for nbytes in group if nbytes]
            for number in numbers:
                self.builder.free(number)

    def _multiply(self, func: Any, nbytes: int) -> None:
        """cuBLAS' workspace and, where a bias is added, cuBLASLt's: kept by each thread, from torch 2.15 on taken for each product."""
        with_bias = func in kernels.LIGHT_GEMMS
        if torch_version() >= kernels.WORKSPACE_BY_PRODUCT:
            self._borrow(func, [[kernels.LIGHT_WORKSPACE_BYTES if with_bias else nbytes]])
            return
        thread = threading.get_ident()
        for light, size in ((False, nbytes), *(((True, kernels.LIGHT_WORKSPACE_BYTES),) if with_bias else ())):
            if (thread, light) not in self._threads:
                self._threads.add((thread, light))
                self.builder.alloc(size, "cublas workspace", Kind.WORKSPACE)

    def _borrow_shared(self, func: Any, args: Sequence[Any]) -> None:
        """As `_borrow`, for a sum over rows, whose memory rises with them in steps."""
        shape = summed_rows(args)
        if shape is None or self.card is None:
            return
        shared = shared_sum(*shape, self.card.capability)
        if shared is None:
            return
        name = f"{self._name(func)} workspace"
        if self.card.smooth:  # structure must not depend on the batch: below the first step it takes next to nothing
            place = self.builder.alloc(shared.line, name, Kind.WORKSPACE, stairs=shared.stairs)
        elif taken := shared.stairs.at(shared.line):
            place = self.builder.alloc(taken, name, Kind.WORKSPACE)
        else:
            return
        locks = self.builder.alloc(shared.semaphores, name, Kind.WORKSPACE)
        for number in (locks, place):
            self.builder.free(number)

    def adopt(self, tensors: Iterable[Tensor], kind: Kind, operator: str) -> None:
        """Record tensors that are already on the device (the model), in this order."""
        for tensor in tensors:
            if tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                if kind is Kind.WEIGHTS:
                    self._weights.add(storage._cdata)
                if storage._cdata not in self._live:
                    self._born(storage, operator, kind)

    def classify(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what tensors hold that an operator made."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == self._device_type:
                number = self._live.get(tensor.untyped_storage()._cdata)
                if number is not None:
                    self.builder.classify(number, kind)

    def mark(self, moment: Moment, *, step: int = 0, micro_step: int = 0) -> None:
        """A phase begins."""
        self.builder.mark(moment, step=step, micro_step=micro_step)

    def close(self) -> None:
        """Stop watching: what dies from now on is the end of the trace, not part of it."""
        self._watches.clear()
        self._live.clear()
