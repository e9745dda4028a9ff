"""What this machine has. Probed without importing torch, never at import time."""

import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

# Packages that make weights smaller.
QUANTIZERS = ("torchao", "bitsandbytes")


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
    """The facts that decisions rest on; bytes throughout.

    `torch_cuda` is `None` for a CPU build; `quantizers` are those of `QUANTIZERS` that are installed.
    """

    system: str
    cpu: str
    cores: int
    ram_bytes: int
    ram_free_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    torch_version: str | None
    torch_cuda: str | None
    quantizers: tuple[str, ...] = ()


def probe() -> Machine:
    """Look at this machine."""
    memory = psutil.virtual_memory()
    gpus, problem = _gpus()
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
        quantizers=tuple(package for package in QUANTIZERS if _version(package) is not None),
    )


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds `folder`, or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cores() -> int:
    # Where a container or a scheduler allows fewer cores than there are, that is what counts.
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


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


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the NVIDIA GPUs and, where they cannot be read, why."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed" if shutil.which("nvidia-smi") else None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded)
        return (), None if absent else f"the NVIDIA driver does not answer ({error})"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(Gpu(name, (major, minor), int(memory.total), int(memory.free), driver))
        return tuple(found), None
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer ({error})"
    finally:
        pynvml.nvmlShutdown()
