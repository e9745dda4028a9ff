"""`engine.json`: an engine's record on disk. It is replaced by a rename, and read without trusting its content.

    {"format": 2, "id": …, "key": {…}, "files": [{"name", "bytes", "sha256"}, …], …}   the fields of `EngineRecord`

A file that is missing, cut short, of an unknown format or invalid gives a record with a `problem`, never an exception.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG

from pydantic import TypeAdapter, ValidationError

from runtime.core.digests import sha256
from runtime.core.facts import Fact
from runtime.core.untrusted_files import open_file, parse_json
from runtime.planner.choice.engine_index import UNREADABLE_KEY, EngineFile, EngineRecord

NAME = "engine.json"
LOG_NAME = "build.log"
_FORMAT = 2
_MAX_BYTES = 1 << 20
# Larger engine files are mapped, not read.
_MOST_READ = 2 << 30
_NEW = "engine.json.new"
# Files in an engine's folder that are not the engine's.
NOT_HASHED = frozenset({NAME, _NEW, LOG_NAME})
_RECORD = TypeAdapter(EngineRecord)
# Of an engine file.
Content = bytes | mmap.mmap
# By file: device, inode, size, and the times of modification and of the last change, in nanoseconds.
FileStates = dict[str, tuple[int, ...]]
# Clocks of file systems have ticks of up to 10 ms.
_SETTLED_NS = 100_000_000


def write(folder: Path, record: EngineRecord) -> None:
    """Write an engine's `engine.json`; readers see the old or the new file, never a part.

    Raises:
        OSError: if it cannot be written; the old file stays.
    """
    # JSON has no NaN: an error that is not finite is left out.
    values = _RECORD.dump_python(record, mode="json", exclude=None if math.isfinite(record.error) else {"error"})
    new = folder / _NEW
    try:
        new.write_text(json.dumps({**values, "format": _FORMAT}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(folder / NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read(folder: Path, engine_id: str | None = None) -> EngineRecord:
    """Read an engine's `engine.json`; anything wrong with it is the record's `problem`.

    Args:
        engine_id: the expected id; by default the folder's name.
    """
    engine_id = engine_id or folder.name
    path = folder / NAME
    try:
        if not S_ISREG(path.lstat().st_mode):
            return unreadable(folder, Fact("engine.file_not_regular", {"file": NAME}))
        with open_file(path) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            return unreadable(folder, Fact("engine.manifest_too_large"))
        record = _parse(data)
    except OSError as error:
        return unreadable(folder, _unreadable_file(NAME, error))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        data_error = {"field": ".".join(map(str, first["loc"])), "error": first["msg"]}
        return unreadable(folder, Fact("engine.manifest_invalid", data_error))
    except (ValueError, TypeError):  # not JSON, not UTF-8, or a fact without a code
        return unreadable(folder, Fact("engine.manifest_damaged"))
    if isinstance(record, Fact):
        return unreadable(folder, record)
    # An edited key belongs to another engine than the one in the folder.
    if record.id != engine_id or record.key.digest() != engine_id:
        problem = Fact("engine.manifest_changed")
        return replace(record, key=UNREADABLE_KEY, id=engine_id, pinned=False, problem=problem)
    return record


def unreadable(folder: Path, problem: Fact) -> EngineRecord:
    """Return the record of an engine of which only the folder is known."""
    return EngineRecord(
        id=folder.name,
        key=UNREADABLE_KEY,
        model="",
        component="",
        files=(),
        file_bytes=folder_bytes(folder),
        problem=problem,
    )


def hashed_files(folder: Path, engine_file: str) -> tuple[EngineFile, ...]:
    """Return the files of a finished engine with sizes and hashes, `engine_file` first.

    Raises:
        OSError: if one cannot be read, or `engine_file` does not exist.
    """
    file_names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in NOT_HASHED)
    names = [engine_file, *(name for name in file_names if name != engine_file)]
    return tuple(EngineFile(name, (folder / name).stat().st_size, sha256(folder / name)) for name in names)


def check_sizes(folder: Path, record: EngineRecord) -> Fact | None:
    """Return the problem with an engine's files, if any, without reading them."""
    for file in record.files:
        try:
            status = (folder / file.name).lstat()
        except OSError as error:
            return _unreadable_file(file.name, error)
        if not S_ISREG(status.st_mode):
            return Fact("engine.file_not_regular", {"file": file.name})
        if status.st_size != file.bytes:
            return Fact("engine.file_other_size", {"file": file.name, "size": status.st_size, "expected": file.bytes})
    return None


