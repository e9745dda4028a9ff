"""Reads ncnn's models: a text with the layers (`.param`) and a file with their weights (`.bin`). Imports no torch.

Only layers of convolutional networks are read. Nothing is computed: weights are returned as places in the file, from
which they are loaded as those of other formats are.

Format: https://github.com/Tencent/ncnn/wiki/param-and-model-file-structure
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.core.untrusted_files import open_file, read_file
from runtime.models.stored_weights import FileTensor
from runtime.models.tensor_files import unreadable

_MAGIC = b"7767517"
# The published upscalers have 120 kB and 1,000 layers.
_MAX_TEXT_BYTES = 1 << 20
_MAX_LAYERS = 10_000
_MAX_BLOBS = 16
_MAX_NAME_LENGTH = 80
_MAX_CHANNELS, _MAX_KERNEL = 8_192, 11
# What a layer's weights begin with, and the type and bytes of each value after it.
_FLAGS: Mapping[int, tuple[str, int]] = {0x01306B47: ("F16", 2), 0: ("F32", 4)}
_FLAG_BYTES = 4
_LAYERS = frozenset(
    {"Input", "Split", "Convolution", "PReLU", "Concat", "Eltwise", "BinaryOp", "Interp", "PixelShuffle"}
)
# Numbers of a convolution's parameters; others would move the kernel.
_CHANNELS, _KERNEL, _PADDING, _HAS_BIAS, _VALUES = 0, 1, 4, 5, 6
_DILATION, _STRIDE = 2, 3
_INT8 = 8
# Keys of parameters that are lists: -23300 less their number.
_LIST = -23_300
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9}(?:e[+-]\d{1,2})?)?")
_Value = float | tuple[float, ...]


@dataclass(frozen=True)
class NcnnLayer:
    """A layer.

    Attributes:
        kind: ncnn's name of the operation.
        inputs, outputs: names of tensors.
        parameters: by ncnn's numbers.
        weights: "weight" and "bias" of convolutions, "weight" of `PReLU`.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[int, _Value]
    weights: Mapping[str, FileTensor]


