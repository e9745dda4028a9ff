"""The exportable form of decoders of single frames.

The decoder of a diffusers `AutoencoderDC` normalizes over channels, for which it moves them to the last axis and back.
`ChannelsFirstDecoder` computes the same where they are: its levels of full size need no transposed copies.
"""

from typing import Any

import torch
from torch import nn


class ChannelNorm(nn.Module):
    """A diffusers `RMSNorm` with weight and bias, over axis 1 of (batch, channels, height, width)."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized tensor, in the dtype of the weight."""
        variance = x.float().pow(2).mean(1, keepdim=True)
        y = (x * torch.rsqrt(variance + self.eps)).to(self.weight.dtype)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class ChannelsFirstBlock(nn.Module):
    """A diffusers `ResBlock` of an `AutoencoderDC` with RMSNorm."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.nonlinearity = block.conv1, block.conv2, block.nonlinearity
        self.norm = ChannelNorm(block.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and what the block adds to it."""
        return self.norm(self.conv2(self.nonlinearity(self.conv1(x)))) + x


class ChannelsFirstDecoder(nn.Module):
    """The decoder of a diffusers `AutoencoderDC`; equal up to rounding. Shares its modules with `decoder`.

    Source: `diffusers.models.autoencoders.autoencoder_dc.Decoder`.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.conv_in, self.conv_act, self.conv_out = decoder.conv_in, decoder.conv_act, decoder.conv_out
        self.norm_out = ChannelNorm(decoder.norm_out)
        self.copies = decoder.in_shortcut_repeats if decoder.in_shortcut else 0
        blocks = [module for level in reversed(decoder.up_blocks) for module in level]
        self.blocks = nn.ModuleList(
            ChannelsFirstBlock(block) if getattr(block, "norm_type", "") == "rms_norm" else block for block in blocks
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return frames, (batch, channels, height, width), unclamped."""
        hidden = self.conv_in(x)
        if self.copies:
            hidden = hidden + x.repeat_interleave(self.copies, dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        frames: torch.Tensor = self.conv_out(self.conv_act(self.norm_out(hidden)))
        return frames


class FrameDecoderForm(nn.Module):
    """The program `frame_decoder`; see `engines.programs`.

    Args:
        decoder: the decoder of a diffusers `AutoencoderDC`, or an `owl_programs.OwlDecoder`.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = ChannelsFirstDecoder(decoder) if hasattr(decoder, "up_blocks") else decoder

    def forward(self, latent_frames: torch.Tensor) -> torch.Tensor:
        """Return frames, float32, of latents, float32; computed in the dtype of the weights."""
        dtype = next(self.decoder.parameters()).dtype
        frames: torch.Tensor = self.decoder(latent_frames.to(dtype))
        return frames.float()
