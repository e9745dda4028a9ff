"""Detects this machine's hardware, drivers and packages, without importing torch."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from runtime.core.facts import Fact
from runtime.machine.packages import installed_versions

# CPU features that affect the choice of kernels by compilers and libraries.
_INSTRUCTIONS = re.compile(r"(avx|amx|fma|f16c|bmi|sse4|asimd|sve|bf16|i8mm)\w*")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_GCC = 12


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: `capability` is (major, minor), memory in bytes."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware and software of a machine, as input of the planner.

    Attributes:
        system: operating system and processor architecture, as in "Linux x86_64" or "Darwin arm64".
        cpu: the processor's name.
        cores: number of usable cores.
        ram_bytes, ram_free_bytes: system memory; free includes file caches.
        gpus: the NVIDIA GPUs visible by CUDA_VISIBLE_DEVICES, in its order.
        gpu_problem: why GPUs cannot be read, if there seems to be one.
        torch_version: `None` if PyTorch is not installed.
        torch_cuda: the CUDA version that PyTorch is built with; `None` for a CPU build.
        disk_free_bytes: on the disk of the engine folder; `None` if it was not read, since it changes.
        unified_memory: whether CPU and GPU share memory, as on Apple silicon.
        driver_cuda: the newest CUDA version (major, minor) that the NVIDIA driver supports.
        packages: (name, version) of the installed `packages.PACKAGES`.
        compiler: the C++ compiler that Inductor uses.
        cpu_instructions: see `cpu_instructions`.
    """

    system: str
    cpu: str
    cores: int
    ram_bytes: int
    ram_free_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_problem: Fact | None
    torch_version: str | None
    torch_cuda: str | None
    swap_bytes: int = 0
    swap_free_bytes: int = 0
    disk_free_bytes: int | None = None
    unified_memory: bool = False
    driver_cuda: tuple[int, int] | None = None
    packages: tuple[tuple[str, str], ...] = ()
    compiler: str | None = None
    cpu_instructions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the problem as text."""
        problem = None if self.gpu_problem is None else str(self.gpu_problem)
        return asdict(self) | {"packages": dict(self.packages), "gpu_problem": problem}

    @property
    def cpu_has_bfloat16(self) -> bool:
        """Whether the CPU has bfloat16 instructions; without them, bfloat16 is slower than float32."""
        return not _BFLOAT16.isdisjoint(self.cpu_instructions)

    def gpu_of(self, device: str) -> Gpu:
        """Return the GPU of a torch device."""
        return self.gpus[gpu_index(device)]

    def version_of(self, package: str) -> str | None:
        """Return the version of an installed package of `packages.PACKAGES`."""
        return dict(self.packages).get(package)


def gpu_index(device: str) -> int:
    """Return the index of a torch device's GPU; `cuda` is the first."""
    return int(device.partition(":")[2] or 0)


def seen_from(machine: Machine, gpu: int) -> Machine:
    """Return the machine with one GPU in place of all others, for a job on that GPU."""
    if not machine.gpus:
        return machine
    return replace(machine, gpus=(machine.gpus[gpu],) * len(machine.gpus))


def probe(engines_dir: Path | None = None) -> Machine:
    """Detect the hardware and software of this machine.

    Args:
        engines_dir: the folder whose disk's free space is read.
    """
    memory = psutil.virtual_memory()
    gpus, problem, driver_cuda = _gpus()
    swap_bytes, swap_free_bytes = _swap()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=_cores(),
        ram_bytes=memory.total,
        ram_free_bytes=memory.available,
        gpus=gpus,
        gpu_problem=problem,
        torch_version=_version("torch"),
        torch_cuda=_torch_cuda(),
        swap_bytes=swap_bytes,
        swap_free_bytes=swap_free_bytes,
        disk_free_bytes=None if engines_dir is None else free_disk_bytes(engines_dir),
        unified_memory=(platform.system(), platform.machine()) == ("Darwin", "arm64"),
        driver_cuda=driver_cuda,
        packages=installed_versions(),
        compiler=cpp_compiler(),
        cpu_instructions=cpu_instructions(),
    )


def cpu_instructions() -> tuple[str, ...]:
    """Return the CPU's instruction sets that affect arithmetic, sorted; empty if the system does not list them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ()
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    return tuple(sorted(flag for flag in flags.group(1).split() if _INSTRUCTIONS.fullmatch(flag))) if flags else ()


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds `folder`, or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def visible(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES makes visible, in order.

    Args:
        setting: its value: indices or prefixes of UUIDs with commas. As in CUDA, the first invalid one ends the list.
        uuids: of all GPUs.
    """
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in map(str.strip, setting.split(",")):
        by_uuid = next((i for i, uuid in enumerate(uuids) if uuid.startswith(word)), -1)
        index = int(word) if word.isdecimal() else by_uuid
        if not word or not 0 <= index < len(uuids) or index in chosen:
            break
        chosen.append(index)
    return chosen


def _swap() -> tuple[int, int]:
    # Some containers and BSDs do not report it.
    with contextlib.suppress(OSError, RuntimeError):
        swap = psutil.swap_memory()
        return swap.total, swap.free
    return 0, 0


def cpp_compiler() -> str | None:
    names = {"Windows": ("cl",), "Darwin": ("clang++",)}.get(platform.system(), ("g++",))
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *names)))), None)


def compiles_all_vector_instructions() -> bool:
    """Whether the compiler is a GCC that supports every instruction set that Inductor may use (AMX needs GCC 11)."""
    compiler = cpp_compiler()
    if compiler is None or platform.system() != "Linux":
        return False
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False)
    major = version.stdout.partition(".")[0]
    return major.isdecimal() and int(major) >= _GCC


def _cores() -> int:
    # Containers and schedulers may allow fewer cores than the machine has.
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match.group(1)
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch was built with, read from its `version.py`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def _gpus() -> tuple[tuple[Gpu, ...], Fact | None, tuple[int, int] | None]:
    """Return the NVIDIA GPUs, why they cannot be read, and the newest CUDA version that their driver supports."""
    try:
        import pynvml
    except ImportError:
        return (), Fact("machine.no_nvml") if shutil.which("nvidia-smi") else None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded)
        return (), None if absent else Fact("machine.driver_failed", {"error": error}), None
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        gpus = []
        for index in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
            handle = handles[index]
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(name, (major, minor), int(memory.total), int(memory.free), driver))
        # 13010 is 13.1.
        return tuple(gpus), None, (cuda // 1000, cuda % 1000 // 10)
    except pynvml.NVMLError as error:
        return (), Fact("machine.driver_failed", {"error": error}), None
    finally:
        pynvml.nvmlShutdown()


def has_screen() -> bool:
    """Return whether a browser would open in a window; without one, webbrowser may start one inside the terminal."""
    return sys.platform in {"win32", "darwin"} or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
