"""The header of a safetensors file, and whether the file is complete. Loads no tensor.

Format: https://huggingface.co/docs/safetensors/index (8 bytes of length, JSON, tensors).
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def tensor_sizes(path: Path) -> dict[str, int]:
    """Return the number of weights of each tensor in a safetensors file, by name.

    Raises:
        ModelError: if the file cannot be read, is truncated or is not safetensors.
    """
    header, start = read_header(path)
    size = path.stat().st_size
    try:
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if start + end != size:
            raise _damaged(path, size)
        return {name: prod(tensor["shape"]) for name, tensor in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(path, size) from error


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header as parsed JSON, and the byte at which its tensors start.

    Raises:
        ModelError: if the file cannot be read or does not start with a header.
    """
    size = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise _damaged(path, size)
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError("model.file_unreadable", file=path.name, path=path, reason=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, size) from error
    if not isinstance(header, dict):
        raise _damaged(path, size)
    return header, _LENGTH_BYTES + length


def _damaged(path: Path, size: int) -> ModelError:
    return ModelError("model.file_damaged", file=f"{path.parent.name}/{path.name}", size=size)
