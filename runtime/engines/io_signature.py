"""Which tensors an engine takes and gives: written into the engine file when it is built, held to when it runs.

Inductor's libraries read memory without looking at sizes, so a tensor of another shape must never reach one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError

if TYPE_CHECKING:
    import torch

# A size: fixed, or a multiple of a named one.
Size = int | tuple[str, int]
METADATA_KEY = "tandem.edges"
# Beside it: the weights that are handed over, as {name: [dtype, shape]}.
WEIGHTS_KEY = "tandem.weights"
_REMEDY = "Build an engine for this size; PyTorch runs meanwhile."


@dataclass(frozen=True)
class Edge:
    """One input or output: its name, torch dtype's name and sizes."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shape(self, known: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape once the named sizes are known."""
        return tuple(size if isinstance(size, int) else known[size[0]] * size[1] for size in self.sizes)


@dataclass(frozen=True)
class Edges:
    """All inputs in the order of the program's arguments, all outputs, and the range of each named size."""

    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> frozenset[str]:
        """The inputs' names."""
        return frozenset(edge.name for edge in self.inputs)

    def to_text(self) -> str:
        """Return what `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Edges":
        """Read what `to_text` wrote.

        Raises:
            ValueError, KeyError, TypeError: if it is anything else.
        """
        value: Any = json.loads(text)
        return cls(
            tuple(_edge(edge) for edge in value["inputs"]),
            tuple(_edge(edge) for edge in value["outputs"]),
            {str(name): (int(low), int(high)) for name, (low, high) in value["ranges"].items()},
        )

    def fit(
        self, inputs: "Mapping[str, torch.Tensor]", device: "torch.device"
    ) -> "tuple[list[torch.Tensor], dict[str, int]]":
        """Return the inputs in order, contiguous, of the engine's dtypes and on its device, and the named sizes.

        Raises:
            EngineError: if one is missing, too many or of a size that the engine was not built for.
        """
        if set(inputs) != self.names:
            wanted, given = ", ".join(sorted(self.names)), ", ".join(sorted(inputs))
            raise EngineError(f"The engine takes {wanted}; it was given {given}.", "Build the engine anew.")
        known: dict[str, int] = {}
        for edge in self.inputs:
            self._look(edge, tuple(inputs[edge.name].shape), known)
        tensors = [inputs[edge.name].to(device=device, dtype=edge.torch_dtype).contiguous() for edge in self.inputs]
        return tensors, known

    def _look(self, edge: Edge, shape: tuple[int, ...], known: dict[str, int]) -> None:
        if len(shape) != len(edge.sizes):
            raise self._wrong(edge, shape)
        for size, given in zip(edge.sizes, shape, strict=True):
            if isinstance(size, int):
                fits = given == size
            else:
                name, multiple = size
                low, high = self.ranges[name]
                count, rest = divmod(given, multiple)
                fits = not rest and low <= count <= high and known.setdefault(name, count) == count
            if not fits:
                raise self._wrong(edge, shape)

    def _wrong(self, edge: Edge, shape: tuple[int, ...]) -> EngineError:
        wanted = "×".join(self._words(size) for size in edge.sizes)
        return EngineError(f"The engine takes {edge.name} of {wanted}, not {'×'.join(map(str, shape))}.", _REMEDY)

    def _words(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        low, high = self.ranges[size[0]]
        return f"({low * size[1]} to {high * size[1]})"


def _edge(value: Any) -> Edge:
    sizes = tuple(size if isinstance(size, int) else (str(size[0]), int(size[1])) for size in value["sizes"])
    return Edge(str(value["name"]), str(value["dtype"]), sizes)
