"""The networks of upscalers, with BasicSR's names of weights, and their exportable form.

Sources: `basicsr/archs/srvgg_arch.py` and `basicsr/archs/rrdbnet_arch.py` of XPixelGroup/BasicSR.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.families.esrgan.spec import COLORS, DENSE_CONVOLUTIONS, UpscalerSpec

_SLOPE = 0.2
_RESIDUAL = 0.2


def _convolution(inputs: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, channels, 3, padding=1)


class CompactNetwork(nn.Module):
    """Real-ESRGAN's network for videos, `SRVGGNetCompact` with `PReLU`: all convolutions have the source's size.

    The source, enlarged by nearest neighbours, is added to what the convolutions make.
    """

    def __init__(self, spec: UpscalerSpec) -> None:
        super().__init__()
        features, self.scale = spec.features, spec.scale
        layers: list[nn.Module] = [_convolution(COLORS, features), nn.PReLU(features)]
        for _ in range(spec.depth):
            layers += [_convolution(features, features), nn.PReLU(features)]
        self.body = nn.ModuleList([*layers, _convolution(features, COLORS * self.scale**2)])

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return (n, 3, scale · height, scale · width) of frames (n, 3, height, width) in 0 to 1."""
        hidden = frames.to(next(self.body.parameters()).dtype)
        for layer in self.body:
            hidden = layer(hidden)
        # Before the shuffle, nearest neighbours are copies of channels. They keep the frames' dtype, and with it their
        # colors where the weights have fewer bits.
        return F.pixel_shuffle(hidden + frames.repeat_interleave(self.scale**2, dim=1), self.scale)


class DenseBlock(nn.Module):
    """`ResidualDenseBlock`: each convolution has the results of all before it."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        for index in range(DENSE_CONVOLUTIONS - 1):
            self.add_module(f"conv{index + 1}", _convolution(features + index * growth, growth))
        last = DENSE_CONVOLUTIONS - 1
        self.add_module(f"conv{last + 1}", _convolution(features + last * growth, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and what the block adds to it."""
        *growing, last = self.children()
        hidden = x
        for convolution in growing:
            hidden = torch.cat([hidden, F.leaky_relu(convolution(hidden), _SLOPE)], dim=1)
        out: torch.Tensor = last(hidden) * _RESIDUAL + x
        return out


class ResidualBlock(nn.Module):
    """`RRDB`: three dense blocks with a residual."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (DenseBlock(features, growth) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and what the blocks add to it."""
        out: torch.Tensor = self.rdb3(self.rdb2(self.rdb1(x))) * _RESIDUAL + x
        return out


class RrdbNetwork(nn.Module):
    """`RRDBNet`, Real-ESRGAN's network for photographs: residual blocks, then two enlargements by 2."""

    def __init__(self, spec: UpscalerSpec) -> None:
        super().__init__()
        features, self.unshuffled, self.scale = spec.features, spec.unshuffled, spec.scale
        self.conv_first = _convolution(COLORS * self.unshuffled**2, features)
        self.body = nn.ModuleList([ResidualBlock(features, spec.growth) for _ in range(spec.depth)])
        self.conv_body = _convolution(features, features)
        self.conv_up1, self.conv_up2 = _convolution(features, features), _convolution(features, features)
        self.conv_hr, self.conv_last = _convolution(features, features), _convolution(features, COLORS)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return (n, 3, scale · height, scale · width) of frames (n, 3, height, width) in 0 to 1."""
        height, width = frames.shape[2:]
        side = self.unshuffled
        if side > 1:
            frames = F.pad(frames, (0, -width % side, 0, -height % side), mode="replicate")
            frames = F.pixel_unshuffle(frames, side)
        first = self.conv_first(frames.to(self.conv_first.weight.dtype))
        hidden = first
        for block in self.body:
            hidden = block(hidden)
        hidden = first + self.conv_body(hidden)
        for convolution in (self.conv_up1, self.conv_up2):
            hidden = F.leaky_relu(convolution(F.interpolate(hidden, scale_factor=2.0, mode="nearest")), _SLOPE)
        out: torch.Tensor = self.conv_last(F.leaky_relu(self.conv_hr(hidden), _SLOPE))
        return out[..., : height * self.scale, : width * self.scale]


class UpscalerForm(nn.Module):
    """The program `upscaler`, see `engines.programs`: the network, and its result made smaller.

    Args:
        network: a `CompactNetwork` or an `RrdbNetwork`.
        spec: its architecture.
    """

    def __init__(self, network: nn.Module, spec: UpscalerSpec) -> None:
        super().__init__()
        self.network, self.reduces, self.output_scale = network, spec.output_scale < spec.scale, spec.output_scale

    def forward(self, latent_frames: torch.Tensor) -> torch.Tensor:
        """Return frames in about 0 to 1, float32, of smaller ones in 0 to 1; computed in the dtype of the weights."""
        frames: torch.Tensor = self.network(latent_frames)
        if self.reduces:
            height, width = latent_frames.shape[2:]
            size = (height * self.output_scale, width * self.output_scale)
            frames = F.interpolate(frames, size=size, mode="bicubic", align_corners=False)
        return frames.float()
