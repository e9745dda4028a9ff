"""Wan's VAE decoder a few latent frames at a time, on diffusers' modules, with few passes over memory.

Equal to `AutoencoderKLWan._decode` up to rounding. What differs:

- What a convolution continues from is put before its input as that is computed, and kept from there: two frames.
- Padding in space is the convolution's own, not a copy. Its bias is added by what comes next.
- With `channels_last` values lie pixel by pixel, as cuDNN's convolutions want them.
- What lies between two convolutions is one function. Triton's kernels compute it where they can (`vae_fast`), and some
  convolutions: what enters those is padded in space too.

Caches are as engines have them (`engines.exportable.vae`): two frames each, zeros where there was nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CACHED_FRAMES = 2
# Cuts off what is not needed, (…, height, width), where that may be done: before each of the decoder's last blocks, in
# order from 0, before what follows them, and at the end.
Trim = Callable[[torch.Tensor, int], torch.Tensor]
_Computes = Callable[..., torch.Tensor]


def enter(
    x: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor, before: torch.Tensor, padding: int = 0
) -> torch.Tensor:
    """Return what goes into a causal convolution: the frames before, then `x` normalised over channels and activated.

    Args:
        x: (1, channels, frames, height, width), of the last convolution.
        bias: that convolution's, where it was not added yet.
        gamma: what a channel of unit length in each place becomes, (channels, 1, 1, 1).
        before: the frames that it continues from.
        padding: pixels of zeros around each frame.
    """
    if bias is not None:
        x = x + bias.view(1, -1, 1, 1, 1)
    y = F.normalize(x.float(), dim=1).to(x.dtype) * gamma
    entered = torch.cat([before, F.silu(y)], dim=2)
    return F.pad(entered, (padding,) * 4) if padding else entered  # padding by nothing copies


def leave(x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    """Return the end of a residual block."""
    return x + bias.view(1, -1, 1, 1, 1) + shortcut


def double(frames: torch.Tensor) -> torch.Tensor:
    """Return (frames, channels, height, width) twice as high and wide. That copies values, so it needs no float32."""
    return F.interpolate(frames, scale_factor=2.0, mode="nearest-exact")


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the convolution of what is padded already, without a bias."""
    return F.conv3d(x, weight)


def as_frames(pixels: torch.Tensor) -> torch.Tensor:
    """Return what a decoder gives as frames, (frames, height, width, 3), float32 in -1 to 1.

    What is not a number, or too large for the decoder's dtype, is NaN: clamped, Inf would pass for white.

    Args:
        pixels: (1, 3, frames, height, width).
    """
    frames = pixels[0].permute(1, 2, 3, 0).float()
    return frames.clamp(-1.0, 1.0).where(frames.isfinite(), torch.nan)


def _gamma(norm: Any) -> torch.Tensor:
    gamma: torch.Tensor = norm.gamma * norm.scale
    return gamma


class DecoderOps:
    """What is computed between convolutions, by PyTorch, and convolutions that something else is faster at: none.

    Attributes:
        enter, leave, double, convolve: this module's, or what was made of them.

    Args:
        wrap: makes something faster of them.
    """

    def __init__(self, wrap: Callable[[_Computes], _Computes] = lambda plain: plain) -> None:
        self.enter, self.leave = wrap(enter), wrap(leave)
        self.double, self.convolve = wrap(double), wrap(convolve)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0

    def takes(self, _conv: nn.Conv3d) -> bool:
        """Whether a convolution is for `convolve`."""
        return False


