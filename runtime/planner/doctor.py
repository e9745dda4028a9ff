"""What this machine has, what is missing, and what to do about it: findings, each with its fix."""

import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.core.errors import TandemError
from runtime.core.facts import Fact, render
from runtime.machine import compatibility
from runtime.machine.packages import PACKAGES, Package, import_problem, installed_as
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.models.catalogue import folders
from runtime.models.registry import read_spec
from runtime.video.mp4 import find_ffmpeg

State = Literal["ok", "note", "problem"]

_GIB = 1 << 30
_LOW_DISK_BYTES = 2 * _GIB
_LOW_RAM_BYTES = 2 * _GIB
_PYTHONS = ((3, 10), (3, 13))


@dataclass(frozen=True)
class Finding:
    """One fact about this machine. `fix` is empty where nothing needs doing."""

    name: str
    state: State
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def examine(machine: Machine, cache_dir: Path, weights_dir: Path, engines_dir: Path) -> list[Finding]:
    """Look at everything that a video needs, and at what makes it faster. Imports packages in child processes."""
    return [
        _python(),
        _torch(machine),
        *_graphics(machine),
        Finding("CPU", "ok", f"{machine.cpu}, {machine.cores} core{'s' * (machine.cores != 1)}, {machine.system}"),
        _memory(machine),
        _cache(cache_dir),
        *_engines_folder(cache_dir, engines_dir),
        _ffmpeg(),
        _compiler(machine),
        *_packages(machine),
        *_models(weights_dir),
    ]


def _finding(name: str, state: State, fact: Fact) -> Finding:
    what, remedy = render(fact)
    return Finding(name, state, what, remedy)


def _python() -> Finding:
    first, last = (".".join(map(str, bound)) for bound in _PYTHONS)
    if _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        return Finding("Python", "ok", platform.python_version())
    return Finding(
        "Python",
        "problem",
        f"{platform.python_version()}; Tandem runs on {first} to {last}",
        f"Install one of these and run the installer again, or set TANDEM_PYTHON to it ({last} is fine).",
    )


def _torch(machine: Machine) -> Finding:
    if machine.torch_version is None:
        return Finding("PyTorch", "problem", "not installed", "Run the installer again.")
    build = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "no CUDA"
    return Finding("PyTorch", "ok", f"{machine.torch_version} ({build})")


def _graphics(machine: Machine) -> Iterator[Finding]:
    problem = compatibility.cuda_problem(machine)
    if machine.gpu_problem:
        yield _finding("GPU", "problem", Fact("machine.gpu_unreadable", {"problem": machine.gpu_problem}))
    elif not machine.gpus:
        shared = ", whose memory it would share anyway" if machine.unified_memory else ""
        yield Finding("GPU", "note", f"no NVIDIA GPU: everything runs on the CPU{shared}")
    for gpu in machine.gpus:
        capability = ".".join(map(str, gpu.capability))
        memory = f"{gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free"
        runs = f" (CUDA {'.'.join(map(str, machine.driver_cuda))})" if machine.driver_cuda else ""
        detail = f"{gpu.name}, compute capability {capability}, {memory}, driver {gpu.driver}{runs}"
        if machine.torch_version is not None and problem is not None:
            what, remedy = render(problem)
            yield Finding("GPU", "problem", f"{detail}. {what}", remedy)
        else:
            yield Finding("GPU", "ok", detail)


def _memory(machine: Machine) -> Finding:
    detail = f"{machine.ram_free_bytes / _GIB:.1f} of {machine.ram_bytes / _GIB:.1f} GiB free"
    if machine.swap_bytes:
        detail += f", {machine.swap_free_bytes / _GIB:.1f} of {machine.swap_bytes / _GIB:.1f} GiB of swap"
    if machine.ram_free_bytes < _LOW_RAM_BYTES:
        return Finding("Memory", "problem", detail, "Close other programs: at least 2 GiB should be free.")
    return Finding("Memory", "ok", detail)


def _cache(cache_dir: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=cache_dir):
            pass
    except OSError as error:
        return Finding(
            "Cache folder",
            "problem",
            f"{cache_dir} cannot be written: {error.strerror}",
            "Set TANDEM_CACHE_DIR to a folder that you can write to.",
        )
    free = free_disk_bytes(cache_dir)
    detail = f"{cache_dir}, {free / _GIB:.1f} GiB free"
    if free < _LOW_DISK_BYTES:
        return Finding("Cache folder", "problem", detail, "Free some space, or set TANDEM_CACHE_DIR to another disk.")
    return Finding("Cache folder", "ok", detail)


def _engines_folder(cache_dir: Path, engines_dir: Path) -> Iterator[Finding]:
    if cache_dir in engines_dir.parents:
        return
    free = free_disk_bytes(engines_dir)
    detail = f"{engines_dir}, {free / _GIB:.1f} GiB free"
    if free < _LOW_DISK_BYTES:
        fix = "Free some space, or set TENSORRT_CACHE_DIR to another disk."
        yield Finding("Engine folder", "note", f"{detail}: too little to build engines", fix)
    else:
        yield Finding("Engine folder", "ok", detail)


def _compiler(machine: Machine) -> Finding:
    if machine.compiler:
        return Finding("C++ compiler", "ok", machine.compiler)
    fact = compatibility.no_compiler(machine)
    remedy = "" if fact is None else render(fact).remedy
    return Finding("C++ compiler", "note", "none: Inductor engines and compiled blocks on a CPU need one", remedy)


def _packages(machine: Machine) -> Iterator[Finding]:
    for package in PACKAGES:
        number = machine.version_of(package.name)
        if number is not None:
            yield _installed(package, number, machine)
        elif (package.installed_by_us and not package.needs_gpu) or (package.needs_gpu and machine.gpus):
            yield _absent(package)


def _installed(package: Package, number: str, machine: Machine) -> Finding:
    problem = import_problem(package)
    if problem is not None:
        release, _ = installed_as(package) or (package.distributions[0], number)
        again = f"Install it anew: {sys.executable} -m pip install --force-reinstall {release}=={number}"
        return Finding(package.title, "note", f"{number}, but it cannot be used: {problem}", again)
    unfit = compatibility.unfit_torch_tensorrt(machine) if package.name == "torch-tensorrt" else None
    if unfit is not None:
        return _finding(package.title, "note", unfit)
    return Finding(package.title, "ok", number)


def _absent(package: Package) -> Finding:
    fix = f"If you want it: {sys.executable} -m pip install {package.distributions[0]}"
    if package.installed_by_us:
        fix = render(Fact("machine.run_installer")).what
    return Finding(package.title, "note", f"not installed: no {package.use}", fix)


def _ffmpeg() -> Finding:
    try:
        return Finding("ffmpeg", "ok", find_ffmpeg())
    except TandemError as error:
        return Finding("ffmpeg", "problem", error.what, error.remedy)


def _models(weights_dir: Path) -> Iterator[Finding]:
    for name, folder in folders(weights_dir).items():
        try:
            spec = read_spec(folder, name)
        except TandemError as error:
            yield Finding(f"Model {name}", "problem", error.what, error.remedy)
        else:
            yield Finding(f"Model {name}", "ok", f"{spec.total_parameters / 1e6:,.1f} million weights")
