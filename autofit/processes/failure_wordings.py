"""The wordings by which libraries say that memory ran out, or something that looks like it: one row each, with the place where it was read."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from autofit.trials.trial import Reason


class Needs(StrEnum):
    """What has to be added to a wording before its verdict stands."""

    NOTHING = "nothing"
    RLIMIT = "rlimit"  #: the whole process was limited: with small headroom any call fails, so counters need not show it
    SHORTAGE = "shortage"  #: `Evidence.memory_was_short`


class Verdict(NamedTuple):
    """`reason` where `needs` is met, else `otherwise`."""

    reason: Reason
    needs: Needs = Needs.NOTHING
    otherwise: Reason = Reason.ERROR


OOM = Verdict(Reason.OUT_OF_MEMORY)
OOM_UNDER_RLIMIT = Verdict(Reason.OUT_OF_MEMORY, Needs.RLIMIT)
SUSPECT = Verdict(Reason.SUSPECTED_OUT_OF_MEMORY, Needs.SHORTAGE)
SUSPECT_ELSE_UNSUPPORTED = Verdict(Reason.SUSPECTED_OUT_OF_MEMORY, Needs.SHORTAGE, Reason.UNSUPPORTED)
UNSUPPORTED = Verdict(Reason.UNSUPPORTED)
ERROR = Verdict(Reason.ERROR)
INTERRUPTED = Verdict(Reason.INTERRUPTED)


class On(StrEnum):
    """What a row's pattern is compared with."""

    TYPE = "type"  #: the whole qualified name of any class of the exception's MRO
    MESSAGE = "message"  #: anywhere in the message
    LOG = "log"  #: anywhere in the output of a child that died


class Row(NamedTuple):
    """One line of the table; `source` is where the wording was read."""

    on: On
    pattern: str
    verdict: Verdict
    source: str