class DecoderSteps:
    """The decoder of a `diffusers.AutoencoderKLWan`, one call at a time.

    Args:
        decoder: a `WanDecoder3d`.
        channels_last: how values lie; the weights are laid so too.
        between: computes what is not a convolution. What `takes` one wants `channels_last`.
    """

    def __init__(self, decoder: Any, *, channels_last: bool = False, between: DecoderOps | None = None) -> None:
        self._decoder = decoder
        self.layout = torch.channels_last_3d if channels_last else torch.contiguous_format
        self.between = between or DecoderOps()
        for module in decoder.modules():
            if isinstance(module, nn.Conv3d) and self.between.takes(module):
                # Outputs side by side.
                there = module.weight.data.permute(2, 3, 4, 1, 0).contiguous()
                module.weight.data = there.permute(4, 3, 0, 1, 2)
            elif channels_last and isinstance(module, nn.Conv3d | nn.Conv2d):
                flat = isinstance(module, nn.Conv2d)
                layout = torch.channels_last if flat else torch.channels_last_3d
                module.weight.data = module.weight.data.contiguous(memory_format=layout)

    def __call__(
        self, z: torch.Tensor, caches: list[torch.Tensor], *, first: bool, trim: Trim | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return pixels, (1, channels, frames, height, width), and the caches for the next call.

        Args:
            z: (1, channels, latent frames, height, width), after `post_quant_conv`.
            caches: of the call before; none before the first. The list is emptied on the way: what was used is freed.
            first: whether `z` is the clip's first latent frame, which stays one frame.
            trim: alike in all calls of a clip; caches are then of what it leaves.
        """
        return _Call(self, caches, trim, first=first).run(self._decoder, z)


class _Call:
    """One call, with the caches that came in and those that go out."""

    def __init__(self, steps: DecoderSteps, given: list[torch.Tensor], trim: Trim | None, *, first: bool) -> None:
        self._between, self._format = steps.between, steps.layout
        self._given = given
        self._trim = trim
        self._kept: list[torch.Tensor] = []
        self._first = first

    def run(self, decoder: Any, z: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        z = z.contiguous(memory_format=self._format)
        x = self._convolve(decoder.conv_in, torch.cat([self._before(z), z], dim=2), with_bias=True)
        mid = decoder.mid_block
        x = self._residual(mid.resnets[0], x)
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            x = self._residual(resnet, attention(x).contiguous(memory_format=self._format))
        for number, block in enumerate(decoder.up_blocks):
            x = self._up(block, self._trimmed(x, number))
        blocks, norm = len(decoder.up_blocks), decoder.norm_out
        x = self._trimmed(x, blocks)
        padded = self._between.enter(x, None, _gamma(norm), self._before(x))
        return self._trimmed(self._convolve(decoder.conv_out, padded, with_bias=True), blocks + 1), self._kept

    def _trimmed(self, x: torch.Tensor, number: int) -> torch.Tensor:
        # A view would keep what is cut off in memory.
        return x if self._trim is None else self._trim(x, number).contiguous(memory_format=self._format)

    def _before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next cache; at the clip's beginning zeros, shaped like frames of `x`."""
        if self._given:
            return self._given.pop(0).contiguous(memory_format=self._format)
        frames = torch.zeros_like(x[:, :, :1]).expand(-1, -1, CACHED_FRAMES, -1, -1)
        return frames.contiguous(memory_format=self._format)

    def _convolve(self, conv: Any, padded: torch.Tensor, *, with_bias: bool = False) -> torch.Tensor:
        """Convolve what has its past before it, and keep its end for the next call."""
        self._keep(padded)
        # diffusers' own padding: (left, right, top, bottom, before, after).
        space = (0, conv._padding[2], conv._padding[0])
        return F.conv3d(padded, conv.weight, conv.bias if with_bias else None, padding=space)

    def _keep(self, entered: torch.Tensor) -> None:
        self._kept.append(entered[:, :, -CACHED_FRAMES:].clone(memory_format=self._format))

    def _residual(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        shortcut = block.conv_shortcut(x)
        y = self._entered(block.norm1, x, None, block.conv1)
        y = self._entered(block.norm2, y, block.conv1.bias, block.conv2)
        done: torch.Tensor = self._between.leave(y, block.conv2.bias, shortcut)
        return done

    def _entered(self, norm: Any, x: torch.Tensor, bias: torch.Tensor | None, conv: Any) -> torch.Tensor:
        """Normalise, activate and convolve; `bias` is what `x` lacks."""
        given = (x, bias, _gamma(norm), self._before(x))
        if not self._between.takes(conv):
            return self._convolve(conv, self._between.enter(*given))
        padded = self._between.enter(*given, 1)
        self._keep(padded[..., 1:-1, 1:-1])
        out: torch.Tensor = self._between.convolve(padded, conv.weight)
        return out

    def _up(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        entered = x
        for resnet in block.resnets:
            x = self._residual(resnet, x)
        residual = hasattr(block, "avg_shortcut")
        upsampler = block.upsampler if residual else block.upsamplers and block.upsamplers[0]
        if upsampler is not None:
            x = self._upsample(upsampler, x)
        if residual and block.avg_shortcut is not None:
            x = x + block.avg_shortcut(entered, first_chunk=self._first)
        return x

    def _upsample(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        if block.mode == "upsample3d":
            x = self._double_time(block.time_conv, x)
        conv = block.resample[1]
        wide = self._between.double(x[0].transpose(0, 1))
        return F.conv2d(wide, conv.weight, conv.bias, padding=1).transpose(0, 1).unsqueeze(0)

    def _double_time(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        if self._first:
            self._kept.append(self._before(x))
            return x
        padded = torch.cat([self._before(x), x], dim=2)
        x = self._convolve(conv, padded, with_bias=True)
        b, c, t, h, w = x.shape
        if self._format is torch.channels_last_3d:
            # The same, in the order in which values lie.
            pixels = x.permute(0, 2, 3, 4, 1).unflatten(4, (2, c // 2)).permute(0, 1, 4, 2, 3, 5)
            return pixels.reshape(b, 2 * t, h, w, c // 2).permute(0, 4, 1, 2, 3)
        return x.view(b, 2, c // 2, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c // 2, 2 * t, h, w)
