"""Stand-ins for the CUDA libraries that one installation of torch is linked against: every function answers 0, but for those in `source/`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
OPENED_LATER = {"libcuda.so.1": "driver.c", "libnvidia-ml.so.1": "nvml.c"}  #: by name, at run time: no symbol of theirs is linked
IMPLEMENTED = {"libcudart.so.": "cudart.c", **dict.fromkeys(("libcublas.so.", "libcublasLt.so.", "libcudnn.so.", "libnvrtc.so.", "libnccl.so."), "libraries.c")}
UNVERSIONED = {"libnccl.so.": "nccl", "libcusparseLt.so.": "cusparseLt", "libcufile.so.": "cuFile", "libcurand.so.": "curand"}
VERSION_NODES = {"libnvshmem_host.so.": "NVSHMEM"}  #: libraries whose symbols' version is not their own name
FOREIGN = ("libnvshmem_host.", "libnvrtc.", "libcu", "libnccl.", "libnv")
KNOWN_MAJORS = {"12", "13"}
DRIVER_CALLS = r"CUresult CUDAAPI (cu\w+)\("
NVML_CALLS = ("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons")


class CannotBuild(Exception):
    """What is missing, in one line."""


def build(directory: Path) -> None:
    """Write the libraries for the installed torch (and bitsandbytes) into `directory`.

    Raises:
        CannotBuild: a tool, the headers or a CUDA build of torch is missing.
    """
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed")
    users, major = users_of_cuda()
    headers = header_directory(major)
    directory.mkdir(parents=True, exist_ok=True)
    compile_ = ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{headers}", f"-I{SOURCE}"]
    _run([*compile_, "-o", str(directory / "libhollow.so"), "-Wl,-soname,libhollow.so", str(SOURCE / "device.c"), "-lpthread"])
    wanted = linked_symbols(users)
    wanted["libcuda.so.1"] = set(re.findall(DRIVER_CALLS, (headers / "cuda.h").read_text()))
    wanted["libnvidia-ml.so.1"] = {*NVML_CALLS, *nvml_names(users)}
    for soname, names in wanted.items():
        source = OPENED_LATER.get(soname) or next((file for start, file in IMPLEMENTED.items() if soname.startswith(start)), None)
        own = [SOURCE / source] if source else []
        stubs, versions = directory / f"{soname}.c", directory / f"{soname}.map"
        stubs.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(names - defined(own, headers))))
        node = next((node for start, node in VERSION_NODES.items() if soname.startswith(start)), soname)
        versions.write_text(f"{node} {{ global: *; }};\n")
        versioned = soname not in OPENED_LATER and not any(soname.startswith(start) for start in UNVERSIONED)
        script = [f"-Wl,--version-script={versions}"] if versioned else []
        _run([*compile_, "-o", str(directory / soname), f"-Wl,-soname,{soname}", *script, str(stubs), *map(str, own),
              f"-L{directory}", "-l:libhollow.so", "-Wl,-rpath,$ORIGIN", "-ldl", "-lpthread"])


def users_of_cuda() -> tuple[list[Path], str]:
    """Shared libraries of torch, and of bitsandbytes for the same CUDA where it is installed; and CUDA's major version."""
    torch = _package("torch")
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild("the installed torch is no CUDA build: pip install --no-deps a wheel of one")
    found = [*torch.glob("lib/*.so"), *torch.glob("_C*.so")]
    majors = {name.rpartition(".")[2] for path in found for name in needed(path) if name.startswith("libcudart.so.")}
    if len(majors) != 1 or not majors <= KNOWN_MAJORS:
        raise CannotBuild(f"the installed torch is built for CUDA {', '.join(sorted(majors))}; known here are {', '.join(sorted(KNOWN_MAJORS))}")
    major, quantised = majors.pop(), _package("bitsandbytes")
    return found + (sorted(quantised.glob(f"libbitsandbytes_cuda{major}*.so")) if quantised is not None else []), major


def header_directory(major: str) -> Path:
    """Where `cuda_runtime_api.h` of this CUDA is: `CUDA_HOME`, the usual place, or the wheel of the runtime."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    wheel = importlib.util.find_spec("nvidia")
    for root in (wheel.submodule_search_locations or []) if wheel else []:
        places += [Path(root) / part / "include" for part in (f"cu{major}", "cuda_runtime")]
    for place in places:
        header = place / "cuda_runtime_api.h"
        if header.exists() and re.search(rf"#define CUDART_VERSION\s+{major}0", header.read_text()):
            return place
    raise CannotBuild(f"no headers of the CUDA {major} runtime: set CUDA_HOME, or pip install the wheel of the runtime (nvidia-cuda-runtime)")


def linked_symbols(users: Iterable[Path]) -> dict[str, set[str]]:
    """soname -> functions that `users` expect in it."""
    sonames = {name for path in users for name in needed(path) if name.startswith(FOREIGN)}
    nodes = {node: next(s for s in sonames if s.startswith(start)) for start, node in VERSION_NODES.items() if any(s.startswith(start) for s in sonames)}
    prefixes = {prefix: s for start, prefix in UNVERSIONED.items() for s in sonames if s.startswith(start)}
    found: dict[str, set[str]] = defaultdict(set, {soname: set() for soname in sonames})
    for path in users:
        for name, version in undefined(path):
            soname = nodes.get(version, version) or next((s for prefix, s in prefixes.items() if name.startswith(prefix)), "")
            if soname in sonames:
                found[soname].add(name)
    return dict(found)


def needed(path: Path) -> list[str]:
    """sonames in the dynamic section."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _run(["readelf", "-dW", str(path)]))


def undefined(path: Path) -> Iterator[tuple[str, str]]:
    """(name, version or empty) of symbols to be found elsewhere."""
    for line in _run(["readelf", "-W", "--dyn-syms", str(path)]).splitlines():
        columns = line.split()
        if len(columns) > 7 and columns[6] == "UND":
            name, _, version = columns[7].partition("@")
            yield name, version


def nvml_names(users: Iterable[Path]) -> set[str]:
    """NVML's functions that torch looks up by name."""
    names: set[str] = set()
    for path in users:
        if path.name.startswith(("libc10_cuda", "libtorch_cuda.")):
            names |= {found.decode() for found in re.findall(rb"\bnvml[A-Z]\w*[a-z0-9](?=\0)", path.read_bytes())}
    return names


def defined(sources: Sequence[Path], headers: Path) -> set[str]:
    """Functions that `sources` define."""
    names: set[str] = set()
    for source in sources:
        with tempfile.NamedTemporaryFile(suffix=".o") as compiled:
            _run(["gcc", "-c", "-fPIC", "-w", f"-I{headers}", f"-I{SOURCE}", "-o", compiled.name, str(source)])
            names |= {line.split()[-1] for line in _run(["nm", "--defined-only", "-g", compiled.name]).splitlines()}
    return names


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:3])} ... failed: {done.stderr.strip()[-500:]}")
    return done.stdout
