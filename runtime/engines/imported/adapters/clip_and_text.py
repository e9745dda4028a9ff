"""Adapters for a VAE that decodes a whole clip, and for a text encoder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.engines.imported.adapters.common import Exact

if TYPE_CHECKING:
    from runtime.engines.imported.adapters.common import Tensors


@dataclass(frozen=True)
class Denormalised(Exact):
    """Latents as the VAE sees them, for a decoder without the model's mean and deviation inside.

    Attributes:
        mean, std: one number per channel, from the VAE's configuration.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return "latents: the model's mean and deviation put back"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "Costs nothing."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        z = inputs["z"]
        shape = (1, -1, 1, 1, 1)
        return inputs | {"z": z * z.new_tensor(self.std).view(shape) + z.new_tensor(self.mean).view(shape)}


@dataclass(frozen=True)
class ClipFrames(Exact):
    """Frames of a decoder that decodes a whole clip at once: n latent frames are 4(n - 1) + 1 frames.

    The decoder looks back only, so what is added at the end changes nothing before it and is cut off again.

    Attributes:
        order: of the decoder's axes: "bcfhw", "bfchw" or "bfhwc".
        least: latent frames that it takes at least; a shorter clip is filled up with its last.
        per_latent: frames per latent frame.
    """

    order: str
    least: int
    per_latent: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        n = self.per_latent
        filled = f", filled up to {self.least} latent frames" if self.least > 1 else ""
        return f"frames: cut to {n}(n-1)+1 for n latent frames{filled}"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "What is filled up is decoded and thrown away." if self.least > 1 else "Costs nothing."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        z = inputs["z"]
        missing = self.least - z.shape[2]
        if missing <= 0:
            return inputs
        import torch

        return inputs | {"z": torch.cat([z, z[:, :, -1:].expand(-1, -1, missing, -1, -1)], dim=2)}

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        frames = outputs["frames"].permute([self.order.index(axis) for axis in "bfhwc"])[0]
        wanted = self.per_latent * (inputs["z"].shape[2] - 1) + 1
        return outputs | {"frames": frames[:wanted].float().clamp(-1.0, 1.0)}


@dataclass(frozen=True)
class PaddedIds(Exact):
    """Token ids padded under the mask, and embeddings cut back, with zeros in the padding.

    Attributes:
        length: of the engine's sequence; 0 leaves the ids as many as they are.
    """

    length: int

    @property
    def title(self) -> str:
        """See `Adapter`."""
        return f"ids: padded to {self.length} and masked" if self.length else "embeddings: zero in the padding"

    @property
    def cost(self) -> str:
        """See `Adapter`."""
        return "The added tokens are computed and not attended to; nothing is lost."

    def enter(self, inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        if not self.length:
            return inputs
        padded = {}
        for name in ("input_ids", "attention_mask"):
            padded[name] = inputs[name].new_zeros(len(inputs[name]), self.length)
            padded[name][:, : inputs[name].shape[1]] = inputs[name]
        return inputs | padded

    def leave(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """See `Adapter`."""
        mask = inputs["attention_mask"]
        embeds = outputs["embeds"][:, : mask.shape[1]].float()
        return outputs | {"embeds": embeds * mask.unsqueeze(-1).to(embeds)}
