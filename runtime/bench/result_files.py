"""Files of benchmark results: writing and reading them, and the environment that they record."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runtime import __version__
from runtime.core import untrusted_files
from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.files import give_usual_permissions, make_named_folder, replace_file
from runtime.machine.probe import Machine

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("diffusers", "transformers", "numpy")
_GIT_SECONDS = 10
_COMMIT_DIGITS = 12


def new_folder(cache_dir: Path, out: str | None) -> Path:
    """Create and return the folder for a result.

    Args:
        out: its path; `None` for a new folder in the cache folder.

    Raises:
        InvalidRequestError: if `out` cannot be the name of a folder.
        OutputError: if the folder cannot be created.
    """
    if out is None:
        now = datetime.now(timezone.utc).astimezone()
        folder = cache_dir / "bench" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    elif not out.isprintable() or not out.strip():
        raise InvalidRequestError("out", "cli.folder_unreadable")
    else:
        folder = Path(out).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidRequestError("out", "bench.folder_is_file", folder=folder)
    try:
        if out is None:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            make_named_folder(folder)
    except OSError as error:
        raise OutputError("cli.folder_not_created", folder=folder, error=error.strerror or str(error)) from error
    return folder


def write(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        replace_file(path, text.encode())
        # In the cache, the folder is private.
        give_usual_permissions(path)
    except OSError as error:
        raise OutputError("bench.not_written", file=path, error=error.strerror or str(error)) from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a result atomically as JSON.

    Raises:
        OutputError: if it cannot be written.
    """
    write(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(name: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        InvalidRequestError: if it cannot be read or is not JSON.
    """
    try:
        return untrusted_files.read_json(Path(name).expanduser())
    except OSError as error:
        raise InvalidRequestError("file", "bench.not_read", file=name, error=error.strerror or str(error)) from error
    except ValueError as error:
        raise InvalidRequestError("file", "bench.not_a_result", file=name) from error


def describe_environment(machine: Machine) -> dict[str, Any]:
    """Return time, versions and machine, as JSON types."""
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
            "tensorrt": None,  # listed even if it is not installed
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
    """Return a folder's commit, and whether files differ from it; both are `None` outside of a git repository."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "changed": None}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if status is None else bool(status)}


def differing_versions(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the versions that differ between two environments: "torch 2.11.0, 2.13.0"."""
    lines = []
    for name in ("version", "commit", "changed"):
        pair = first["tandem"].get(name), second["tandem"].get(name)
        if pair[0] != pair[1]:
            lines.append(f"Tandem's {name} {_as_text(pair[0])[:_COMMIT_DIGITS]}, {_as_text(pair[1])[:_COMMIT_DIGITS]}")
    names = sorted({*first["versions"], *second["versions"]})
    for name in names:
        pair = first["versions"].get(name), second["versions"].get(name)
        if pair[0] != pair[1]:
            lines.append(f"{name} {_as_text(pair[0])}, {_as_text(pair[1])}")
    return lines


def differing_machines(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return differences between the machines of two environments that affect timings."""
    names = ("system", "cpu", "cores", "gpus")
    pairs = [(name, first["machine"].get(name), second["machine"].get(name)) for name in names]
    return [f"{name} {_as_text(a)}, {_as_text(b)}" for name, a, b in pairs if a != b]


def _as_text(value: Any) -> str:
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
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if number is None else int(number)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
