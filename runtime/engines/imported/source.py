"""Looks at a file that is to be imported, as bytes: what nobody could run is refused before anything opens it."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from runtime.core.errors import EngineError
from runtime.core.units import byte_size
from runtime.engines.builders.onnx_tensorrt import OnnxTensorRT
from runtime.engines.builders.onnxruntime import OnnxRuntimeBuilder
from runtime.engines.builders.tensorrt_common import installed_version
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.planner.constraints import OTHER_BACKEND

BACKENDS = {".trt": "tensorrt", ".plan": "tensorrt", ".engine": "tensorrt", ".onnx": "onnxruntime"}
FILE_NAMES = {"tensorrt": "engine.plan", "onnxruntime": "engine.onnx"}
# Said before anything of the file is run.
WARNING = (
    "An engine file is executable content: opening it runs what it holds with your rights. "
    "Import only what you made yourself or have from somebody you trust."
)
_LOOKED_AT = 4096
# The head of a plan since TensorRT 8.6, as `trtexec --getPlanVersionOnly` reads it: tag, layout, number of parts, size
# of the file, then the version in four bytes. Earlier ones begin otherwise.
_HEAD = struct.Struct("<4sIQQ4B")
_TAG = b"ftrt"
_MOST_BYTES = 1 << 46
# Major versions that have this head, or may come to have it; anything else there is no version.
_FIRST, _LAST = 8, 30
_ONLY = "Give a TensorRT plan (.trt, .plan or .engine) or an ONNX file (.onnx)."
_ELSEWHERE = "Import it on a machine that can run it, or have an ONNX file made."
_COPY_AGAIN = "Copy it again from where it was made."


@dataclass(frozen=True)
class Source:
    """A file that may be an engine.

    Attributes:
        path: absolute.
        backend: what would run it.
        bytes: its size.
        version: of the TensorRT that made it, as far as the file says so.
    """

    path: Path
    backend: str
    bytes: int
    version: str = ""


def look(path: Path) -> Source:
    """Return what can be told of a file from its first bytes.

    Raises:
        EngineError: if it cannot be an engine.
    """
    name = path.name
    try:
        mode = path.lstat().st_mode
        if S_ISLNK(mode):
            raise EngineError(f"{name} is a link.", f"Give the file that it leads to: {path.resolve()}.")
        if S_ISDIR(mode):
            raise EngineError(f"{name} is a folder.", _ONLY)
        if not S_ISREG(mode):
            raise EngineError(f"{name} is not a file.", _ONLY)
        backend = BACKENDS.get(path.suffix.lower())
        if backend is None:
            raise EngineError(f"{name} does not end as an engine file does.", _ONLY)
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise EngineError(f"{name or path} cannot be read: {why}.", "Check the path and its permissions.") from error
    if not head:
        raise EngineError(f"{name} is empty.", _COPY_AGAIN)
    if _is_text(head):
        raise EngineError(f"{name} is a text file, not an engine.", _ONLY)
    version = _plan_version(name, head, size) if backend == "tensorrt" else ""
    return Source(path.absolute(), backend, size, version)


def check_library(source: Source, machine: Machine) -> None:
    """Refuse what nothing here runs.

    Raises:
        EngineError: if the library that runs it is not here, or is of another version.
    """
    builder = OnnxTensorRT() if source.backend == "tensorrt" else OnnxRuntimeBuilder()
    missing = builder.unavailable(machine)
    if missing is not None:
        why, remedy = missing
        raise EngineError(
            f"{source.path.name} cannot be run here: {why}.", _ELSEWHERE if remedy == OTHER_BACKEND else remedy
        )
    here = installed_version() or ""
    if source.version and source.version.split(".")[:2] != here.split(".")[:2]:
        raise EngineError(
            f"{source.path.name} was made by TensorRT {source.version}; here is {here}.",
            "A plan runs on the TensorRT that made it: have it built anew, or build one here with `build`.",
        )


def check_room(source: Source, store: Path) -> None:
    """Refuse what the engine folder has no room for.

    Raises:
        EngineError: if the disk is too small.
    """
    free = free_disk_bytes(store)
    if source.bytes > free:
        raise EngineError(
            f"{source.path.name} takes {byte_size(source.bytes)}; {byte_size(free)} are free in {store}.",
            "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
        )


def _plan_version(name: str, head: bytes, size: int) -> str:
    if not head.startswith(_TAG):
        raise EngineError(f"{name} is not a plan of TensorRT 8.6 or later.", _ONLY)
    if len(head) < _HEAD.size:
        raise EngineError(f"{name} is cut short: {size:,} bytes.", _COPY_AGAIN)
    _, layout, _, whole, *version = _HEAD.unpack_from(head)
    if layout != 0:
        return ""
    if size < whole < _MOST_BYTES:
        raise EngineError(f"{name} is cut short: {size:,} of {whole:,} bytes.", _COPY_AGAIN)
    return ".".join(map(str, version[:3])) if _FIRST <= version[0] <= _LAST else ""


def _is_text(head: bytes) -> bool:
    """Whether the first bytes are UTF-8 without control characters; a cut character at the end counts as text."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3 or error.end != len(head):
            return False
        text = head[: error.start].decode("utf-8")
    return all(character.isprintable() or character in "\n\r\t\f" for character in text)
