"""Exportable forms of LTX-2's video VAE, see `engines.programs`: decoding a clip, encoding an image."""

from typing import Any

import torch
from torch import nn


class _VaeForm(nn.Module):
    """A part of an `AutoencoderKLLTX2Video`, with the statistics of latents.

    Args:
        vae: its parameters become this form's.
        part: its decoder or encoder.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, vae: Any, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        for name, values in (("mean", vae.latents_mean), ("deviation", vae.latents_std)):
            self.register_buffer(name, values.detach().float().reshape(1, -1, 1, 1, 1))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.part.parameters()).dtype


class VaeClipForm(_VaeForm):
    """The decoder of whole clips, as `vae.PyTorchVideoDecoder` computes it."""

    def __init__(self, vae: Any) -> None:
        super().__init__(vae, vae.decoder)
        self._scale = float(vae.config.scaling_factor)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return frames (n, height, width, 3), float32 in -1 to 1.

        Args:
            z: (1, channels, latent frames, height, width), normalised as the transformer sees them.
        """
        # In float32 also where the form was converted to fewer bits.
        latents = z.float() * self.deviation.float() / self._scale + self.mean.float()
        frames: torch.Tensor = self.part(latents.to(self.dtype))[0].permute(1, 2, 3, 0)
        return frames.float().clamp(-1.0, 1.0)


class VaeImageForm(_VaeForm):
    """The encoder of one image, as `vae.PyTorchImageEncoder` computes it: the mean of the distribution."""

    cache_count = 0

    def __init__(self, vae: Any) -> None:
        super().__init__(vae, vae.encoder)
        self._channels = int(vae.config.latent_channels)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return latents (1, channels, 1, height, width), float32, normalised.

        Args:
            frames: (1, height, width, 3), float32 in -1 to 1.
        """
        pixels = frames.permute(3, 0, 1, 2)[None].to(self.dtype)
        moments: torch.Tensor = self.part(pixels)[:, : self._channels]
        return (moments.float() - self.mean.float()) / self.deviation.float()
