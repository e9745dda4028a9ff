"""The input and output tensors of an engine: stored in the engine file when it is built, checked on every call.

Inductor's libraries read memory without checking sizes, so a tensor of another shape must never reach one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError

if TYPE_CHECKING:
    import torch

# The size of an axis: fixed, or (name, factor) for a multiple of a named size.
Size = int | tuple[str, int]
METADATA_KEY = "tandem.edges"
# The metadata entry with the weights that a session must supply, as {name: [dtype, shape]}.
WEIGHTS_KEY = "tandem.weights"


@dataclass(frozen=True)
class TensorSignature:
    """Name, torch dtype (by name) and sizes of one input or output."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shape(self, named_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given values of the named sizes."""
        return tuple(size if isinstance(size, int) else named_sizes[size[0]] * size[1] for size in self.sizes)


@dataclass(frozen=True)
class IOSignature:
    """All inputs in the order of the program's arguments, all outputs, and the range of each named size."""

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> frozenset[str]:
        """The inputs' names."""
        return frozenset(tensor.name for tensor in self.inputs)

    def to_text(self) -> str:
        """Return the signature as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "IOSignature":
        """Parse the result of `to_text`.

        Raises:
            ValueError, KeyError, TypeError: if it is anything else.
        """
        value: Any = json.loads(text)
        return cls(
            tuple(_tensor(tensor) for tensor in value["inputs"]),
            tuple(_tensor(tensor) for tensor in value["outputs"]),
            {str(name): (int(low), int(high)) for name, (low, high) in value["ranges"].items()},
        )

    def convert(
        self, inputs: "Mapping[str, torch.Tensor]", device: "torch.device"
    ) -> "tuple[list[torch.Tensor], dict[str, int]]":
        """Return the inputs in order, contiguous, with the engine's dtypes and on its device; and the named sizes.

        Raises:
            EngineError: if the names differ, or a shape is one that the engine was not built for.
        """
        if set(inputs) != self.names:
            raise EngineError("engine.other_inputs", expected=sorted(self.names), given=sorted(inputs))
        named_sizes: dict[str, int] = {}
        for tensor in self.inputs:
            self._check(tensor, tuple(inputs[tensor.name].shape), named_sizes)
        converted = [inputs[one.name].to(device=device, dtype=one.torch_dtype).contiguous() for one in self.inputs]
        return converted, named_sizes

    def _check(self, tensor: TensorSignature, shape: tuple[int, ...], named_sizes: dict[str, int]) -> None:
        """Raise if a shape does not match; collect the values of named sizes."""
        matches = len(shape) == len(tensor.sizes)
        for size, given in zip(tensor.sizes, shape, strict=False):
            if isinstance(size, int):
                matches &= given == size
            else:
                name, factor = size
                low, high = self.ranges[name]
                count, rest = divmod(given, factor)
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


def _tensor(value: Any) -> TensorSignature:
    sizes = tuple(size if isinstance(size, int) else (str(size[0]), int(size[1])) for size in value["sizes"])
    return TensorSignature(str(value["name"]), str(value["dtype"]), sizes)
