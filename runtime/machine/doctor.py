"""The checks of the `doctor` command: what this machine has, what is missing, and a fix for each problem."""

import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.core.disk_caches import COMPILED, CONTROL_FRAMES, DISK_CACHES, LATENT_COLORS, QUANTIZED, bytes_in
from runtime.core.environment import quoted
from runtime.core.errors import TandemError
from runtime.core.facts import Fact, render
from runtime.machine.compatibility import compiler_problem, cuda_problem, tensorrt_rtx_problem, torch_tensorrt_problem
from runtime.machine.packages import PACKAGES, Package, import_problem, installed_as
from runtime.machine.probe import Gpu, Machine, free_disk_bytes

State = Literal["ok", "note", "problem"]

_LOW_DISK_BYTES = 2 << 30
_LOW_RAM_BYTES = 2 << 30
_PYTHONS = ((3, 10), (3, 13))


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked, as shown to the user.
        state: "note" for a problem that Tandem works around.
        fact: the detail; its remedy is the fix.
    """

    name: str
    state: State
    fact: Fact

    def to_json(self) -> dict[str, str]:
        """Return the fields, with the fact as text in the words of the command line."""
        detail, fix = render(self.fact)
        return {"name": self.name, "state": self.state, "detail": detail, "fix": fix}


def examine(machine: Machine, cache_dir: Path, engines_dir: Path) -> list[Finding]:
    """Check what a video needs and what makes it faster. Packages are imported in child processes."""
    return [
        _python(),
        _torch(machine),
        *_gpus(machine),
        Finding(
            "CPU", "ok", Fact("doctor.cpu", {"name": machine.cpu, "cores": machine.cores, "system": machine.system})
        ),
        _memory(machine),
        _cache(cache_dir),
        *_engines_folder(cache_dir, engines_dir),
        *_disk_caches(cache_dir),
        _compiler(machine),
        *_packages(machine),
    ]


def check(name: str, run: Callable[[], Fact]) -> Finding:
    """Run a check; an error that it raises is a problem."""
    try:
        return Finding(name, "ok", run())
    except TandemError as error:
        return Finding(name, "problem", error.fact)


def _python() -> Finding:
    version = platform.python_version()
    first, last = (".".join(map(str, bound)) for bound in _PYTHONS)
    if _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        return Finding("Python", "ok", Fact("doctor.version", {"version": version}))
    data = {"version": version, "first": first, "last": last}
    return Finding("Python", "problem", Fact("doctor.python_unsupported", data))


def _torch(machine: Machine) -> Finding:
    if machine.torch_version is None:
        return Finding("PyTorch", "problem", Fact("doctor.no_torch"))
    code = "doctor.torch" if machine.torch_cuda else "doctor.torch_without_cuda"
    return Finding("PyTorch", "ok", Fact(code, {"version": machine.torch_version, "cuda": machine.torch_cuda}))


def _gpus(machine: Machine) -> Iterator[Finding]:
    problem = cuda_problem(machine)
    if machine.gpu_problem is not None:
        yield Finding("GPU", "problem", machine.gpu_problem)
    elif not machine.gpus:
        yield Finding("GPU", "note", Fact("doctor.no_gpu_unified" if machine.unified_memory else "doctor.no_gpu"))
    for gpu in machine.gpus:
        description = _describe(gpu, machine)
        if machine.torch_version is not None and problem is not None:
            yield Finding("GPU", "problem", Fact("doctor.gpu_unusable", {"gpu": description, "cause": problem}))
        else:
            yield Finding("GPU", "ok", description)


def _describe(gpu: Gpu, machine: Machine) -> Fact:
    data = {
        "name": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "free": gpu.free_bytes,
        "total": gpu.total_bytes,
        "driver": gpu.driver,
        "cuda": ".".join(map(str, machine.driver_cuda or ("unknown",))),
    }
    return Fact("doctor.gpu", data)


def _memory(machine: Machine) -> Finding:
    data = {
        "free": machine.ram_free_bytes,
        "total": machine.ram_bytes,
        "swap_free": machine.swap_free_bytes,
        "swap": machine.swap_bytes,
    }
    memory = Fact("doctor.memory_and_swap" if machine.swap_bytes else "doctor.memory", data)
    if machine.ram_free_bytes < _LOW_RAM_BYTES:
        return Finding("Memory", "problem", Fact("doctor.memory_low", {"memory": memory, "least": _LOW_RAM_BYTES}))
    return Finding("Memory", "ok", memory)


def _cache(cache_dir: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=cache_dir):
            pass
    except OSError as error:
        data = {"folder": cache_dir, "error": error.strerror}
        return Finding("Cache folder", "problem", Fact("doctor.cache_not_writable", data))
    return _folder("Cache folder", cache_dir, "problem", "doctor.cache_disk_full")


def _engines_folder(cache_dir: Path, engines_dir: Path) -> Iterator[Finding]:
    if cache_dir not in engines_dir.parents:
        yield _folder("Engine folder", engines_dir, "note", "doctor.engines_disk_full")


def _disk_caches(cache_dir: Path) -> Iterator[Finding]:
    names = {
        QUANTIZED: "Quantized weights",
        COMPILED: "Compiled code",
        LATENT_COLORS: "Colors of previews",
        CONTROL_FRAMES: "Control frames",
    }
    for cache in DISK_CACHES:
        folder = cache_dir / cache.name
        if folder.is_dir():
            data = {"folder": folder, "size": bytes_in(folder), "most": cache.max_bytes}
            yield Finding(names[cache], "ok", Fact("doctor.disk_cache", data))


def _folder(name: str, folder: Path, state_if_full: State, code_if_full: str) -> Finding:
    free = free_disk_bytes(folder)
    full = free < _LOW_DISK_BYTES
    fact = Fact(code_if_full if full else "doctor.folder", {"folder": folder, "free": free})
    return Finding(name, state_if_full if full else "ok", fact)


def _compiler(machine: Machine) -> Finding:
    problem = compiler_problem(machine)
    if problem is None:
        return Finding("C++ compiler", "ok", Fact("doctor.path", {"path": machine.compiler}))
    return Finding("C++ compiler", "note", Fact("doctor.no_compiler", {"cause": problem}))


def _packages(machine: Machine) -> Iterator[Finding]:
    for package in PACKAGES:
        version = machine.version_of(package.name)
        useful = machine.gpus and _mismatch(package, machine) is None if package.needs_gpu else package.installed_by_us
        if version is not None:
            yield _installed(package, version, machine)
        elif useful:
            code = "doctor.installer_package_missing" if package.installed_by_us else "doctor.package_missing"
            yield Finding(package.title, "note", Fact(code, {"use": package.use, "install": _pip_command(package)}))


def _installed(package: Package, version: str, machine: Machine) -> Finding:
    problem = import_problem(package)
    if problem is not None:
        release, _ = installed_as(package) or (package.distributions[0], version)
        reinstall = f"{quoted(sys.executable)} -m pip install --force-reinstall {release}=={version}"
        data = {"version": version, "cause": problem, "reinstall": reinstall}
        return Finding(package.title, "note", Fact("doctor.package_unusable", data))
    mismatch = torch_tensorrt_problem(machine) if package.name == "torch-tensorrt" else _mismatch(package, machine)
    if mismatch is not None:
        return Finding(package.title, "note", mismatch)
    return Finding(package.title, "ok", Fact("doctor.version", {"version": version}))


def _mismatch(package: Package, machine: Machine) -> Fact | None:
    """Return why a package cannot be used with the machine's GPU."""
    return tensorrt_rtx_problem(machine) if package.name == "tensorrt-rtx" else None


def _pip_command(package: Package) -> str:
    return f"{quoted(sys.executable)} -m pip install {package.distributions[0]}"
