"""Reads safetensors files: their headers without torch, checked by the rules of the format; small files completely.

Format (https://huggingface.co/docs/safetensors/index): 8 bytes of length, a JSON object, then the tensors' data, which
they fill without holes and overlaps. No name occurs twice.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.core.untrusted_files import (
    DuplicateNameError,
    TooManyValuesError,
    is_lfs_pointer,
    open_file,
    parse_json,
    read_file,
)

if TYPE_CHECKING:
    import torch

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_AXES = 16
_MAX_NAME_LENGTH = 80
# The limit of the format. LoRAs contain training settings, and models workflows, as text in their metadata.
_MAX_HEADER_BYTES = 100_000_000
# A tensor has about 10; the largest supported model has 1,100 tensors in a file, a LoRA up to about 3,000.
_MAX_VALUES = 200_000
# Bits per element.
_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_Whole = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        dtype: as safetensors names it.
        data_offsets: its first byte and the byte after its last, counted from the start of the data.
    """

    dtype: str
    shape: Annotated[tuple[_Whole, ...], Field(max_length=_MAX_AXES), FailFast()]
    data_offsets: tuple[_Whole, _Whole]

    @property
    def elements(self) -> int:
        """The number of values."""
        return prod(self.shape)


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        tensors: by name, in the order of their data.
        metadata: texts by name.
        start: the byte at which the data starts.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    start: int


_TENSOR = TypeAdapter(StoredTensor)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        ModelError: if the file cannot be read, is truncated, or breaks a rule of the format.
    """
    size, length, data = 0, 0, b""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                data = file.read(length)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if _MAX_HEADER_BYTES < length <= size - _LENGTH_BYTES:
        raise _invalid(path, Fact("safetensors.header_too_long", {"size": length, "most": _MAX_HEADER_BYTES}))
    if len(data) < length or not data:
        raise _damaged(path, size)
    header = _parse(path, data, _LENGTH_BYTES + length)
    if header.start + _end_of_data(path, header.tensors) != size:
        raise _damaged(path, size)
    return header


def read_tensors(path: Path, max_bytes: int) -> tuple[dict[str, "torch.Tensor"], Mapping[str, str]]:
    """Read a small file completely; return its tensors, in memory of their own on the CPU, and its metadata.

    Raises:
        ModelError: see `read_header`; also if the file is larger than `max_bytes`.
    """
    import safetensors.torch

    metadata = read_header(path).metadata
    try:
        # Copies, because tensors in a file have any alignment, and arithmetic may round differently there.
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(read_file(path, max_bytes)).items()}
    except OSError as error:
        raise unreadable(path, error) from error
    except safetensors.SafetensorError as error:  # it has just changed
        raise _damaged(path, path.stat().st_size) from error
    return tensors, metadata


def _parse(path: Path, data: bytes, start: int) -> Header:
    try:
        values = parse_json(data, max_values=_MAX_VALUES)
    except DuplicateNameError as error:
        raise _invalid(path, _tensor_fact("safetensors.duplicate", error.name)) from error
    except TooManyValuesError as error:
        raise _invalid(path, Fact("safetensors.header_too_many", {"most": _MAX_VALUES})) from error
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _invalid(path, Fact("safetensors.header_not_json"))
    metadata = values.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _invalid(path, Fact("safetensors.metadata_invalid"))
    tensors: dict[str, StoredTensor] = {}
    for name, value in values.items():
        # One at a time, because the errors of all together may take hundreds of megabytes.
        try:
            tensors[name] = _TENSOR.validate_python(value)
        except ValidationError as error:
            raise _invalid(path, _tensor_fact("safetensors.tensor_invalid", name)) from error
    in_order = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    return Header(in_order, metadata, start)


def _end_of_data(path: Path, tensors: Mapping[str, StoredTensor]) -> int:
    """Return the number of bytes of all tensors.

    Raises:
        ModelError: if the size of one does not follow from its shape, or there is a hole or an overlap before it.
    """
    end = 0
    for name, tensor in tensors.items():
        first, last = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if bits is None:
            raise _invalid(path, _tensor_fact("safetensors.dtype_unknown", name, dtype=tensor.dtype[:20]))
        if 8 * (last - first) != tensor.elements * bits:
            raise _invalid(path, _tensor_fact("safetensors.tensor_size", name))
        if first != end:
            code = "safetensors.hole" if first > end else "safetensors.overlap"
            raise _invalid(path, _tensor_fact(code, name))
        end = last
    return end


def _tensor_fact(code: str, name: str, **data: str) -> Fact:
    return Fact(code, {"tensor": name[:_MAX_NAME_LENGTH], **data})


def _invalid(path: Path, cause: Fact) -> ModelError:
    return ModelError("model.tensors_invalid", file=f"{path.parent.name}/{path.name}", cause=cause)


def lfs_pointer(path: Path) -> ModelError:
    """Return the error for a file whose content Git has not fetched."""
    return ModelError("model.lfs_pointer", file=f"{path.parent.name}/{path.name}", folder=path.parent)


def unreadable(path: Path, error: Exception) -> ModelError:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return ModelError("model.file_unreadable", file=path.name, path=path, reason=reason)


def _damaged(path: Path, size: int) -> ModelError:
    if is_lfs_pointer(path):
        return lfs_pointer(path)
    return ModelError("model.file_damaged", file=f"{path.parent.name}/{path.name}", size=size)
