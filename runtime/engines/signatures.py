"""Signatures: the input and output tensors of an engine, stored in its file and checked on every call."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from runtime.core.errors import EngineError

# Keys of an engine file's metadata: for its `IOSignature`, and for {name: [dtype, shape]} of the weights that a session
# must supply.
METADATA_KEY = "tandem.edges"
WEIGHTS_KEY = "tandem.weights"

# The size of an axis: fixed, or (name, factor) for a multiple of a named size.
Size = int | tuple[str, int]
# The shapes of all inputs by name, at a profile's minimum, optimum and maximum.
Shapes = tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class TensorSignature:
    """Name, torch dtype (by name) and sizes of one input or output."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shape(self, named_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given values of the named sizes."""
        return tuple(size if isinstance(size, int) else named_sizes[size[0]] * size[1] for size in self.sizes)


@dataclass(frozen=True)
class IOSignature:
    """The input and output tensors of an engine: stored in the engine file, checked on every call.

    Inductor's libraries read memory without checking sizes, so a tensor of another shape must never reach one.

    Attributes:
        inputs: in the order of the program's arguments.
        outputs: in the order in which the program returns them.
        ranges: minimum and maximum of each named size.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> frozenset[str]:
        """The inputs' names."""
        return frozenset(tensor.name for tensor in self.inputs)

    def to_text(self) -> str:
        """Return the signature as JSON."""
        return _SIGNATURE.dump_json(self).decode()

    @classmethod
    def from_text(cls, text: str) -> "IOSignature":
        """Parse the result of `to_text`.

        Raises:
            ValueError: if the text is invalid.
        """
        return _SIGNATURE.validate_json(text)

    def convert(
        self, inputs: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Return the inputs in order, contiguous, with the engine's dtypes and on its device, and the named sizes.

        Raises:
            EngineError: if the names differ, or a shape is one that the engine was not built for.
        """
        if set(inputs) != self.names:
            raise EngineError("engine.other_inputs", expected=sorted(self.names), given=sorted(inputs))
        named_sizes: dict[str, int] = {}
        for tensor in self.inputs:
            self._check(tensor, tuple(inputs[tensor.name].shape), named_sizes)
        converted = [
            inputs[entry.name].to(device=device, dtype=entry.torch_dtype).contiguous() for entry in self.inputs
        ]
        return converted, named_sizes

    def _check(self, tensor: TensorSignature, shape: tuple[int, ...], named_sizes: dict[str, int]) -> None:
        """Raise an `EngineError` if a shape does not match; add its named sizes to `named_sizes`."""
        matches = len(shape) == len(tensor.sizes)
        for size, length in zip(tensor.sizes, shape, strict=False):
            if isinstance(size, int):
                matches &= length == size
            else:
                name, factor = size
                low, high = self.ranges[name]
                count, rest = divmod(length, factor)
                matches &= not rest and low <= count <= high and named_sizes.setdefault(name, count) == count
        if not matches:
            expected = "×".join(self._size_text(size) for size in tensor.sizes)
            given_text = "×".join(map(str, shape))
            raise EngineError("engine.other_shape", tensor=tensor.name, expected=expected, given=given_text)

    def _size_text(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        low, high = self.ranges[size[0]]
        return f"({low * size[1]} to {high * size[1]})"


_SIGNATURE = TypeAdapter(IOSignature)
