"""OWL's decoder of single frames, in PyTorch.

Written from the description of `owl_vaes/models/dcae.py`, `nn/resnet.py` and `nn/sana.py` in Wayfarer-Labs/owl-vaes:
residual blocks of grouped convolutions whose weights are normalized, no norms of activations, and no attention. Module
names are those of its state dicts, whose weight norm is folded into plain weights (`folded`).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.families.dcae.spec import FrameDecoderSpec

_GROUP = 16
# `torch.nn.utils.parametrizations.weight_norm` and, before torch 2.0, `torch.nn.utils.weight_norm`.
_NORMED = re.compile(r"(.*\.|)(?:parametrizations\.weight\.original([01])|weight_([gv]))")


def folded(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict in which normalized weights are plain: g · v / ‖v‖, of each output channel.

    Raises:
        KeyError: if one of the two tensors of a weight is missing.
    """
    plain: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        match = _NORMED.fullmatch(name)
        if match is None:
            plain[name] = tensor
        else:
            part = {"0": "g", "1": "v"}.get(match[2] or "", match[3])
            parts.setdefault(match[1], {})[part] = tensor
    for name, pair in parts.items():
        length, direction = pair["g"].float(), pair["v"].float()
        norm = direction.flatten(1).norm(dim=1).view(-1, *[1] * (direction.dim() - 1))
        plain[f"{name}weight"] = length * direction / norm
    return plain


class ResBlock(nn.Module):
    """A residual block: 1×1, grouped 3×3 and 1×1 convolutions, twice as wide inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 2 * channels
        self.conv1 = nn.Conv2d(channels, inner, 1)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, groups=max(inner // _GROUP, 1))
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and what the convolutions add to it."""
        y = F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x))))
        return x + self.conv3(y)


class Blocks(nn.Module):
    """Residual blocks of one size."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(channels) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block."""
        for block in self.blocks:
            x = block(x)
        return x


class Upsample(nn.Module):
    """A 1×1 convolution, if the number of channels changes, and bicubic interpolation to twice the size."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        same = channels_in == channels_out
        self.proj = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, 2 · height, 2 · width)."""
        return F.interpolate(self.proj(x), scale_factor=2.0, mode="bicubic")


class UpBlock(Blocks):
    """Upsampling, then residual blocks."""

    def __init__(self, channels_in: int, channels_out: int, count: int) -> None:
        super().__init__(channels_out, count)
        self.up = Upsample(channels_in, channels_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, 2 · height, 2 · width)."""
        return super().forward(self.up(x))


class ChannelToSpace(nn.Module):
    """The shortcut of an up block: a 3×3 convolution to four times the channels, which become pixels."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels_in, 4 * channels_out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, 2 · height, 2 · width)."""
        return F.pixel_shuffle(self.proj(x), 2)


class ChannelDuplication(nn.Module):
    """The first layer: a 3×3 convolution, and the latents repeated, each channel next to its copies."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.copies = channels_out // channels_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, height, width)."""
        return self.proj(x) + x.repeat_interleave(self.copies, dim=1) * self.copies**-0.5


class SquareToLandscape(nn.Module):
    """The last layer of a decoder of 16:9 frames: a 3×3 convolution, and bicubic interpolation to the frames' size."""

    def __init__(self, channels_in: int, channels_out: int, size: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=bias)
        self.size = tuple(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, *size)."""
        return F.interpolate(self.proj(x), size=self.size, mode="bicubic")


class OwlDecoder(nn.Module):
    """OWL's decoder: latents (batch, channels, height, width) to frames, unclamped.

    Args:
        spec: its architecture.
        names: of the tensors of its state dict, without weight norm: some versions have a middle block, and biases in
            the last layer.

    Raises:
        ValueError: if the latents' channels do not divide those of the first level.
    """

    def __init__(self, spec: FrameDecoderSpec, names: Collection[str]) -> None:
        super().__init__()
        first = spec.widths[-1]
        if first % spec.z_dim:
            raise ValueError("latent_channels")
        self.conv_in = ChannelDuplication(spec.z_dim, first)
        has_middle = any(name.startswith("middle_block.") for name in names)
        self.middle_block = Blocks(first, spec.blocks[0]) if has_middle else None
        widths = spec.widths
        levels = list(zip(widths[1:], widths, spec.blocks, strict=False))[::-1]
        self.blocks = nn.ModuleList(UpBlock(below, width, count) for below, width, count in levels)
        self.residuals = nn.ModuleList(ChannelToSpace(below, width) for below, width, _ in levels)
        bias = any(name in {"conv_out.bias", "conv_out.proj.bias"} for name in names)
        self.conv_out: nn.Module
        if spec.resized is None:
            self.conv_out = nn.Conv2d(widths[0], spec.channels, 3, padding=1, bias=bias)
        else:
            self.conv_out = SquareToLandscape(widths[0], spec.channels, spec.resized, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return frames, (batch, channels, height, width)."""
        x = self.conv_in(x)
        if self.middle_block is not None:
            x = self.middle_block(x) + x
        for block, shortcut in zip(self.blocks, self.residuals, strict=True):
            x = block(x) + shortcut(x)
        return self.conv_out(F.silu(x))


def decoder_of(spec: FrameDecoderSpec, state: Mapping[str, Any]) -> tuple[OwlDecoder, dict[str, torch.Tensor]]:
    """Return a decoder on no device, and its state dict with plain weights."""
    plain = folded(state)
    with torch.device("meta"):
        return OwlDecoder(spec, plain), plain
