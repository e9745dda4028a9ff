"""The exportable form of decoders of single frames.

The decoder of a diffusers `AutoencoderDC` normalizes over channels, for which it moves them to the last axis and back.
`ChannelsFirstDecoder` computes the same where they are: its levels of full size need no transposed copies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_dc import DCUpBlock2d
from torch import nn

# The least divisor in attention. Where diffusers divides 0 by 1e-15, exporters drop that summand and float16 has no
# such number: any positive divisor gives the same 0.
_LEAST_SUM = 1e-7


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


class ChannelsFirstAttention(nn.Module):
    """A diffusers `SanaMultiscaleLinearAttention` with RMSNorm and a residual; linear layers are 1×1 convolutions."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        layers = (attention.to_q, attention.to_k, attention.to_v)
        joined = torch.cat([layer.weight.detach() for layer in layers])
        self.weight = nn.Parameter(joined[:, :, None, None], requires_grad=False)
        self.out = nn.Parameter(attention.to_out.weight.detach()[:, :, None, None], requires_grad=False)
        self.scales, self.norm = attention.to_qkv_multiscale, ChannelNorm(attention.norm_out)
        self.head_dim = attention.attention_head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and the attention's output, (batch, channels, height, width)."""
        height, width = x.shape[2:]
        maps = F.conv2d(x, self.weight)
        maps = torch.cat([maps, *(scale(maps) for scale in self.scales)], dim=1)
        heads = maps.unflatten(1, (-1, 3 * self.head_dim)).flatten(3)
        attended = self._linear(heads) if height * width > self.head_dim else self._quadratic(heads)
        y = attended.to(x.dtype).flatten(1, 2).unflatten(2, (height, width))
        return self.norm(F.conv2d(y, self.out)) + x

    def _linear(self, heads: torch.Tensor) -> torch.Tensor:
        """Return (batch, heads, head_dim, pixels); the cost grows with pixels · head_dim²."""
        query, key, value = heads.float().chunk(3, dim=2)
        query, key = query.relu(), key.relu()
        numerator = (value @ key.mT) @ query
        denominator = key.sum(dim=3, keepdim=True).mT @ query
        return numerator / denominator.clamp(min=_LEAST_SUM)

    def _quadratic(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the same for few pixels, through a matrix of pixels × pixels."""
        query, key, value = heads.chunk(3, dim=2)
        scores = (key.relu().mT @ query.relu()).float()
        weights = scores / scores.sum(dim=2, keepdim=True).clamp(min=_LEAST_SUM)
        return value @ weights.to(value.dtype)


class UpBlock(nn.Module):
    """A diffusers `DCUpBlock2d` with a shortcut, whose two pixel shuffles are one: that of the sum."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv, self.repeats = block.conv, block.repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, 2 · height, 2 · width)."""
        return F.pixel_shuffle(self.conv(x) + x.repeat_interleave(self.repeats, dim=1), 2)


class ChannelsFirstFeedForward(nn.Module):
    """A diffusers `GLUMBConv` with RMSNorm and a residual."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.conv_inverted, self.conv_depth, self.conv_point = layer.conv_inverted, layer.conv_depth, layer.conv_point
        self.norm = ChannelNorm(layer.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and what the layer adds to it."""
        inner, gate = self.conv_depth(F.silu(self.conv_inverted(x))).chunk(2, dim=1)
        return self.norm(self.conv_point(inner * F.silu(gate))) + x


def block_form(block: Any) -> nn.Module:
    """Return the faster form of a block of an `AutoencoderDC`, or the block itself if it has none."""
    if isinstance(block, DCUpBlock2d) and block.shortcut and not block.interpolate:
        return UpBlock(block)
    if getattr(block, "norm_type", "") == "rms_norm":
        return ChannelsFirstBlock(block)
    attention = getattr(block, "attn", None)
    if attention is None or attention.norm_type != "rms_norm" or not attention.residual_connection:
        form: nn.Module = block
        return form
    return nn.Sequential(ChannelsFirstAttention(attention), ChannelsFirstFeedForward(block.conv_out))


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
        self.blocks = nn.ModuleList(map(block_form, blocks))

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
