"""Exportable forms of HunyuanVideo's VAE, see `engines.programs`; FramePack's are the same."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MiddleBlock(nn.Module):
    """A `HunyuanVideoMidBlock3D` whose attention needs no mask: each frame attends to itself and those before it.

    diffusers' mask has a value for each two positions of the frames: 36 GB for five latent frames at 1280×720.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `HunyuanVideoMidBlock3D.forward`; (1, channels, frames, height, width)."""
        first, *rest = self.block.resnets
        x = first(x)
        for attention, resnet in zip(self.block.attentions, rest, strict=True):
            x = resnet(x if attention is None else _attended(attention, x))
        return x


def _attended(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a `diffusers.models.attention_processor.Attention` with a causal mask makes of frames."""
    tokens = x.permute(0, 2, 3, 4, 1).flatten(1, 3)
    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    q, k, v = (
        project(normed).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for project in (attention.to_q, attention.to_k, attention.to_v)
    )
    size = x.shape[3] * x.shape[4]
    frames = [
        F.scaled_dot_product_attention(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end])
        for end in range(size, tokens.shape[1] + 1, size)
    ]
    out = attention.to_out[0](torch.cat(frames, dim=2).transpose(1, 2).flatten(2)) + tokens
    result: torch.Tensor = out.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)
    return result


class VaeGroupForm(nn.Module):
    """The decoder of a `diffusers.AutoencoderKLHunyuanVideo`, for one group of latent frames.

    Args:
        vae: its parameters become this form's.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self._scale = 1.0 / float(vae.config.scaling_factor)
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder
        self.decoder.mid_block = MiddleBlock(vae.decoder.mid_block)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return frames (n, height, width, 3), float32, some values beyond -1 and 1.

        Args:
            z: (1, channels, latent frames, height, width), normalised as the transformer sees them.
        """
        z = (z * self._scale).to(self.post_quant_conv.weight.dtype)
        decoded: torch.Tensor = self.decoder(self.post_quant_conv(z))
        return decoded[0].permute(1, 2, 3, 0).float()


class VaeImageForm(nn.Module):
    """The encoder of a `diffusers.AutoencoderKLHunyuanVideo`, for one image.

    Args:
        vae: its parameters become this form's.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self._scale = float(vae.config.scaling_factor)
        self.quant_conv, self.encoder = vae.quant_conv, vae.encoder
        self.encoder.mid_block = MiddleBlock(vae.encoder.mid_block)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return means and standard deviations of latents as the transformer sees them, one after the other.

        Args:
            frames: (1, height, width, 3), float32 in -1 to 1.

        Returns:
            (1, 2 * channels, 1, height, width), float32. Source: `DiagonalGaussianDistribution`.
        """
        pixels = frames.permute(0, 3, 1, 2).unsqueeze(2).to(self.quant_conv.weight.dtype)
        mean, log_variance = self.quant_conv(self.encoder(pixels)).float().chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        return torch.cat([mean, deviation], dim=1) * self._scale
