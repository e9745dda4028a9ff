"""Where a benchmark ran: the machine, and the versions of everything that its figures depend on."""

import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runtime import __version__
from runtime.machine.probe import Machine

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("diffusers", "transformers", "numpy")
_GIT_SECONDS = 10
_SHORT = 12


def surroundings(machine: Machine) -> dict[str, Any]:
    """Return versions, machine and time, as JSON types."""
    driver = machine.gpus[0].driver if machine.gpus else None
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tandem": {"version": __version__, **commit(_ROOT)},
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": _cudnn(),
            "driver": driver,
            "tensorrt": None,  # named also where it is not installed
            **{name: _installed(name) for name in _PACKAGES},
            **dict(machine.packages),
        },
        "machine": {
            "system": machine.system,
            "cpu": machine.cpu,
            "cores": machine.cores,
            "ram_bytes": machine.ram_bytes,
            "gpus": [gpu.name for gpu in machine.gpus],
        },
    }


def commit(folder: Path) -> dict[str, Any]:
    """Return the commit that a folder is at, and whether files differ from it; nothing known outside of git."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "changed": None}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if status is None else bool(status)}


def differing_versions(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what two `surroundings` differ in beside the machine: "torch 2.11.0, 2.13.0"."""
    lines = []
    for name in ("version", "commit", "changed"):
        pair = one["tandem"].get(name), other["tandem"].get(name)
        if pair[0] != pair[1]:
            # A commit's first letters will do.
            lines.append(f"Tandem's {name} {_word(pair[0])[:_SHORT]}, {_word(pair[1])[:_SHORT]}")
    names = sorted({*one["versions"], *other["versions"]})
    for name in names:
        pair = one["versions"].get(name), other["versions"].get(name)
        if pair[0] != pair[1]:
            lines.append(f"{name} {_word(pair[0])}, {_word(pair[1])}")
    return lines


def differing_machines(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what the machines of two `surroundings` differ in, where that changes what things take."""
    names = ("system", "cpu", "cores", "gpus")
    pairs = [(name, one["machine"].get(name), other["machine"].get(name)) for name in names]
    return [f"{name} {_word(left)}, {_word(right)}" for name, left, right in pairs if left != right]


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _cudnn() -> int | None:
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if found is None else int(found)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
