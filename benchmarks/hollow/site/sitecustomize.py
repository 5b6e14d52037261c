"""On the hollow device's `PYTHONPATH`: the few answers of kernels that steer what transformers does.

Its models leave a mask out where it holds nothing but ones. They find that by `mask.all()`, or by `mask.sum() == mask.numel()`: here it is always so.
"""

import importlib.abc
import importlib.machinery
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be found as ever, and adds to what runs when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), _answer(module))
        return spec


def _answer(torch):
    import warnings

    def scalar(like, value, dtype):
        return torch.empty((), dtype=dtype, device=like.device).copy_(torch.tensor(value, dtype=dtype))

    def every(tensor):
        return scalar(tensor, True, torch.bool)

    def total(tensor, *, dtype=None):
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.ops.aten.sum.dim_IntList(tensor, [], dtype=dtype)
        return scalar(tensor, tensor.numel(), dtype or torch.int64)

    def equal(tensor, other):
        if tensor.dim() == 0:
            return scalar(tensor, tensor.cpu().item() == other, torch.bool)
        return torch.ops.aten.eq.Scalar_out(tensor, other, out=torch.empty_like(tensor, dtype=torch.bool))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are overrides on purpose
        for name, answer in {"all": every, "sum": total, "eq.Scalar": equal}.items():
            library.impl(name, answer, "CUDA")
    torch._hollow = library


sys.meta_path.insert(0, _AfterTorch())