# The first matching row decides for one exception, so what only looks like out of memory stands above what is.
# fmt: off
ROWS: tuple[Row, ...] = (
    Row(On.TYPE, r"torch\.(cuda\.)?OutOfMemoryError", OOM, "torch/csrc/Exceptions.cpp; CUDA, HIP and XPU allocators"),
    Row(On.TYPE, r"builtins\.MemoryError", OOM, "Python; numpy's _ArrayMemoryError derives from it; std::bad_alloc through pybind11"),
    Row(On.TYPE, r"builtins\.KeyboardInterrupt", INTERRUPTED, "Python"),
    Row(On.TYPE, r"triton\.runtime\.\w+\.OutOfResources", UNSUPPORTED, "triton/runtime/errors.py: a tile too big for the chip, not a batch for the card"),

    Row(On.MESSAGE, r"out of resources?: (shared|tensor) memory|out of resource: (registers|threads)", UNSUPPORTED, "triton/runtime/errors.py"),
    Row(On.MESSAGE, r"\bINT_MAX\b|32.?bit.?index|integer multiplication overflow|storage size (calculation )?overflowed", UNSUPPORTED, "ATen: more elements than the kernel's index counts"),
    Row(On.MESSAGE, r"invalid configuration argument|no kernel image is available|not implemented for '(Half|BFloat16|Float8\w*)'", UNSUPPORTED, "CUDA launch limits and architectures; ATen/Dispatch.h"),
    Row(On.MESSAGE, r"memory in static TLS block", ERROR, "glibc elf/dl-reloc.c: order of imports, no lack of memory"),
    Row(On.MESSAGE, r"device-side assert triggered", ERROR, "CUDA error 710: an index out of range"),
    Row(On.MESSAGE, r"illegal memory access|unspecified launch failure", SUSPECT, "CUDA errors 700, 719: a kernel's bug, or an unchecked allocation in an extension"),

    Row(On.MESSAGE, r"(?<![\w/'\"])(CUDA|HIP|XPU|NPU|MLU|MUSA) out of memory\b(?![\w'\"/]|\.\w)", OOM, "c10/cuda/CUDACachingAllocator.cpp and its HIP and XPU twins"),
    Row(On.MESSAGE, r"\b(CUDA|HIP|XPU)( driver)? error: out of memory\b|Triton Error \[\w+\]: out of memory", OOM, "c10/cuda/CUDAException.cpp, driver_api.h (expandable segments), pinned host allocator; triton driver.c"),
    Row(On.MESSAGE, r"\b(cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY)\b|cuda runtime error \(2\)", OOM, "names of the codes; torch before 1.8"),
    Row(On.MESSAGE, r"MPS backend out of memory|Invalid buffer size: [\d.]+ [KMGT]?i?B", OOM, "aten/src/ATen/mps/MPSAllocator.mm"),
    Row(On.MESSAGE, r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|MODULE:PT_DEVMEM Allocation failed", OOM, "oneAPI unified runtime; accelerate/utils/memory.py (HPU)"),
    Row(On.MESSAGE, r"(CU|HIP)BLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error", OOM, "aten/src/ATen/cuda/Exceptions.h, TORCH_CUDABLAS_CHECK"),
    Row(On.MESSAGE, r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)|miopenStatusAllocFailed", OOM, "AT_CUDNN_CHECK; cuDNN 9 status names; MIOpen"),
    Row(On.MESSAGE, r"(CU|HIP)(SOLVER|SPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|resource allocation failed when calling `cusparse", OOM, "TORCH_CUSOLVER_CHECK, TORCH_CUDASPARSE_CHECK, CUFFT_CHECK"),
    Row(On.MESSAGE, r"Cuda failure (\d+ )?'out of memory'|Failed to CUDA (host )?[cm]alloc", OOM, "NCCL src/include/checks.h, alloc.h, through ncclGetLastError"),
    Row(On.MESSAGE, r"Default\w*CPUAllocator: (can't allocate|not enough) memory|C10 Out of Memory\. Trying to allocate", OOM, "c10/core/impl/alloc_cpu.cpp (Linux, Windows), CPUAllocator.cpp"),
    Row(On.MESSAGE, r"\bstd::bad_alloc\b", OOM, "libstdc++"),
    Row(On.MESSAGE, r"(^|[>:\]] )Cannot allocate memory\b|unable to mmap memory: you tried to mmap", OOM, "strerror(ENOMEM); aten/src/ATen/MapAllocator.cpp; dlopen"),
    Row(On.MESSAGE, r"Unable to allocate [\d.]+ [KMGTP]?i?B for an array with shape", OOM, "numpy/_core/_exceptions.py, re-raised by another name"),

    Row(On.MESSAGE, r"could not (create|execute) a primitive(?! descriptor)|could not create a memory object", OOM_UNDER_RLIMIT, "oneDNN: 9 of 291 failures under RLIMIT_AS; without a limit an unsupported shape"),
    Row(On.MESSAGE, r"can't start new thread", OOM_UNDER_RLIMIT, "CPython: no room for a stack; without a limit too many processes"),
    Row(On.MESSAGE, r"error return without exception set|returned NULL without setting an exception", OOM_UNDER_RLIMIT, "CPython: C code that failed to allocate and did not say so; 5 of 51 failures under RLIMIT_AS"),
    Row(On.MESSAGE, r"could not create a primitive descriptor", SUSPECT_ELSE_UNSUPPORTED, "oneDNN: no implementation for this dtype on this CPU"),
    Row(On.MESSAGE, r"unable to mmap \d+ bytes", SUSPECT, "MapAllocator.cpp with another errno"),
    Row(On.MESSAGE, r"CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)", SUSPECT, "no room for the handle; also the first call after a failed kernel assertion"),
    Row(On.MESSAGE, r"CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine to execute this|find a valid cuDNN algorithm", SUSPECT_ELSE_UNSUPPORTED, "AT_CUDNN_CHECK, Conv_v8.cpp, Conv_v7.cpp: no algorithm, or none whose workspace fits"),
    Row(On.MESSAGE, r"CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)|CUSOLVER_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED)", SUSPECT, "handles and workspaces that could not be made"),
    Row(On.MESSAGE, r"NVML_SUCCESS == .* INTERNAL ASSERT FAILED", SUSPECT, "CUDACachingAllocator.cpp asks NVML only while it reports out of memory; NVML may also be broken"),
    Row(On.MESSAGE, r"ncclUnhandledCudaError|UR_RESULT_ERROR_OUT_OF_RESOURCES", SUSPECT, "NCCLUtils.cpp without NCCL's last error; oneAPI"),
    Row(On.MESSAGE, r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)", SUSPECT, "torch/utils/data/_utils/signal_handling.py, dataloader.py"),

    Row(On.LOG, r"cannot allocate memory for thread-local data: ABORT", OOM, "glibc elf/dl-tls.c, exit 127"),
    Row(On.LOG, r"terminate called after throwing an instance of '(std::bad_alloc|c10::OutOfMemoryError)'", OOM, "libstdc++ terminate handler, SIGABRT"),
    Row(On.LOG, r"failed to map segment from shared object: Cannot allocate memory|failed to register TLS destructor: out of memory", OOM, "glibc elf/dl-load.c, stdlib/cxa_thread_atexit_impl.c"),
    Row(On.LOG, r"libgomp: Out of memory allocating \d+ bytes|OpenBLAS error: Memory allocation still failed", OOM, "libgomp, OpenBLAS: exit 1"),
    Row(On.LOG, r"(?m)^Error out of memory at line \d+ in file ", OOM, "bitsandbytes csrc: CUDA_CHECK_RETURN, exit 1"),
    Row(On.LOG, r"libgomp: Thread creation failed|pthread_create failed for thread", OOM_UNDER_RLIMIT, "libgomp, OpenBLAS: no room for a stack"),
)
# fmt: on