def check_hashes(folder: Path, record: EngineRecord) -> Fact | None:
    """Return the problem with an engine's files, if any, after reading all of them, at about 1 GB/s."""
    return check_sizes(folder, record) or _check_hashes(folder, record.files)


def _check_hashes(folder: Path, files: Sequence[EngineFile]) -> Fact | None:
    for file in files:
        try:
            if sha256(folder / file.name) != file.sha256:
                return Fact("engine.file_changed", {"file": file.name})
        except OSError as error:
            return _unreadable_file(file.name, error)
    return None


def open_checked(
    folder: Path, record: EngineRecord, stack: contextlib.ExitStack, hashed: FileStates | None = None
) -> Content | Fact:
    """Return the content of an engine file if all of the engine's files have their recorded hashes, else the problem.

    The hash is that of the returned content, whatever happens to the file from then on: up to 2 GiB are read into
    memory once. A larger file could take most of the memory and is mapped. If another file gets its name, the mapping
    stays the same; of bytes that a program writes into the file itself it may show some, which `file_states` notices.

    Args:
        stack: closes the mapping.
        hashed: the files as they were when their hashes were compared before; unless one has changed since, they are
            not computed again.
    """
    problem = check_sizes(folder, record)
    if problem is not None or not record.files:
        return problem or b""
    first = record.files[0]
    try:
        content = _read(folder / first.name, stack)
    except (OSError, ValueError) as error:  # ValueError: a mapping of an empty file
        return _unreadable_file(first.name, error)
    if hashed is not None and file_states(folder, record) == hashed:
        return content
    if hashlib.sha256(content).hexdigest() != first.sha256:
        return Fact("engine.file_changed", {"file": first.name})
    return _check_hashes(folder, record.files[1:]) or content


def _read(path: Path, stack: contextlib.ExitStack) -> Content:
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_READ:
            return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return file.read(_MOST_READ)


def file_states(folder: Path, record: EngineRecord) -> FileStates:
    """Return by file what changes if one of an engine's files is replaced or written; missing files are left out."""
    states: FileStates = {}
    for file in record.files:
        with contextlib.suppress(OSError):
            status = (folder / file.name).stat()
            # A program can set the time of modification, but not that of the change.
            times = status.st_mtime_ns, status.st_ctime_ns
            states[file.name] = (status.st_dev, status.st_ino, status.st_size, *times)
    return states


def are_settled(states: FileStates) -> bool:
    """Return whether a later change of a file will change its state: clocks of file systems have coarse ticks."""
    return all(time.time_ns() - changed > _SETTLED_NS for *_, changed in states.values())


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed, and files that vanish count 0."""
    total = 0
    for root, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with contextlib.suppress(OSError):  # it is being deleted
                status = Path(root, name).lstat()
                total += status.st_size if S_ISREG(status.st_mode) else 0
    return total


def _unreadable_file(name: str, error: OSError | ValueError) -> Fact:
    if isinstance(error, FileNotFoundError):
        return Fact("engine.file_missing", {"file": name})
    return Fact("engine.file_unreadable", {"file": name, "error": getattr(error, "strerror", None) or str(error)})


def _parse(data: bytes) -> EngineRecord | Fact:
    """Return the record in a file, or why its format cannot be read.

    Raises:
        ValueError: if it is not JSON or not valid.
    """
    values = parse_json(data)
    if not isinstance(values, dict) or "format" not in values:
        return Fact("engine.manifest_foreign")
    number = values.pop("format")
    if number != _FORMAT:
        return Fact("engine.manifest_format", {"format": str(number)[:20], "expected": _FORMAT})
    record = _RECORD.validate_json(json.dumps(values))
    return replace(record, file_bytes=sum(file.bytes for file in record.files))
