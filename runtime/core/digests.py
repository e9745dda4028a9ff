"""Digests of files (SHA-256), and a file that stores those of weights, so that gigabytes are read for them once."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from runtime.core.cancel import never
from runtime.core.files import replace_file
from runtime.core.untrusted_files import open_file, read_json

_FILE = "weights.json"
_BLOCK = 1 << 20
_THREADS = 8


def sha256(path: Path, check: Callable[[], None] = never) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Args:
        check: called for each block; may raise.

    Raises:
        OSError: if it cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(_BLOCK):
            check()
            digest.update(block)
    return digest.hexdigest()


def file_digests(paths: Sequence[Path], folder: Path | None, check: Callable[[], None] = never) -> list[str]:
    """Return the digests of files; a file is read, at about 1 GB/s, if its path, size or time of modification is new.

    Several files are read at once.

    Args:
        folder: that stores them; `None` to read every file.
        check: called for each block of a file that is read, by any thread; may raise.

    Raises:
        OSError: if a file cannot be read.
    """
    stored = read_stored(folder)
    digests = {path: digest for path in paths if (digest := _stored(stored, path)) is not None}
    unread = [path for path in dict.fromkeys(paths) if path not in digests]
    if unread:
        # The stamp is taken before a file is read: it may change meanwhile.
        stamps = [_stamp(path) for path in unread]
        with ThreadPoolExecutor(_THREADS) as threads:
            digests |= zip(unread, threads.map(partial(sha256, check=check), unread), strict=True)
        _write(
            folder, {str(path.resolve()): [*stamp, digests[path]] for path, stamp in zip(unread, stamps, strict=True)}
        )
    return [digests[path] for path in paths]


def store_digests(digests: Mapping[Path, str], folder: Path) -> None:
    """Store the digests of files that were just verified.

    Raises:
        OSError: if a file does not exist.
    """
    _write(folder, {str(path.resolve()): [*_stamp(path), digest] for path, digest in digests.items()})


def known_digests(paths: Sequence[Path], folder: Path) -> list[str] | None:
    """Return the digests of files if all are stored; reads none of the files.

    Raises:
        OSError: if a file does not exist.
    """
    stored = read_stored(folder)
    entries = [_stored(stored, path) for path in paths]
    digests = [digest for digest in entries if digest is not None]
    return digests if len(digests) == len(entries) else None


def _stored(stored: dict[str, Any], path: Path) -> str | None:
    match stored.get(str(path.resolve())):
        case [size, time, str(digest)] if [size, time] == _stamp(path):
            return digest
    return None


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def read_stored(folder: Path | None) -> dict[str, Any]:
    """Return [size, time of modification, digest] by path; empty if the file is missing or damaged."""
    try:
        value = read_json(folder / _FILE) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(folder: Path | None, new: dict[str, Any]) -> None:
    """Add digests to those that are stored now: other processes may have added some."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _FILE, json.dumps(read_stored(folder) | new).encode())
    except OSError:
        return  # the files are read again next time
