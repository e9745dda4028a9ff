"""Reads the headers of GGUF files without torch, with a limit on every count.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): "GGUF", version, the numbers of tensors and of
metadata, the metadata, then name, axes (the fastest first), type and offset of each tensor, and the tensors' data.
ComfyUI's converter stores tensors of more than four axes flattened, with the original shape in the metadata; other
files hold them with five axes.
"""

import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.core.untrusted_files import is_lfs_pointer, open_file
from runtime.models.tensor_files import lfs_pointer, unreadable

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_SHAPE_OF = "comfy.gguf.orig_shape."
# Wan's files have about 1,100 tensors and 10 entries of metadata.
_MAX_TENSORS = 20_000
_MAX_METADATA = 10_000
_MAX_HEADER_BYTES = 64 << 20
_MAX_TEXT = 1 << 16
_MAX_AXES = 5
_MAX_NAME_LENGTH = 80
_STRING, _ARRAY = 8, 9
# struct's codes of the metadata's types.
_NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class Type(NamedTuple):
    """A type of tensors: its name, and how many bytes a block of how many values takes."""

    name: str
    block: int
    nbytes: int


# By the number in files. Types that PyTorch cannot dequantize here are missing.
TYPES: Mapping[int, Type] = {
    number: Type(name, block, nbytes)
    for number, name, block, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (20, "IQ4_NL", 32, 18), (23, "IQ4_XS", 256, 136),
    )
}  # fmt: skip


class GgufTensor(NamedTuple):
    """One tensor: its type's name, its shape (the fastest axis last), its first byte in the file and its bytes."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_gguf_header(path: Path) -> dict[str, GgufTensor]:
    """Return the tensors of a GGUF file by name.

    Raises:
        ModelError: if the file cannot be read, is truncated or breaks a rule of the format, or has a tensor of a type
            that is not in `TYPES`.
    """
    try:
        with open_file(path) as file:
            return _Reader(path, file).tensors()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def tensors(self) -> dict[str, GgufTensor]:
        if self._take(len(MAGIC)) != MAGIC:
            if is_lfs_pointer(self._path):
                raise lfs_pointer(self._path)
            raise self._invalid("gguf.no_magic")
        version, count, metadata = self._number("I"), self._number("Q"), self._number("Q")
        if version not in _VERSIONS:
            raise self._invalid("gguf.version", version=version)
        if count > _MAX_TENSORS or metadata > _MAX_METADATA:
            raise self._invalid("gguf.too_many", most=_MAX_TENSORS)
        values = dict(self._entry() for _ in range(metadata))
        entries: dict[str, tuple[Type, tuple[int, ...], int]] = {}
        for _ in range(count):
            name, kind, shape, offset = self._tensor(values)
            if name in entries:
                raise self._invalid("safetensors.duplicate", tensor=name[:_MAX_NAME_LENGTH])
            entries[name] = kind, shape, offset
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not (isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT):
            raise self._invalid("gguf.alignment")
        return self._placed(entries, -(-self._file.tell() // alignment) * alignment, alignment)

    def _placed(
        self, entries: Mapping[str, tuple[Type, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors, whose data neither overlap nor end after the file."""
        placed, end = {}, 0
        for name, (kind, shape, offset) in sorted(entries.items(), key=lambda item: item[1][2]):
            nbytes = prod(shape) // kind.block * kind.nbytes
            short_name = name[:_MAX_NAME_LENGTH]
            if offset < end:
                raise self._invalid("safetensors.overlap", tensor=short_name)
            if offset % alignment:
                raise self._invalid("gguf.alignment")
            end = offset + nbytes
            if start + end > self._size:
                raise self._damaged()
            placed[name] = GgufTensor(kind.name, shape, start + offset, nbytes)
        return placed

    def _tensor(self, values: Mapping[str, Any]) -> tuple[str, Type, tuple[int, ...], int]:
        name, axes = self._text(), self._number("I")
        short_name = name[:_MAX_NAME_LENGTH]
        if not 0 < axes <= _MAX_AXES:
            raise self._invalid("safetensors.tensor_invalid", tensor=short_name)
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            raise self._invalid("gguf.type_unknown", tensor=short_name, type=number)
        # Also limits the product: no tensor is larger than the file.
        if prod(shape) * kind.nbytes > self._size * kind.block:
            raise self._damaged()
        if shape[-1] % kind.block:
            raise self._invalid("safetensors.tensor_size", tensor=short_name)
        original = values.get(f"{_SHAPE_OF}{name}")
        if original is not None:
            if not (isinstance(original, tuple) and prod(original) == prod(shape) and len(original) <= _MAX_AXES):
                raise self._invalid("safetensors.tensor_size", tensor=short_name)
            shape = original
            # The rows of a matrix are whole blocks: only then can they be dequantized apart.
            if len(shape) == 2 and shape[-1] % kind.block:  # noqa: PLR2004
                raise self._invalid("safetensors.tensor_size", tensor=short_name)
        return name, kind, shape, offset

    def _entry(self) -> tuple[str, Any]:
        """Return a name and its value: a number, or a few numbers; `None` for anything else."""
        return self._text(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            self._skip(self._number("Q"))
            return None
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            code = _NUMBERS.get(inner)
            if code is not None:
                if 0 < count <= _MAX_AXES and code not in "fd?":
                    return tuple(self._number(code) for _ in range(count))
                self._skip(count * struct.calcsize(f"<{code}"))
            elif inner == _STRING and count <= _MAX_HEADER_BYTES:
                for _ in range(count):
                    self._skip(self._number("Q"))
            else:
                raise self._invalid("gguf.metadata_invalid")
            return None
        code = _NUMBERS.get(kind)
        if code is None:
            raise self._invalid("gguf.metadata_invalid")
        return self._number(code)

    def _text(self) -> str:
        length = self._number("Q")
        if length > _MAX_TEXT:
            raise self._invalid("gguf.metadata_invalid")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._invalid("gguf.metadata_invalid") from error

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > min(self._size, _MAX_HEADER_BYTES):
            raise self._truncated()
        self._file.seek(count, os.SEEK_CUR)

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if self._file.tell() + count <= _MAX_HEADER_BYTES else b""
        if len(data) < count:
            raise self._truncated()
        return data

    def _truncated(self) -> ModelError:
        if self._size > _MAX_HEADER_BYTES:
            return self._invalid("safetensors.header_too_long", size=self._size, most=_MAX_HEADER_BYTES)
        return self._damaged()

    def _damaged(self) -> ModelError:
        return ModelError("model.file_damaged", file=self._path.name, size=self._size)

    def _invalid(self, code: str, **data: Any) -> ModelError:
        return ModelError("model.gguf_invalid", file=self._path.name, cause=Fact(code, data))