def read_ncnn(path: Path) -> list[NcnnLayer]:
    """Return the layers of a model, in the order in which they are computed.

    Args:
        path: the `.param`; the `.bin` is beside it.

    Raises:
        ModelError: if a file cannot be read, is of another format, truncated or too large, or has a layer that is not
            read.
    """
    try:
        text = read_file(path, _MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    lines = text.splitlines()
    if not lines or lines[0].strip() != _MAGIC:
        raise _invalid(path, "ncnn.no_magic")
    layers = [_layer(path, line) for line in lines[2:] if line.strip()]
    counts = lines[1].split() if len(lines) > 1 else []
    if counts[:1] != [str(len(layers)).encode()] or len(layers) > _MAX_LAYERS:
        raise _invalid(path, "ncnn.layers", layers=len(layers), most=_MAX_LAYERS)
    weights = path.with_suffix(".bin")
    try:
        with open_file(weights) as file:
            return _Weights(weights, file).of(layers)
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from error


def _layer(path: Path, line: bytes) -> NcnnLayer:
    """Return the layer of a line: kind, name, numbers of inputs and outputs, their names, and parameters."""
    try:
        kind, _, *rest = line.decode().split()
        inputs, outputs = int(rest[0]), int(rest[1])
        if not (0 <= inputs <= _MAX_BLOBS and 0 <= outputs <= _MAX_BLOBS):
            raise ValueError(inputs, outputs)
        names, entries = rest[2 : 2 + inputs + outputs], rest[2 + inputs + outputs :]
        if len(names) < inputs + outputs:
            raise ValueError(names)
        parameters = dict(map(_parameter, entries))
    except (ValueError, IndexError) as error:
        raise _invalid(path, "ncnn.layer_malformed", line=ascii(line[:_MAX_NAME_LENGTH])) from error
    if kind not in _LAYERS:
        raise _invalid(path, "ncnn.layer_unknown", kind=kind[:_MAX_NAME_LENGTH], known=sorted(_LAYERS))
    return NcnnLayer(kind, tuple(names[:inputs]), tuple(names[inputs:]), parameters, {})


def _parameter(entry: str) -> tuple[int, _Value]:
    """Return number and value of a parameter: `1=3`, or for a list `-23310=1,2.0e-01`, its length first."""
    key, value = entry.split("=")
    numbers = value.split(",")
    if not all(map(_NUMBER.fullmatch, numbers)):
        raise ValueError(entry)
    number = int(key)
    if number > _LIST:
        return number, float(value)
    if len(numbers) != int(numbers[0]) + 1:
        raise ValueError(entry)
    return _LIST - number, tuple(map(float, numbers[1:]))


class _Weights:
    """The weights in a `.bin`, which follow one another in the order of the layers."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size, self._offset = os.fstat(file.fileno()).st_size, 0

    def of(self, layers: list[NcnnLayer]) -> list[NcnnLayer]:
        """Return layers with their weights.

        Raises:
            ModelError: if a shape is out of its limits, or the file has other weights, fewer or more.
        """
        with_weights = [
            NcnnLayer(layer.kind, layer.inputs, layer.outputs, layer.parameters, self._weights(layer))
            for layer in layers
        ]
        if self._offset != self._size:
            raise _invalid(self._path, "ncnn.more_weights", size=self._size, read=self._offset)
        return with_weights

    def _weights(self, layer: NcnnLayer) -> dict[str, FileTensor]:
        if layer.kind == "PReLU":
            return {"weight": self._plain(self._whole(layer, _CHANNELS, _MAX_CHANNELS))}
        if layer.kind != "Convolution":
            return {}
        channels, kernel = self._whole(layer, _CHANNELS, _MAX_CHANNELS), self._whole(layer, _KERNEL, _MAX_KERNEL)
        values = self._whole(layer, _VALUES, _MAX_CHANNELS**2 * _MAX_KERNEL**2)
        inputs, rest = divmod(values, channels * kernel**2)
        keeps_size = layer.parameters.get(_PADDING, 0.0) == kernel // 2 and all(
            layer.parameters.get(number, 1.0) == 1.0 for number in (_DILATION, _STRIDE)
        )
        if rest or not keeps_size or layer.parameters.get(_INT8, 0.0) != 0.0:
            raise _invalid(self._path, "ncnn.shape", layer=layer.kind)
        tensors = {"weight": self._flagged((channels, inputs, kernel, kernel))}
        if layer.parameters.get(_HAS_BIAS, 0.0) == 1.0:
            tensors["bias"] = self._plain(channels)
        return tensors

    def _whole(self, layer: NcnnLayer, number: int, most: int) -> int:
        value = layer.parameters.get(number, 0.0)
        if not (isinstance(value, float) and value.is_integer() and 1 <= value <= most):
            raise _invalid(self._path, "ncnn.shape", layer=layer.kind)
        return int(value)

    def _flagged(self, shape: tuple[int, int, int, int]) -> FileTensor:
        """Return the next tensor after a flag that states its type; those of 16 bits are padded to 4 bytes."""
        if self._offset + _FLAG_BYTES > self._size:
            raise self._damaged()
        self._file.seek(self._offset)
        (flag,) = struct.unpack("<I", self._file.read(_FLAG_BYTES))
        if flag not in _FLAGS:
            raise _invalid(self._path, "ncnn.flag", flag=f"{flag:#010x}")
        dtype, nbytes = _FLAGS[flag]
        self._offset += _FLAG_BYTES
        channels, inputs, height, width = shape
        tensor = self._take(dtype, shape, channels * inputs * height * width * nbytes)
        self._offset += -self._offset % _FLAG_BYTES
        return tensor

    def _plain(self, count: int) -> FileTensor:
        return self._take("F32", (count,), 4 * count)

    def _take(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> FileTensor:
        if self._offset + nbytes > self._size:
            raise self._damaged()
        tensor = FileTensor(self._path, dtype, shape, self._offset, nbytes)
        self._offset += nbytes
        return tensor

    def _damaged(self) -> ModelError:
        return ModelError("model.file_damaged", file=self._path.name, size=self._size)


def _invalid(path: Path, code: str, **data: object) -> ModelError:
    return ModelError("model.ncnn_invalid", file=path.name, cause=Fact(code, data))
