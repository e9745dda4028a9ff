"""Files of latents: safetensors and NumPy's, read a few frames at a time. Imports no torch.

Nothing is unpickled. A header is checked before anything is computed, and reads take memory for what they return only.
"""

import os
import tokenize
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from runtime.core.errors import InvalidRequestError, ModelError, first_line
from runtime.core.units import shape_text
from runtime.core.untrusted_files import open_file
from runtime.models.tensor_files import read_header

# Bytes of a value by dtype; bfloat16, which NumPy does not have, is read as its bits.
_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER = 10_000
_AXES = (4, 5)
# A panel of the three channels of a color picture; others are numbers.
RGB = "rgb"
_SUFFIXES = frozenset({".safetensors", ".npy"})
_MOST_PANELS = 16
_NAME = "latents"


class LatentFile(AbstractContextManager["LatentFile"]):
    """An open file of latents, which closes at the end of its `with` block.

    Args:
        path: a `.safetensors` or `.npy` file.

    Attributes:
        dtype: "float32", "float16" or "bfloat16".
        shape: four or five axes.

    Raises:
        InvalidRequestError: if it cannot be read, or contains something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_suffix(path)
        if path.suffix.lower() == ".npy":
            self.dtype, self.shape, self._start = _numpy_header(path)
        else:
            self.dtype, self.shape, self._start = _safetensors_header(path)
        if len(self.shape) not in _AXES:
            raise InvalidRequestError(_NAME, "latents.axes", file=path.name, shape=shape_text(self.shape))
        if min(self.shape) < 1:
            raise InvalidRequestError(_NAME, "latents.none", file=path.name, shape=shape_text(self.shape))
        self._item = np.dtype(_TYPES[self.dtype])
        self._file: BinaryIO = open_file(path)
        size = os.fstat(self._file.fileno()).st_size
        needed = self._start + prod(self.shape) * self._item.itemsize
        if size < needed:
            self._file.close()
            raise InvalidRequestError(_NAME, "latents.cut_short", file=path.name, size=size, needed=needed)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    @property
    def values_are_bits(self) -> bool:
        """Whether `read` returns the bits of bfloat16."""
        return self.dtype == "bfloat16"

    def read(self, index: Sequence[int], start: int, stop: int) -> Any:
        """Return `array[index][start:stop]`, a range of the axis after `index`, in memory of its own.

        Raises:
            InvalidRequestError: if the file has become shorter or cannot be read.
        """
        inner = self.shape[len(index) + 1 :]
        position = 0
        for size, place in zip(self.shape, index, strict=False):
            position = position * size + place
        first = position * self.shape[len(index)] + start
        stride = prod(inner) * self._item.itemsize
        count = (stop - start) * stride
        data = bytearray(count)
        try:
            self._file.seek(self._start + first * stride)
            got = self._file.readinto(data)  # type: ignore[attr-defined] # of a buffered reader
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if got != count:
            raise InvalidRequestError(
                _NAME, "latents.cut_short", file=self.path.name, size=self._file.tell(), needed=self._start + count
            )
        return np.frombuffer(data, self._item).reshape(stop - start, *inner)


def check_suffix(path: Path) -> None:
    """Check that a file has the name of one with latents.

    Raises:
        InvalidRequestError: if it does not.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidRequestError(_NAME, "latents.unknown_type", file=path.name)


def latent_files_in(folder: Path) -> dict[Path, int]:
    """Return the sizes in bytes of the files in a folder that have names of latents, the newest first.

    The result is empty if the folder cannot be read.
    """
    stats: dict[Path, os.stat_result] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):  # it was deleted meanwhile
                if path.suffix.lower() in _SUFFIXES and path.is_file():
                    stats[path] = path.stat()
    newest = sorted(stats, key=lambda path: (-stats[path].st_mtime_ns, path.name))
    return {path: stats[path].st_size for path in newest}


def parse_channels(text: str) -> tuple[str, ...]:
    """Return the panels that text such as "rgb,3" names.

    Raises:
        InvalidRequestError: if it names none, too many, or something else.
    """
    names = tuple(part.strip().lower() for part in text.split(","))
    if not 1 <= len(names) <= _MOST_PANELS or not all(name == RGB or name.isdecimal() for name in names):
        raise InvalidRequestError("channels", "latents.channels_invalid", value=text[:40], most=_MOST_PANELS)
    return names


def _safetensors_header(path: Path) -> tuple[str, tuple[int, ...], int]:
    try:
        header = read_header(path)
    except ModelError as error:
        raise InvalidRequestError(_NAME, "latents.file_invalid", cause=error.fact) from error
    names = list(header.tensors)
    name = _NAME if _NAME in header.tensors else names[0] if len(names) == 1 else ""
    if not name:
        raise InvalidRequestError(_NAME, "latents.which_tensor", file=path.name, count=len(names))
    tensor = header.tensors[name]
    if tensor.dtype not in _SAFETENSORS:
        raise InvalidRequestError(_NAME, "latents.dtype", file=path.name, dtype=tensor.dtype)
    return _SAFETENSORS[tensor.dtype], tensor.shape, header.start + tensor.data_offsets[0]


def _numpy_header(path: Path) -> tuple[str, tuple[int, ...], int]:
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with open_file(path) as file:
            version = np.lib.format.read_magic(file)
            if version not in readers:
                raise ValueError(f"version {version[0]}.{version[1]} of its format is not supported")
            shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER)
            start = file.tell()
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise InvalidRequestError(_NAME, "latents.not_numpy", file=path.name, reason=first_line(error)) from error
    if dtype.hasobject:
        raise InvalidRequestError(_NAME, "latents.pickled", file=path.name)
    dtype_name = next((name for name in ("float32", "float16") if dtype == np.dtype(_TYPES[name])), None)
    if dtype_name is None:
        raise InvalidRequestError(_NAME, "latents.dtype", file=path.name, dtype=str(dtype)[:20])
    if fortran and prod(shape) > 0:
        raise InvalidRequestError(_NAME, "latents.fortran", file=path.name)
    return dtype_name, tuple(map(int, shape)), start


def _unreadable(path: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(_NAME, "latents.unreadable", file=path, reason=error.strerror or str(error))
