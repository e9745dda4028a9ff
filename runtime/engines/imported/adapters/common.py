"""What every adapter is, and those that every kind of engine may need: names, types, batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


class Adapter(Protocol):
    """One bridge."""

    @property
    def title(self) -> str:
        """What it does, a clause."""
        ...

    @property
    def cost(self) -> str:
        """What that costs, a sentence."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the result stays what PyTorch computes, up to rounding."""
        ...

    def enter(self, inputs: "Tensors") -> "Tensors":
        """Return the inputs, changed."""
        ...

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """Return the outputs, changed.

        Args:
            inputs: as `enter` was given them.
        """
        ...


@dataclass(frozen=True)
class Exact:
    """An adapter that changes nothing of what is computed."""

    @property
    def exact(self) -> bool:
        """See `Adapter`."""
        return True

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return inputs

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return outputs


@dataclass(frozen=True)
class Names(Exact):
    """Names of the program to those of the engine.

    Attributes:
        inputs, outputs: (program's, engine's).
    """

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return "names: " + ", ".join(f"{ours} is {theirs}" for ours, theirs in (*self.inputs, *self.outputs))

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "Costs nothing."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return {theirs: inputs[ours] for ours, theirs in self.inputs}

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return {ours: outputs[theirs] for ours, theirs in self.outputs}


@dataclass(frozen=True)
class Types(Exact):
    """Types at the edges: the program's are float32.

    Attributes:
        inputs: (program's name, torch's name of the engine's type).
        outputs: names of what is not float32 already.
    """

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return "types: " + ", ".join(f"{name} {dtype}" for name, dtype in (*self.inputs, *self.outputs))

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "Values are rounded at the engine's edge; the measured error includes it."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        import torch

        return inputs | {name: inputs[name].to(getattr(torch, dtype)) for name, dtype in self.inputs}

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return outputs | {name: outputs[name].float() for name, _ in self.outputs}


@dataclass(frozen=True)
class Batch(Exact):
    """As many clips a call as the engine takes, whatever the batch that comes in.

    Attributes:
        size: of the engine's batch.
    """

    size: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        if self.size == 1:
            return "guidance: two calls, one with the prompt and one without"
        return f"batch: the engine computes {self.size} a call, one is wanted"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        if self.size == 1:
            return "As in PyTorch here: a guided step runs the transformer twice."
        return f"A call costs {self.size} times what one clip needs."

    def split(self, inputs: "Tensors") -> list["Tensors"]:
        """Return the inputs of each call, the last filled up with repeats."""
        import torch

        count = max(len(tensor) for tensor in inputs.values())
        if count == self.size:
            return [inputs]
        calls = []
        for start in range(0, count, self.size):
            chosen = torch.arange(start, start + self.size).clamp(max=count - 1)
            calls.append(
                {
                    name: tensor.index_select(0, chosen.to(tensor.device)) if len(tensor) == count else tensor
                    for name, tensor in inputs.items()
                }
            )
        return calls

    def join(self, calls: Sequence["Tensors"], count: int) -> "Tensors":
        """Return the first `count` of all calls' outputs."""
        import torch

        return {name: torch.cat([call[name] for call in calls])[:count] for name in calls[0]}
