"""`engine.json`: what an engine says about itself. Written by one rename; read with trust in nothing.

    {"format": 1, "id": …, "key": {…}, "files": [{"name", "bytes", "sha256"}, …], …}   the fields of `EngineRecord`

A file that is missing, cut short, of another format or with values of the wrong type gives a record whose `problem`
says so, never an exception.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from runtime.core.loras import LoraUse
from runtime.planner.engine_index import UNREADABLE_KEY, EngineFile, EngineKey, EngineRecord

NAME = "engine.json"
LOG_NAME = "build.log"
_FORMAT = 1
_MAX_BYTES = 1 << 20
_HASH_BLOCK = 1 << 20
_NEW = "engine.json.new"
_NOT_THE_ENGINES = frozenset({NAME, _NEW, LOG_NAME})
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write(folder: Path, record: EngineRecord) -> None:
    """Put `engine.json` into an engine's folder; a reader sees the old one or the new one, whole.

    Raises:
        OSError: if it cannot be written; then the old one stays.
    """
    # JSON has no NaN: an error that is not finite is written as null.
    values = asdict(record) | {"format": _FORMAT, "error": record.error if math.isfinite(record.error) else None}
    values["loras"] = [use.to_json() for use in record.loras]
    new = folder / _NEW
    try:
        new.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(folder / NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read(folder: Path, engine_id: str | None = None) -> EngineRecord:
    """Read an engine's `engine.json`; what is wrong with it is the record's `problem`.

    Args:
        engine_id: whose it must be, if the folder's name is not the engine's id.
    """
    engine_id = engine_id or folder.name
    path = folder / NAME
    try:
        if not S_ISREG(path.lstat().st_mode):
            return unreadable(folder, f"{NAME} is not a file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            return unreadable(folder, f"{NAME} is too large to be one")
        values = json.loads(data, parse_constant=_refuse_constant)
        record = _record(values)
    except FileNotFoundError:
        return unreadable(folder, f"{NAME} is missing")
    except OSError as error:
        return unreadable(folder, f"{NAME} cannot be read: {error.strerror or error}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return unreadable(folder, f"{NAME} is cut short or not JSON")
    except ValueError as error:
        return unreadable(folder, f"{NAME} cannot be used: {error}")
    # A key that was edited is another engine's: what is in the folder was not built for it.
    if record.id != engine_id or record.key.digest() != engine_id:
        problem = f"{NAME} was changed, or is another engine's"
        return replace(record, key=UNREADABLE_KEY, id=engine_id, pinned=False, problem=problem)
    return record


def unreadable(folder: Path, problem: str) -> EngineRecord:
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
        OSError: if one cannot be read, or `engine_file` is not there.
    """
    beside = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in _NOT_THE_ENGINES)
    names = [engine_file, *(name for name in beside if name != engine_file)]
    return tuple(EngineFile(name, (folder / name).stat().st_size, sha256(folder / name)) for name in names)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: if it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def check_sizes(folder: Path, record: EngineRecord) -> str | None:
    """Say what is wrong with an engine's files, without reading them."""
    for file in record.files:
        try:
            status = (folder / file.name).lstat()
        except OSError as error:
            return f"{file.name} is missing" if isinstance(error, FileNotFoundError) else _cannot_read(file.name, error)
        if not S_ISREG(status.st_mode):
            return f"{file.name} is not a file"
        if status.st_size < file.bytes:
            return f"{file.name} is cut short: {status.st_size:,} of {file.bytes:,} bytes"
        if status.st_size > file.bytes:
            return f"{file.name} is too long: {status.st_size:,} bytes, not {file.bytes:,}"
    return None


def check_hashes(folder: Path, record: EngineRecord) -> str | None:
    """Say what is wrong with an engine's files after reading all of them: at about 1 GB a second."""
    problem = check_sizes(folder, record)
    if problem is not None:
        return problem
    for file in record.files:
        try:
            if sha256(folder / file.name) != file.sha256:
                return f"{file.name} was changed since it was built"
        except OSError as error:
            return _cannot_read(file.name, error)
    return None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, links not followed; what cannot be seen counts nothing."""
    total = 0
    for root, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with contextlib.suppress(OSError):  # it is being deleted
                status = Path(root, name).lstat()
                total += status.st_size if S_ISREG(status.st_mode) else 0
    return total


def _cannot_read(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror or error}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _record(values: object) -> EngineRecord:
    names = {field.name for field in fields(EngineRecord)}
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError("it is not an engine's")
    if values["format"] != _FORMAT or values["format"] is True:
        raise ValueError(f"its format is {str(values['format'])[:20]}, not {_FORMAT}")
    # Those that were built before there were LoRAs say nothing of them.
    values.setdefault("loras", [])
    if set(values) != names | {"format"}:
        raise ValueError("its fields are not an engine's")
    files = _files(values["files"])
    error, problem = values["error"], values["problem"]
    if problem is not None and not isinstance(problem, str):
        raise ValueError("its problem has the wrong type")
    return EngineRecord(
        id=_text(values, "id"),
        key=EngineKey.from_json(values["key"]),
        model=_text(values, "model"),
        component=_text(values, "component"),
        files=files,
        file_bytes=sum(file.bytes for file in files),
        build_seconds=_number(values, "build_seconds"),
        seconds_per_call=_number(values, "seconds_per_call"),
        pytorch_seconds_per_call=_number(values, "pytorch_seconds_per_call"),
        error=math.nan if error is None else _number(values, "error"),
        tolerance=_number(values, "tolerance"),
        verified=_switch(values, "verified"),
        detail=_text(values, "detail"),
        built_at=_number(values, "built_at"),
        last_used=_number(values, "last_used"),
        pinned=_switch(values, "pinned"),
        problem=problem,
        loras=_loras(values["loras"]),
    )


def _loras(value: object) -> tuple[LoraUse, ...]:
    if not isinstance(value, list):
        raise ValueError("its LoRAs have the wrong type")
    return tuple(LoraUse.from_json(entry) for entry in value)


def _files(value: object) -> tuple[EngineFile, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("its files have the wrong type")
    files = []
    for entry in value:
        match entry:
            case {"name": str(name), "bytes": int(size), "sha256": str(sha)} if _SHA256.fullmatch(sha) and size >= 0:
                if not name or name.startswith(".") or re.search(r"[/\\:\0]", name):
                    raise ValueError("it names a file outside its folder")
                files.append(EngineFile(name, size, sha))
            case _:
                raise ValueError("its files have the wrong type")
    return tuple(files)


def _text(values: Mapping[str, Any], name: str) -> str:
    if not isinstance(values[name], str):
        raise ValueError(f"its {name} has the wrong type")
    return str(values[name])


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"its {name} has the wrong type")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"its {name} is no number that it can be")
    return number


def _switch(values: Mapping[str, Any], name: str) -> bool:
    if not isinstance(values[name], bool):
        raise ValueError(f"its {name} has the wrong type")
    return bool(values[name])
