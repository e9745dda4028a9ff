"""Reads files whose content is not trusted: regular files only, up to a size, and JSON without excesses.

Opening a FIFO would wait for a writer, and a device such as /dev/zero has no end.
"""

import codecs
import errno
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from pydantic_core import from_json

# A configuration has a few kilobytes, the names of all tensors of a large model 200 KB. Parsed JSON takes up to about
# 30 times its size.
MAX_JSON_BYTES = 4 << 20
# Enough for the manifest of 5,000 downloaded files. Many small values take far more time and memory than their text:
# garbage collection visits each list and object several times, and a validation error may describe each value.
MAX_JSON_VALUES = 20_000
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"')
# The first line of the file that Git stores in place of a large one.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Some editors begin UTF-8 with it.
BYTE_ORDER_MARK = codecs.BOM_UTF8


class NotRegularFileError(OSError):
    """A path that is a folder, FIFO, socket or device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class TooManyValuesError(ValueError):
    """JSON with more values than are accepted."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most} values")


class DuplicateNameError(ValueError):
    """A JSON object that names something twice."""

    def __init__(self, name: str) -> None:
        super().__init__("a name occurs twice")
        self.name = name


def open_file(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: if it cannot be opened, or is a link that is not followed; `NotRegularFileError` if it is something
            else than a file.
        ValueError: if the path has a null byte.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    flags |= 0 if follow_links else getattr(os, "O_NOFOLLOW", 0)
    # Windows opens no folders.
    if path.is_dir():
        raise NotRegularFileError(path)
    number = os.open(path, flags)
    if not S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise NotRegularFileError(path)
    return os.fdopen(number, "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: if it cannot be read or is larger than `max_bytes`; see `open_file`.
        ValueError: if the path has a null byte.
    """
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data


def parse_json(data: bytes, *, infinite: bool = False, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the value of JSON.

    Args:
        infinite: whether NaN, infinities (which JSON does not have) and numbers such as 1e999 are accepted.
        max_values: the most values of its objects and lists, all together.

    Raises:
        ValueError: if it is not JSON in UTF-8, or nested more than 200 deep; `DuplicateNameError` if an object has two
            values of one name; `TooManyValuesError`.
    """
    # Before parsing, because each list or object takes long to parse.
    if _brackets(data) > max_values and _brackets(_TEXTS.sub(b"", data)) > max_values:
        raise TooManyValuesError(max_values)
    try:
        json.loads(data, object_pairs_hook=_refuse_duplicates, parse_float=None if infinite else _refuse_infinite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    value = from_json(data, allow_inf_nan=infinite)
    if _count_values(value) > max_values:
        raise TooManyValuesError(max_values)
    return value


def read_json(path: Path, *, infinite: bool = False, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file, which may begin with a byte order mark; see `read_file` and `parse_json`.

    Raises:
        OSError: if it cannot be read.
        ValueError: if its content is not accepted.
    """
    return parse_json(read_file(path, max_bytes).removeprefix(BYTE_ORDER_MARK), infinite=infinite)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is only the pointer that Git stores in place of a large one."""
    try:
        with open_file(path) as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except (OSError, ValueError):
        return False


def _brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _count_values(value: Any) -> int:
    """Return the number of values in all objects and lists of a value."""
    count, pending = 0, [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict | list):
            values = inner.values() if isinstance(inner, dict) else inner
            count += len(values)
            pending += [item for item in values if isinstance(item, dict | list)]
    return count


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise DuplicateNameError(Counter(name for name, _ in pairs).most_common(1)[0][0])


def _refuse_infinite(text: str) -> None:
    if not math.isfinite(float(text)):
        raise ValueError("a number is too large")
