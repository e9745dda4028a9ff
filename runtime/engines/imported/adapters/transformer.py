"""Adapters for a transformer: its timestep, its text, and rows that it does not read or does not give."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.engines.imported.adapters.common import Exact

if TYPE_CHECKING:
    import torch

    from runtime.engines.imported.adapters.common import Tensors

TEXT_MASK = "text_mask"
TRAINING_STEPS = 1000.0
_PARTS = 3
_PER_TOKEN = 2


@dataclass(frozen=True)
class Timestep(Exact):
    """The timestep in another shape, rounded to a whole number where the engine takes no other.

    Attributes:
        axes: 0 for a scalar, 1 for one value, 2 for one value per token.
        whole: whether the engine takes whole numbers.
        patch: frames, rows and columns of a token, for one value per token.
        count: how many clips the engine computes at once, one value for each.
    """

    axes: int
    whole: bool
    patch: tuple[int, int, int]
    count: int = 1

    @property
    def title(self) -> str:
        """See `Adapter`."""
        shape = ("a scalar", "one value", "one value per token")[self.axes]
        return f"timestep: {shape}{', whole numbers' if self.whole else ''}"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "Costs nothing: this scheduler's timesteps are whole numbers." if self.whole else "Costs nothing."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        timestep = inputs["timestep"].reshape(-1)[:1]
        if self.whole:
            timestep = timestep.round()
        if self.axes == 0:
            timestep = timestep.reshape(())
        elif self.axes == _PER_TOKEN:
            tokens = 1
            for size, patch in zip(inputs["latents"].shape[-_PARTS:], self.patch, strict=True):
                tokens *= size // patch
            timestep = timestep.expand(self.count, tokens)
        else:
            timestep = timestep.expand(self.count)
        return inputs | {"timestep": timestep}


@dataclass(frozen=True)
class RepeatedText(Exact):
    """A longer text sequence filled with the whole text several times.

    A transformer that attends to text without positions weighs a token that occurs n times n times as much; if all do,
    padding included, nothing changes. Zeros would change it: padding is attended to, and more of it takes attention
    from the words. Measured along a clip of diorama, 512 tokens made 4,096: with zeros the
    velocity is 4 % to 48 % off, with repeats 1e-6.

    Attributes:
        times: how often the model's own sequence fits into the engine's.
    """

    times: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return f"text: repeated {self.times} times, which the attention cannot tell from once"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return f"Cross-attention works on {self.times} times as many tokens; nothing is lost."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return inputs | {"text_embeds": inputs["text_embeds"].repeat(1, self.times, 1)}


@dataclass(frozen=True)
class MaskedText(Exact):
    """A text sequence padded with zeros that the engine's mask keeps from being attended to.

    Attributes:
        length: of the engine's sequence; 0 leaves the text as long as it is.
    """

    length: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return f"text: padded to {self.length} tokens and masked" if self.length else "text: a mask that keeps all"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "The added tokens are computed and not attended to; nothing is lost."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        text = inputs["text_embeds"]
        batch, given, width = text.shape
        length = self.length or given
        padded, mask = text.new_zeros(batch, length, width), text.new_zeros(batch, length)
        padded[:, :given], mask[:, :given] = text, 1.0
        return inputs | {"text_embeds": padded, TEXT_MASK: mask}


@dataclass(frozen=True)
class UnreadRows(Exact):
    """Rows and columns that the engine wants and never reads: patches of two leave the 45th of 45 rows over.

    The clip is made on the grid of what is read, so nothing is lost.

    Attributes:
        rows, columns: how many.
    """

    rows: int
    columns: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return f"latents: {_rows(self.rows, self.columns)} added that the engine takes and does not read"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "Costs nothing: the size is chosen so that no row of the clip is lost."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return inputs | {"latents": _extend(inputs["latents"], self.rows, self.columns)}

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        height, width = inputs["latents"].shape[-2:]
        return outputs | {"velocity": outputs["velocity"][..., :height, :width]}


@dataclass(frozen=True)
class RestoredRows:
    """Rows and columns that the engine leaves out, restored from their neighbours.

    The velocity is noise minus clean latents, and its noise differs from row to row, so the neighbour's velocity is of
    no use. Its clean latents are: they vary slowly. Rectified flow has x = (1 - s)·clean + s·noise with s = t / 1000,
    so clean = x - s·velocity for the last row that is there, and velocity = (x - clean) / s for the one that is not.
    Measured along a clip of diorama: the row's clean latents are 13 % to 16 % off, its velocity 10 % at the first step
    and 61 % at the last; the neighbour's velocity would be 84 % off at every step.

    Attributes:
        rows, columns: how many.
    """

    rows: int
    columns: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return f"velocity: {_rows(self.rows, self.columns)} left out by the engine, restored from the clean neighbours"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "The restored edge repeats its neighbour: its clean latents are about 15 % off, the rest is untouched."

    @property
    def exact(self) -> bool:
        """See `Adapter`."""
        return False

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        return inputs

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        velocity, latents = outputs["velocity"].float(), inputs["latents"].float()
        height, width = velocity.shape[-2:]
        sigma = (inputs["timestep"].reshape(-1)[:1].float() / TRAINING_STEPS).to(latents.device)
        clean = latents[..., :height, :width] - sigma * velocity
        restored = (latents - _extend(clean, self.rows, self.columns)) / sigma
        restored[..., :height, :width] = velocity
        return outputs | {"velocity": restored}


def _rows(rows: int, columns: int) -> str:
    words = [(rows, "row"), (columns, "column")]
    return " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in words if count)


def _extend(tensor: "torch.Tensor", rows: int, columns: int) -> "torch.Tensor":
    """Repeat the last row and column."""
    import torch

    if rows:
        tensor = torch.cat([tensor, tensor[..., -1:, :].expand(*tensor.shape[:-2], rows, -1)], dim=-2)
    if columns:
        tensor = torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], columns)], dim=-1)
    return tensor
