"""What an engine file says of itself: the tensors that it takes and gives. Pure: no torch, no disk."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.core.plan import BACKEND_TITLES
from runtime.core.units import byte_size

# A size that varies.
FREE = -1
# What a free size may be where the file does not say.
MOST = 1 << 30
Sizes = tuple[int, ...]
# The least, best and largest value of one size; a best of 0 means that the file names none.
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Port:
    """One input or output.

    Attributes:
        name: the engine's own.
        dtype: torch's name of its type.
        sizes: one number per axis, `FREE` where it varies.
        ranges: the least, best and largest sizes of each profile; none where the file does not say.
    """

    name: str
    dtype: str
    sizes: Sizes
    ranges: tuple[tuple[Sizes, Sizes, Sizes], ...] = ()

    def span(self, axis: int, profile: int) -> Span:
        """Return what the size of an axis may be in a profile."""
        size = self.sizes[axis]
        if size != FREE:
            return size, size, size
        if not self.ranges:
            return 1, 0, MOST
        low, best, high = (sizes[axis] for sizes in self.ranges[profile])
        return low, best, high

    def __str__(self) -> str:
        """Return "sample (1, 16, any, 45, 80) float16"."""
        sizes = ", ".join("any" if size == FREE else str(size) for size in self.sizes)
        return f"{self.name} ({sizes}) {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """All that is known of an engine file without running it.

    Attributes:
        backend: what runs it: "tensorrt" or "onnxruntime".
        made_by: what wrote the file, as far as it says so.
        inputs, outputs: in the file's order.
        precision: of the arithmetic inside, as far as it can be told: it sets the tolerance of the comparison.
        working_bytes: memory that it needs while it runs, beside its weights; 0 if the file does not say.
        beside: names of the files with weights that belong to it.
    """

    backend: str
    made_by: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    precision: str
    working_bytes: int = 0
    beside: tuple[str, ...] = ()

    @property
    def profiles(self) -> int:
        """How many shape profiles it has; one where it does not say."""
        return max((len(port.ranges) for port in self.inputs), default=0) or 1

    def lines(self) -> list[str]:
        """Return the contract in words, a line each."""
        memory = f", {byte_size(self.working_bytes)} of memory while it runs" if self.working_bytes else ""
        return [
            f"For {BACKEND_TITLES[self.backend]}, made by {self.made_by or 'an unknown program'}{memory}.",
            *(f"takes {port}" for port in self.inputs),
            *(f"gives {port}" for port in self.outputs),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the contract as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Contract":
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: if it is anything else.
        """
        return cls(
            backend=str(value["backend"]),
            made_by=str(value["made_by"]),
            inputs=tuple(_port(port) for port in value["inputs"]),
            outputs=tuple(_port(port) for port in value["outputs"]),
            precision=str(value["precision"]),
            working_bytes=int(value["working_bytes"]),
            beside=tuple(str(name) for name in value["beside"]),
        )


def _port(value: Mapping[str, Any]) -> Port:
    ranges = []
    for low, best, high in value["ranges"]:
        ranges.append((_sizes(low), _sizes(best), _sizes(high)))
    return Port(str(value["name"]), str(value["dtype"]), _sizes(value["sizes"]), tuple(ranges))


def _sizes(value: Any) -> Sizes:
    return tuple(int(size) for size in value)
