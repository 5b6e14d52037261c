"""Every wording of out of memory is recognised, nothing else is, and what a child really says when it dies is understood."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import UserError
from autofit.processes.exception_report import (
    MAX_LINKS,
    MAX_MESSAGE,
    MAX_TRACEBACK,
    ExceptionLink,
    ExceptionReport,
    describe_exception,
)
from autofit.processes.failure import Evidence, classify_exception, classify_exit, requested_bytes
from autofit.processes.failure_wordings import ROWS, On
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.soundness import unsound
from autofit.trials.trial import Failure, Reason

OOM, SUSPECTED = Reason.OUT_OF_MEMORY, Reason.SUSPECTED_OUT_OF_MEMORY
GIB, MIB = 1 << 30, 1 << 20
RUNTIME = ("builtins.RuntimeError", "builtins.Exception", "builtins.BaseException")
TORCH_OOM = ("torch.OutOfMemoryError", *RUNTIME)
ACCELERATOR = ("torch.AcceleratorError", *RUNTIME)
DIST = ("torch.distributed.DistBackendError", "torch.distributed.DistError", *RUNTIME)
NOTHING = Evidence(device_kind="cuda")
CPU_LIMIT = Evidence(limit_set=True, device_kind="cpu")
FULL = Evidence(limit_set=True, device_kind="cuda", reserved_fraction=0.97)
ROOMY = Evidence(limit_set=True, device_kind="cuda", reserved_fraction=0.2)

CUDA_HELP = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.40 GiB is free. Including non-PyTorch memory, "
    "this process has 77.77 GiB memory in use. 16.00 GiB allowed; Of the allocated memory 75.13 GiB is allocated by PyTorch, and 18.76 MiB is reserved "
    "by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 131072000 bytes. "
    "Error code 12 (Cannot allocate memory)"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2"
NCCL_OOM = NCCL + "\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
CUDNN_UNSUPPORTED = (
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
)
MPS_OOM = (
    "MPS backend out of memory (MPS allocated: 42.28 GiB, other allocations: 720.00 KiB, max allowed: 42.43 GiB). "
    "Tried to allocate 384.00 MiB on shared pool."
)
NVML_ASSERT = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug to PyTorch. '
LINALG_HINT = "If you keep seeing this error, you may use `torch.backends.cuda.preferred_linalg_library()` to try linear algebra operators with other supported backends."


def report(message: str, types: tuple[str, ...] = RUNTIME, errno: int | None = None) -> ExceptionReport:
    return ExceptionReport(
        links=(ExceptionLink(types=types, message=message, errno=errno),),
        traceback="Traceback ...",
        phase="backward",
    )


def reason_of(message: str, types: tuple[str, ...] = RUNTIME, evidence: Evidence = NOTHING) -> Reason:
    return classify_exception(report(message, types), evidence).reason


PLAIN = [
    (CUDA_OOM, TORCH_OOM),
    ("Allocation on device ", TORCH_OOM),
    (
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.21 GiB already allocated)",
        RUNTIME,
    ),
    ("CUDA error: out of memory" + CUDA_HELP, ACCELERATOR),
    ("CUDA error: out of memory" + CUDA_HELP, RUNTIME),  # cudaHostAlloc: pinned memory, torch before 2.8
    ("CUDA driver error: out of memory", RUNTIME),
    (
        "cuda runtime error (2) : out of memory at /opt/conda/conda-bld/pytorch/aten/src/THC/generic/THCStorage.cu:58",
        RUNTIME,
    ),
    ("Triton Error [CUDA]: out of memory", RUNTIME),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", RUNTIME),
    ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", RUNTIME),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", RUNTIME),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", RUNTIME),
    ("cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", RUNTIME),
    (
        f"cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. {LINALG_HINT}",
        RUNTIME,
    ),
    ("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`", RUNTIME),
    ("CUDA error: resource allocation failed when calling `cusparseCreate(handle)`", RUNTIME),
    ("cuFFT error: CUFFT_ALLOC_FAILED", RUNTIME),
    (NCCL_OOM + "Cuda failure 2 'out of memory'", DIST),
    (NCCL_OOM + "Cuda failure 'out of memory'", DIST),
    (NCCL_OOM + "Failed to CUDA calloc async 2432 bytes", DIST),
    (
        "HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 63.98 GiB of which 63.15 GiB is free.",
        TORCH_OOM,
    ),
    ("HIP out of memory. Tried to allocate 978.00 MiB.", RUNTIME),
    ("HIP error: out of memory", RUNTIME),
    (
        "XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 GiB of which 12.01 GiB is free.",
        RUNTIME,
    ),
    ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", RUNTIME),
    (MPS_OOM, RUNTIME),
    ("Invalid buffer size: 24.00 GiB", RUNTIME),
    ("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB", RUNTIME),
    (CPU_OOM, RUNTIME),
    (
        "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to allocate 131072000 bytes.",
        RUNTIME,
    ),
    ("std::bad_alloc", RUNTIME),
    ("unable to mmap 131072000 bytes from file </torch_17_1>: Cannot allocate memory (12)", RUNTIME),
    ("$ Torch: unable to mmap memory: you tried to mmap 2 GB.", RUNTIME),
    (
        "libcublas.so.12: failed to map segment from shared object: Cannot allocate memory",
        ("builtins.ImportError", "builtins.Exception"),
    ),
    (
        "libgomp.so.1: failed to map segment from shared object: Cannot allocate memory",
        ("builtins.OSError", "builtins.Exception"),
    ),
    ("", ("builtins.MemoryError", "builtins.Exception")),
    ("std::bad_alloc", ("builtins.MemoryError", "builtins.Exception")),
    (
        "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
        ("numpy._core._exceptions._ArrayMemoryError", "builtins.MemoryError", "builtins.Exception"),
    ),
]


@pytest.mark.parametrize(("message", "types"), PLAIN, ids=lambda value: str(value)[:50])
def test_wordings_of_allocators_and_libraries_are_out_of_memory_without_further_evidence(
    message: str, types: tuple[str, ...]
) -> None:
    failure = classify_exception(report(message, types), NOTHING)
    assert failure.reason is OOM
    assert failure.phase == "backward"
    assert failure.traceback == "Traceback ..."
    assert "\n" not in failure.message
    assert failure.message.startswith(types[0].rpartition(".")[2])


AMBIGUOUS = [
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", RUNTIME, Reason.ERROR),
    (
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        RUNTIME,
        Reason.ERROR,
    ),
    (CUDNN_UNSUPPORTED, RUNTIME, Reason.UNSUPPORTED),
    ("GET was unable to find an engine to execute this computation", RUNTIME, Reason.UNSUPPORTED),
    ("Unable to find a valid cuDNN algorithm to run convolution", RUNTIME, Reason.UNSUPPORTED),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", RUNTIME, Reason.ERROR),
    (
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        RUNTIME,
        Reason.ERROR,
    ),
    ("CUDA error: an illegal memory access was encountered" + CUDA_HELP, ACCELERATOR, Reason.ERROR),
    (NVML_ASSERT, RUNTIME, Reason.ERROR),
    (NCCL_OOM, DIST, Reason.ERROR),
    ("DataLoader worker (pid 4711) is killed by signal: Killed. ", RUNTIME, Reason.ERROR),
    (
        "could not create a primitive descriptor for the matmul primitive. Run workload with ...",
        RUNTIME,
        Reason.UNSUPPORTED,
    ),
    ("unable to mmap 16 bytes from file </torch_1>: Permission denied (13)", RUNTIME, Reason.ERROR),
]


@pytest.mark.parametrize(("message", "types", "alone"), AMBIGUOUS, ids=lambda value: str(value)[:50])
def test_ambiguous_wordings_are_suspected_only_when_memory_was_short(
    message: str, types: tuple[str, ...], alone: Reason
) -> None:
    assert reason_of(message, types, NOTHING) is alone
    assert reason_of(message, types, ROOMY) is alone, (
        "a limit alone is no evidence when the counters say there was room"
    )
    assert reason_of(message, types, FULL) is SUSPECTED
    assert reason_of(message, types, Evidence(device_kind="cuda", free_bytes=10 * MIB)) is SUSPECTED
    assert reason_of(message, types, Evidence(device_kind="cuda", oom_kill_delta=1)) is SUSPECTED
    assert reason_of(message, types, Evidence(device_kind="cuda", limit_set=True)) is SUSPECTED, (
        "nothing was counted"
    )
    assert reason_of(message, types, Evidence(device_kind="cuda", exit_status=-signal.SIGKILL)) is SUSPECTED


def test_the_reserved_share_that_the_child_saw_goes_before_the_parents() -> None:
    message = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    link = ExceptionLink(types=RUNTIME, message=message)
    assert (
        classify_exception(ExceptionReport(links=(link,), reserved_fraction=0.99), ROOMY).reason is SUSPECTED
    )
    assert (
        classify_exception(ExceptionReport(links=(link,), reserved_fraction=0.1), FULL).reason is Reason.ERROR
    )


def test_an_assertion_that_failed_in_a_kernel_speaks_against_lack_of_memory() -> None:
    log = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [59,0,0], thread: [96,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    message = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    evidence = Evidence(limit_set=True, device_kind="cuda", reserved_fraction=0.99, log_tail=log)
    assert reason_of(message, evidence=evidence) is Reason.ERROR


@pytest.mark.parametrize(
    "message",
    [
        "could not create a primitive",
        "could not execute a primitive",
        "could not create a memory object",
        "can't start new thread",
        "error return without exception set",
        "<built-in function empty> returned NULL without setting an exception",
    ],
)
def test_onednn_and_threads_are_out_of_memory_where_the_process_was_limited(message: str) -> None:
    assert reason_of(message, evidence=CPU_LIMIT) is OOM
    assert reason_of(message, evidence=Evidence(device_kind="cpu")) is Reason.ERROR
    assert reason_of(message, evidence=ROOMY) is Reason.ERROR, (
        "a limit on the CUDA allocator does not limit the host"
    )
    assert reason_of(message, evidence=Evidence(device_kind="cpu", oom_kill_delta=2)) is OOM


NEVER = [
    (
        "out of resource: shared memory, Required: 131074, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        ("triton.runtime.errors.OutOfResources", "triton.errors.TritonError", "builtins.Exception"),
        Reason.UNSUPPORTED,
    ),
    (
        "out of resource: shared memory, Required: 163840, Hardware limit: 101376.",
        RUNTIME,
        Reason.UNSUPPORTED,
    ),
    (
        "nonzero is not supported for tensors with more than INT_MAX elements, file a support request",
        RUNTIME,
        Reason.UNSUPPORTED,
    ),
    (
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
        RUNTIME,
        Reason.UNSUPPORTED,
    ),
    ("numel: integer multiplication overflow", RUNTIME, Reason.UNSUPPORTED),
    ("CUDA error: invalid configuration argument" + CUDA_HELP, ACCELERATOR, Reason.UNSUPPORTED),
    ("\"addmm_impl_cpu_\" not implemented for 'Half'", RUNTIME, Reason.UNSUPPORTED),
    ("CUDA error: device-side assert triggered" + CUDA_HELP, ACCELERATOR, Reason.ERROR),
    (
        "libgomp.so.1: cannot allocate memory in static TLS block",
        ("builtins.ImportError", "builtins.Exception"),
        Reason.ERROR,
    ),
]


@pytest.mark.parametrize(("message", "types", "expected"), NEVER, ids=lambda value: str(value)[:50])
def test_what_only_sounds_like_memory_is_never_out_of_memory(
    message: str, types: tuple[str, ...], expected: Reason
) -> None:
    for evidence in (NOTHING, FULL, CPU_LIMIT, Evidence(oom_kill_delta=1)):
        assert reason_of(message, types, evidence) is expected


BUGS = [
    KeyError("memory"),
    KeyError("CUDA out of memory"),
    IndexError("DefaultCPUAllocator: can't allocate memory"),
    FileNotFoundError(2, "No such file or directory", "out_of_memory.txt"),
    FileNotFoundError(2, "No such file or directory", "CUDA out of memory.log"),
    OSError(28, "No space left on device"),
    RuntimeError("No such file: out_of_memory.txt"),
    RuntimeError("No such file: 'CUDA out of memory.txt'"),
    RuntimeError("cannot read CUDA out of memory.md"),
    RuntimeError("pin_memory=True requires a CUDA device"),
    RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    RuntimeError("unsupported memory format option ChannelsLast"),
    RuntimeError("the memory bank is full: 128 of 128 slots"),
    RuntimeError("Memory-efficient attention is not available"),
    RuntimeError("step 12 ran out of memory slots"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x128 and 64x2)"),
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"
    ),
    ValueError("unknown column 'CUDA error: out of memory'"),
    AttributeError("'Trainer' object has no attribute 'memory'"),
    NameError("name 'MemoryError_' is not defined"),
    AssertionError("std::bad_alloc"),
    TypeError("get_memory() missing 1 required positional argument"),
    NotImplementedError("memory-efficient checkpointing"),
    ImportError("cannot import name 'OutOfMemoryError' from 'mylib'"),
    ZeroDivisionError("division by zero"),
]


@pytest.mark.parametrize("error", BUGS, ids=repr)
def test_an_error_that_merely_mentions_memory_is_a_bug_with_its_traceback(error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        described = describe_exception(caught, phase="forward")
    for evidence in (NOTHING, FULL, CPU_LIMIT):
        failure = classify_exception(described, evidence)
        assert failure.reason is Reason.ERROR
        assert failure.traceback is not None
        assert failure.traceback.startswith("Traceback")
        assert type(error).__name__ in failure.message


def test_a_users_class_named_like_torchs_is_judged_by_its_message() -> None:
    class OutOfMemoryError(Exception):
        pass

    assert (
        classify_exception(describe_exception(OutOfMemoryError("the replay memory")), FULL).reason
        is Reason.ERROR
    )


def test_every_row_of_the_table_names_its_source_and_compiles() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        assert row.source
        assert re.compile(row.pattern)


@pytest.mark.parametrize("row", [r for r in ROWS if r.on is On.MESSAGE], ids=lambda row: row.pattern[:40])
def test_every_wording_in_the_table_has_a_message_in_these_tests(row: Any) -> None:

    messages = [m for m, *_ in (*PLAIN, *AMBIGUOUS, *NEVER)] + [
        "could not create a primitive",
        "can't start new thread",
        "error return without exception set",
    ]
    messages += ["cudaErrorMemoryAllocation"]
    assert any(re.search(row.pattern, message, re.IGNORECASE) for message in messages)


@pytest.mark.parametrize(
    "text", ["cudaErrorMemoryAllocation: out of memory", "hipErrorOutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY"]
)
def test_names_of_error_codes_are_out_of_memory(text: str) -> None:
    assert reason_of(text) is OOM


class TestChains:
    def test_out_of_memory_in_a_cause_decides(self) -> None:
        try:
            try:
                raise MemoryError
            except MemoryError as inner:
                raise ValueError("the batch could not be built") from inner
        except ValueError as error:
            described = describe_exception(error)
        assert [link.types[0] for link in described.links] == ["builtins.ValueError", "builtins.MemoryError"]
        failure = classify_exception(described, NOTHING)
        assert failure.reason is OOM
        assert failure.message == "MemoryError"

    def test_out_of_memory_in_a_context_decides_even_when_it_is_hidden(self) -> None:
        try:
            try:
                raise RuntimeError(CPU_OOM)
            except RuntimeError:
                raise KeyError("cleanup") from None
        except KeyError as error:
            failure = classify_exception(describe_exception(error), NOTHING)
        assert failure.reason is OOM
        assert failure.requested_bytes == 131072000

    def test_members_of_a_group_are_looked_at(self) -> None:
        group = ExceptionGroup("workers", [ValueError("x"), MemoryError()])
        assert classify_exception(describe_exception(group), NOTHING).reason is OOM

    def test_enomem_is_out_of_memory_by_its_number(self) -> None:
        assert (
            classify_exception(describe_exception(OSError(12, "Cannot allocate memory")), NOTHING).reason
            is OOM
        )

    def test_an_interrupt_is_not_a_bug(self) -> None:
        assert (
            classify_exception(describe_exception(KeyboardInterrupt()), NOTHING).reason is Reason.INTERRUPTED
        )

    def test_a_chain_that_bites_its_tail_ends(self) -> None:
        first, second = ValueError("a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        assert len(describe_exception(first).links) == 2

    def test_a_report_without_links_is_an_error(self) -> None:
        assert classify_exception(ExceptionReport(links=()), FULL).reason is Reason.ERROR


class TestReports:
    def test_length_is_bounded_and_both_ends_are_kept(self) -> None:
        error: BaseException = ValueError("begin" + "x" * 100_000 + "end")
        for number in range(20):
            outer = ValueError(str(number))
            outer.__cause__, error = error, outer
        described = describe_exception(error)
        assert len(described.links) == MAX_LINKS
        alone = describe_exception(ValueError("begin" + "x" * 200_000 + "end"))
        assert len(alone.links[0].message) <= MAX_MESSAGE
        assert alone.links[0].message.startswith("begin")
        assert alone.links[0].message.endswith("end")
        assert len(alone.traceback) <= MAX_TRACEBACK
        assert "characters left out" in alone.traceback

    def test_a_message_that_cannot_be_read_does_not_stop_the_report(self) -> None:
        class Broken(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no")

        assert describe_exception(Broken()).links[0].message == "<RuntimeError while reading the message>"

    def test_a_wide_traceback_survives_lack_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(error: BaseException) -> list[str]:
            raise MemoryError

        monkeypatch.setattr("traceback.format_exception", no_memory)
        try:
            raise MemoryError
        except MemoryError as error:
            described = describe_exception(error)
        assert "no memory" in described.traceback
        assert classify_exception(described, NOTHING).reason is OOM

    @given(
        st.lists(
            st.tuples(st.lists(st.text(), max_size=3), st.text(), st.none() | st.integers()), max_size=4
        ),
        st.text(),
        st.none() | st.text(),
        st.none() | st.floats(0, 1),
    )
    def test_json_round_trips(self, links: Any, text: str, phase: str | None, fraction: float | None) -> None:
        given_report = ExceptionReport(
            links=tuple(ExceptionLink(types=tuple(t), message=m, errno=e) for t, m, e in links),
            traceback=text,
            phase=phase,
            reserved_fraction=fraction,
        )
        assert ExceptionReport.from_json(json.loads(json.dumps(given_report.to_json()))) == given_report

    @pytest.mark.parametrize(
        "data", [{}, {"links": None}, {"links": [{}], "traceback": "", "phase": None}, {"links": [3]}]
    )
    def test_what_is_not_a_report_is_refused(self, data: dict[str, Any]) -> None:
        with pytest.raises(UserError, match="not an exception report"):
            ExceptionReport.from_json(data)

    @given(st.text(), st.sampled_from([RUNTIME, TORCH_OOM, ("builtins.KeyError",), ("x.Y",)]))
    def test_any_message_gets_a_verdict(self, message: str, types: tuple[str, ...]) -> None:
        failure = classify_exception(report(message, types), CPU_LIMIT)
        assert isinstance(failure, Failure)
        assert len(failure.message) <= 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA_OOM, 2 * GIB),
        ("CUDA out of memory. Tried to allocate 1024.00 MiB.", GIB),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA out of memory. Tried to allocate 1.50 TiB.", 3 << 39),
        (CPU_OOM, 131072000),
        (MPS_OOM, 384 * MIB),
        (
            "MPS backend out of memory (MPS allocated: 17.36 GB). Tried to allocate 192.00 MB on private pool.",
            192 * MIB,
        ),
        ("Unable to allocate 7.45 GiB for an array with shape (1000000000,)", int(7.45 * GIB)),
        ("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)", 4096),
        ("Failed to CUDA calloc async 2432 bytes", 2432),
        ("libgomp: Out of memory allocating 8256 bytes", 8256),
        ("Invalid buffer size: 24.00 GiB", 24 * GIB),
        ("CUDA error: out of memory", None),
        ("GPU 0 has a total capacity of 79.18 GiB", None),
        ("", None),
    ],
)
def test_the_size_that_was_asked_for_is_read_from_the_message(text: str, expected: int | None) -> None:
    assert requested_bytes(text) == expected


TLS_TEXT = "cannot allocate memory for thread-local data: ABORT\n"


class TestExits:
    @pytest.mark.parametrize("status", [-9, 137])
    def test_a_kill_is_suspected_under_a_limit_or_with_a_counted_oom_kill(self, status: int) -> None:
        assert classify_exit(status, CPU_LIMIT).reason is SUSPECTED
        assert classify_exit(status, ROOMY).reason is SUSPECTED, (
            "host memory is not in the allocator's counters"
        )
        counted = classify_exit(status, Evidence(oom_kill_delta=1, phase="update"))
        assert counted.reason is SUSPECTED
        assert "kernel counted" in counted.message
        assert counted.phase == "update"

    def test_a_kill_without_any_evidence_is_a_crash(self) -> None:
        failure = classify_exit(-9, Evidence(oom_kill_delta=0))
        assert failure.reason is Reason.CRASH
        assert "SIGKILL" in failure.message

    @pytest.mark.parametrize("status", [-11, 139, -6, 134, -7])
    def test_crashes_are_suspected_where_the_process_was_limited(self, status: int) -> None:
        assert classify_exit(status, CPU_LIMIT).reason is SUSPECTED
        assert classify_exit(status, FULL).reason is SUSPECTED
        assert classify_exit(status, ROOMY).reason is Reason.CRASH
        assert classify_exit(status, Evidence()).reason is Reason.CRASH

    @pytest.mark.parametrize("status", [-4, -8])
    def test_other_signals_are_crashes_even_under_a_limit(self, status: int) -> None:
        assert classify_exit(status, CPU_LIMIT).reason is Reason.CRASH

    @pytest.mark.parametrize("status", [-2, -15, 143])
    def test_a_polite_signal_is_an_interruption(self, status: int) -> None:
        assert classify_exit(status, CPU_LIMIT).reason is Reason.INTERRUPTED

    def test_exit_127_is_out_of_memory_with_its_text_and_suspected_without(self) -> None:
        assert classify_exit(127, Evidence(log_tail=TLS_TEXT)).reason is OOM
        assert classify_exit(127, CPU_LIMIT).reason is SUSPECTED
        assert classify_exit(127, Evidence()).reason is Reason.CRASH

    @pytest.mark.parametrize(
        ("status", "log"),
        [
            (
                -6,
                "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            ),
            (
                -6,
                "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory. Tried to allocate 2.00 GiB.\n",
            ),
            (
                -6,
                "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: out of memory\nCUDA kernel errors ...\n",
            ),
            (1, "libgomp: Out of memory allocating 8256 bytes\n"),
            (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"),
            (1, "Error out of memory at line 380 in file /src/csrc/ops.cu\n"),
            (
                127,
                "python: error while loading shared libraries: libgomp.so.1: failed to map segment from shared object: Cannot allocate memory\n",
            ),
            (1, 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nMemoryError\n'),
            (
                1,
                'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\ntorch.OutOfMemoryError: '
                + CUDA_OOM
                + "\n",
            ),
            (
                1,
                'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: [Errno 12] Cannot allocate memory\n',
            ),
        ],
    )
    def test_last_words_that_name_memory_are_out_of_memory(self, status: int, log: str) -> None:
        failure = classify_exit(status, Evidence(log_tail="step 1\n" + log))
        assert failure.reason is OOM
        assert failure.log_tail == "step 1\n" + log

    def test_threads_that_could_not_start_count_under_an_rlimit_only(self) -> None:
        log = "libgomp: Thread creation failed: Resource temporarily unavailable\n"
        assert classify_exit(1, Evidence(limit_set=True, log_tail=log)).reason is OOM
        assert classify_exit(1, Evidence(log_tail=log)).reason is Reason.CRASH

    def test_an_exception_printed_at_the_end_is_the_error(self) -> None:
        log = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nKeyError: 'memory'\n"
        failure = classify_exit(1, Evidence(limit_set=True, log_tail=log))
        assert failure.reason is Reason.ERROR
        assert failure.message == "KeyError: 'memory'"
        assert failure.traceback == log

    @pytest.mark.parametrize(
        "log",
        [
            "loading out_of_memory.txt\n",
            "note: lower the batch if you see CUDA out of memory\n",
            "MemoryError is handled\n",
            "",
        ],
    )
    def test_a_log_that_mentions_memory_says_nothing(self, log: str) -> None:
        assert classify_exit(3, Evidence(log_tail=log)).reason is Reason.CRASH

    def test_a_silent_end_is_an_unreadable_answer(self) -> None:
        assert classify_exit(0, CPU_LIMIT).reason is Reason.UNREADABLE_ANSWER
        assert classify_exit(None, CPU_LIMIT).reason is Reason.UNREADABLE_ANSWER

    @given(st.none() | st.integers(-70, 300), st.booleans(), st.sampled_from(["cpu", "cuda"]), st.text())
    def test_any_ending_gets_a_verdict(self, status: int | None, limit: bool, kind: str, log: str) -> None:
        failure = classify_exit(status, Evidence(limit_set=limit, device_kind=kind, log_tail=log))
        assert failure.message
        if not limit:
            assert failure.reason is not SUSPECTED


class TestRealChildren:
    """The texts and statuses of this machine's own interpreter, allocator and kernel."""

    PRELUDE = (
        "import json, os, resource, sys\n"
        "from autofit.processes.failure import describe_exception\n"
        "def limit(extra):\n"
        "    size = int([l for l in open('/proc/self/status') if l.startswith('VmSize')][0].split()[1]) * 1024\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (size + extra, resource.RLIM_INFINITY))\n"
        "def attempt(f):\n"
        "    try:\n"
        "        f()\n"
        "    except BaseException as error:\n"
        "        print(json.dumps(describe_exception(error, phase='forward').to_json()))\n"
    )

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", self.PRELUDE + code],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )

    def reports(self, code: str) -> list[Failure]:
        done = self.run(code)
        assert done.returncode == 0, done.stderr
        return [
            classify_exception(ExceptionReport.from_json(json.loads(line)), CPU_LIMIT)
            for line in done.stdout.splitlines()
        ]

    def test_python_and_the_kernel_under_an_address_space_limit(self) -> None:
        code = (
            "import mmap, threading\n"
            "limit(64 << 20)\n"
            "attempt(lambda: bytearray(1 << 30))\n"
            "attempt(lambda: mmap.mmap(-1, 1 << 30))\n"
            "threading.stack_size(512 << 20)\n"
            "attempt(lambda: threading.Thread(target=print).start())\n"
        )
        failures = self.reports(code)
        assert [f.reason for f in failures] == [OOM, OOM, OOM]
        assert failures[0].message == "MemoryError"
        assert failures[2].message == "RuntimeError: can't start new thread"

    def test_numpy_says_how_much_it_asked_for(self) -> None:
        (failure,) = self.reports("import numpy\nlimit(64 << 20)\nattempt(lambda: numpy.ones(1 << 28))\n")
        assert failure.reason is OOM
        assert failure.requested_bytes == 2 * GIB

    def test_the_cpu_allocator_of_torch_in_forward_and_backward(self) -> None:
        code = (
            "import torch\n"
            "torch.set_num_threads(1)\n"
            "x = torch.ones(1 << 22, requires_grad=True)\n"
            "y = x.expand(8, -1).sum()\n"
            "limit(8 << 20)\n"
            "attempt(lambda: torch.empty(1 << 28))\n"
            "attempt(y.backward)\n"
        )
        failures = self.reports(code)
        assert [f.reason for f in failures] == [OOM, OOM]
        assert failures[0].requested_bytes == GIB
        assert "DefaultCPUAllocator: can't allocate memory" in failures[0].message
        assert failures[1].requested_bytes == 16 * MIB
        assert failures[0].phase == "forward"

    def test_a_child_that_is_killed(self) -> None:
        done = self.run("import signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
        assert classify_exit(done.returncode, CPU_LIMIT).reason is SUSPECTED
        assert classify_exit(done.returncode, Evidence(log_tail=done.stderr)).reason is Reason.CRASH

    def test_a_child_that_ends_with_127(self) -> None:
        done = self.run(f"sys.stderr.write({TLS_TEXT!r})\nsys.stderr.flush()\nos._exit(127)\n")
        failure = classify_exit(done.returncode, Evidence(log_tail=done.stderr))
        assert failure.reason is OOM
        assert failure.message == TLS_TEXT.strip()

    def test_a_segmentation_fault(self) -> None:
        done = self.run(
            "import ctypes\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nctypes.string_at(0)\n"
        )
        assert done.returncode == -signal.SIGSEGV
        assert classify_exit(done.returncode, CPU_LIMIT).reason is SUSPECTED
        assert classify_exit(done.returncode, Evidence(log_tail=done.stderr)).reason is Reason.CRASH

    def test_an_uncaught_memory_error_on_stderr(self) -> None:
        done = self.run("limit(64 << 20)\nbytearray(1 << 30)\n")
        assert done.returncode == 1
        assert classify_exit(done.returncode, Evidence(log_tail=done.stderr)).reason is OOM


class TestSoundness:
    @staticmethod
    def run(**changes: Any) -> Measurement:
        base: dict[str, Any] = {"micro_step_seconds": (0.1,), "optimizer_steps": 3, "losses": (1.0, 0.9, 0.8)}
        return Measurement(**{**base, **changes})

    def test_a_good_run_is_sound(self) -> None:
        assert unsound(self.run()) is None
        facts = {
            "asked": {"optimizer": "AdamW"},
            "seen": {"optimizer": "AdamW"},
            "alloc_retries_after_warmup": 0,
        }
        assert unsound(self.run(facts=facts, skipped_steps=2)) is None

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_not_finite_is_unsound(self, loss: float) -> None:
        failure = unsound(self.run(losses=(1.0, loss, 0.8)))
        assert failure is not None
        assert failure.reason is Reason.NON_FINITE_LOSS
        assert "optimizer step 2" in failure.message

    def test_all_steps_skipped_is_unsound_and_some_are_not(self) -> None:
        failure = unsound(self.run(skipped_steps=3))
        assert failure is not None
        assert failure.reason is Reason.ALL_STEPS_SKIPPED
        assert unsound(self.run(skipped_steps=2)) is None

    def test_no_step_at_all_is_an_error(self) -> None:
        failure = unsound(self.run(optimizer_steps=0, losses=()))
        assert failure is not None
        assert failure.reason is Reason.ERROR

    def test_retries_after_warm_up_are_thrash_and_before_are_not(self) -> None:
        assert (
            unsound(self.run(memory=Memory(alloc_retries=4), facts={"alloc_retries_after_warmup": 0})) is None
        )
        assert unsound(self.run(facts={"alloc_retries_after_warmup": None})) is None
        failure = unsound(self.run(facts={"alloc_retries_after_warmup": 2}))
        assert failure is not None
        assert failure.reason is Reason.ALLOCATOR_THRASH
        assert "2 times" in failure.message

    @pytest.mark.parametrize(("retries", "steps", "thrash"), [(1, 1, False), (1, 6, False), (2, 6, False), (3, 6, True), (2, 4, True), (40, 40, True)])
    def test_only_retries_that_go_on_are_thrash(self, retries: int, steps: int, thrash: bool) -> None:
        failure = unsound(self.run(update_seconds=(0.1,) * steps, facts={"alloc_retries_after_warmup": retries}))
        assert (failure is not None) is thrash

    def test_a_knob_without_effect_is_named_with_both_values(self) -> None:
        facts = {
            "asked": {"autocast_dtype": "bfloat16", "gradient_checkpointing": True, "attn": "sdpa"},
            "seen": {"autocast_dtype": None, "gradient_checkpointing": True},
        }
        failure = unsound(self.run(facts=facts))
        assert failure is not None
        assert failure.reason is Reason.KNOB_WITHOUT_EFFECT
        assert failure.message == "autocast_dtype: asked for 'bfloat16', the run had None"

    def test_the_judgement_survives_storage(self) -> None:
        stored = Measurement.from_json(json.loads(json.dumps(self.run(losses=(1.0, math.nan)).to_json())))
        failure = unsound(stored)
        assert failure is not None
        assert failure.reason is Reason.NON_FINITE_LOSS
