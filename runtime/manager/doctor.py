"""What this machine has, what is missing, and what to do about it: findings, each with its fix."""

import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.core.errors import TandemError
from runtime.manager.machine import Machine, free_disk_bytes
from runtime.models.catalogue import folders
from runtime.models.wan import read_spec
from runtime.video.ffmpeg import find_ffmpeg

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


def examine(machine: Machine, cache_dir: Path, weights_dir: Path) -> list[Finding]:
    """Look at everything that a video needs."""
    return [
        _python(),
        _torch(machine),
        *_graphics(machine),
        Finding("CPU", "ok", f"{machine.cpu}, {machine.cores} cores"),
        _memory(machine),
        _cache(cache_dir),
        _ffmpeg(),
        *_models(weights_dir),
    ]


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
    if machine.gpu_problem:
        yield Finding("GPU", "problem", machine.gpu_problem, "Install or update the NVIDIA driver, then restart.")
    elif not machine.gpus:
        yield Finding("GPU", "note", "no NVIDIA GPU: everything runs on the CPU")
    for gpu in machine.gpus:
        capability = ".".join(map(str, gpu.capability))
        memory = f"{gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free"
        detail = f"{gpu.name}, compute capability {capability}, {memory}, driver {gpu.driver}"
        if machine.torch_version is not None and machine.torch_cuda is None:
            yield Finding("GPU", "problem", f"{detail}; PyTorch cannot use it", "Run the installer again.")
        else:
            yield Finding("GPU", "ok", detail)


def _memory(machine: Machine) -> Finding:
    detail = f"{machine.ram_free_bytes / _GIB:.1f} of {machine.ram_bytes / _GIB:.1f} GiB free"
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
