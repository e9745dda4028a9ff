"""Wan's VAE encoder for videos: several latent frames per call, and no computation of what stays constant.

Equal to `AutoencoderKLWan._encode` up to rounding. Differences:

- A call computes several latent frames. diffusers computes one, after it has copied the input of each convolution
  twice: to prepend the cached frames, and to pad it.
- Latent frames whose pixels are those of the latent frame before, such as gray ones, are computed one per call. A
  convolution in time sees the two frames before each frame. So after a few equal latent frames the results of a level
  are equal as well, and the level is not computed any more.
- As in the decoder (`vae`), the operations between two convolutions are one function, which a Triton kernel computes
  where it can; kernels also compute the largest convolutions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResample
from torch import nn

from runtime.families.wan.vae import CACHED_FRAMES, VaeOps, gamma_of, laid_out
from runtime.upstream.diffusers import causal_padding

_Step = Callable[[torch.Tensor], torch.Tensor]


def repeats_of(video: torch.Tensor, shown: torch.Tensor | None, stride: int, replaced: int = 0) -> list[bool]:
    """Return for each latent frame of a video whether its pixels are those of the latent frame before.

    Args:
        video, shown: see `execution.components.VideoEncoder`.
        stride: frames of a latent frame, except for the first one, which has one frame.
        replaced: that many frames at the start are others than those of `video`.
    """
    repeated = [False] * min(len(video), 2)
    for start in range(1 + stride, len(video), stride):
        here, before = slice(start, start + stride), slice(start - stride, start)
        if before.start < replaced:
            repeated.append(False)
            continue
        equal = shown is None or torch.equal(shown[here], shown[before])
        repeated.append(equal and torch.equal(_seen(video, shown, here), _seen(video, shown, before)))
    return repeated


def _seen(video: torch.Tensor, shown: torch.Tensor | None, part: slice) -> torch.Tensor:
    return video[part] if shown is None else video[part] * shown[part, ..., None]


def calls_of(repeated: Sequence[bool], most: int) -> Iterator[range]:
    """Yield the latent frames of each call, in order: the first one alone, and each one that repeats the one before.

    Args:
        repeated: whether the pixels of each latent frame are those of the one before.
        most: latent frames in one call.
    """
    start = 0
    while start < len(repeated):
        end = start + 1
        while start and not repeated[start] and end < min(start + most, len(repeated)) and not repeated[end]:
            end += 1
        yield range(start, end)
        start = end


class VideoEncoderSteps:
    """The encoder of a `diffusers.AutoencoderKLWan` for one video, one call after the other.

    Args:
        encoder: a `WanEncoder3d`.
        stride: frames of a latent frame.
        ops: the operations between convolutions, and the largest convolutions.
        channels_last: whether activations are in channels-last layout. Required if `ops` supports any convolution.
    """

    def __init__(self, encoder: Any, stride: int, ops: VaeOps, *, channels_last: bool = False) -> None:
        self._encoder = encoder
        self._stride = stride
        self._ops = ops
        self._layout = torch.channels_last_3d if channels_last else torch.contiguous_format
        # Copies: images are encoded in PyTorch's own layout.
        convs = [module for module in encoder.modules() if isinstance(module, nn.Conv3d | nn.Conv2d)]
        self._weights = {conv: laid_out(conv, ops, channels_last=channels_last) for conv in convs}
        # The last frames of each convolution's input, by the convolution.
        self._caches: dict[Any, torch.Tensor] = {}
        self._repeats = 0
        self._levels = [_Level(steps, seen) for steps, seen in self._divided()]

    def __call__(self, frames: torch.Tensor, *, repeats: bool = False) -> torch.Tensor:
        """Encode the next frames; return latents before `quant_conv`, (1, channels, latent frames, height, width).

        Args:
            frames: (1, channels, frames, height, width): the first frame alone, then those of one or more latent
                frames.
            repeats: whether they are those of the latent frame before; then of one latent frame.
        """
        self._repeats = self._repeats + 1 if repeats else 0
        x = frames.contiguous(memory_format=self._layout)
        for level in self._levels:
            # What the call before saw was constant too, and it had the same shape.
            constant = (self._repeats - 1) * self._stride >= level.frames_seen
            x = level(x, constant=constant, keep=repeats)
        return x

    def _divided(self) -> Iterator[tuple[list[_Step], int]]:
        """Yield the encoder's levels: their steps, and how many frames before a call its result depends on."""
        encoder = self._encoder
        steps: list[_Step] = [self._first]
        seen, rate = CACHED_FRAMES, 1
        for block in encoder.down_blocks:
            steps.append(self._step_of(block))
            downsampler = block if isinstance(block, WanResample) else getattr(block, "downsampler", None)
            seen += CACHED_FRAMES * rate * _convolutions(block)
            if downsampler is not None:
                if downsampler.mode == "downsample3d":
                    seen, rate = seen + rate, 2 * rate
                yield steps, seen
                steps = []
        mid = encoder.mid_block
        pairs = zip(mid.attentions, mid.resnets[1:], strict=True)
        for block in (mid.resnets[0], *(block for pair in pairs for block in pair)):
            steps.append(self._step_of(block))
            seen += CACHED_FRAMES * rate * _convolutions(block)
        steps.append(self._last)
        yield steps, seen + CACHED_FRAMES * rate

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        conv = self._encoder.conv_in
        return self._convolved(conv, torch.cat([self._before(conv, x), x], dim=2), conv.bias)

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        conv, norm = self._encoder.conv_out, self._encoder.norm_out
        joined = self._ops.norm_activate(x, None, gamma_of(norm), self._before(conv, x))
        return self._convolved(conv, joined, conv.bias)

    def _step_of(self, block: Any) -> _Step:
        if isinstance(block, WanAttentionBlock):
            return lambda x: block(x).contiguous(memory_format=self._layout)
        if isinstance(block, WanResample):
            return lambda x: self._downsampled(block, x)
        if hasattr(block, "avg_shortcut"):
            return lambda x: self._down(block, x)
        return lambda x: self._residual(block, x)

    def _down(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        before = x
        for resnet in block.resnets:
            x = self._residual(resnet, x)
        if block.downsampler is not None:
            x = self._downsampled(block.downsampler, x)
        return x + block.avg_shortcut(before.contiguous())

    def _residual(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        y = self._normed(block.conv1, block.norm1, x)
        y = self._normed(block.conv2, block.norm2, y, block.conv1.bias)
        shortcut = block.conv_shortcut
        if isinstance(shortcut, nn.Conv3d):
            x = F.conv3d(x, self._weights[shortcut], shortcut.bias)
        return self._ops.add_residual(y, block.conv2.bias, x)

    def _downsampled(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        pad, conv = block.resample
        frames = F.conv2d(pad(x[0].transpose(0, 1)), self._weights[conv], conv.bias, stride=conv.stride)
        halved = frames.transpose(0, 1).unsqueeze(0)
        if block.mode != "downsample3d":
            return halved
        conv = block.time_conv
        before = self._caches.get(conv)
        self._caches[conv] = halved[:, :, -1:].clone()
        if before is None:
            return halved
        return F.conv3d(torch.cat([before, halved], dim=2), self._weights[conv], conv.bias, stride=conv.stride)

    def _before(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the frames before those of `x`; before the first, zeros."""
        before = self._caches.get(conv)
        if before is not None:
            return before
        zeros = torch.zeros_like(x[:, :, :1]).expand(-1, -1, CACHED_FRAMES, -1, -1)
        return zeros.contiguous(memory_format=self._layout)

    def _convolved(self, conv: Any, joined: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve frames that begin with those before them, which are kept for the next call."""
        self._caches[conv] = joined[:, :, -CACHED_FRAMES:].clone()
        return F.conv3d(joined, self._weights[conv], bias, padding=(0, *causal_padding(conv)[1:]))

    def _normed(self, conv: Any, norm: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Add the bias of the convolution before, normalize, activate and convolve causally in time, without a bias."""
        arguments = x, bias, gamma_of(norm), self._before(conv, x)
        if not self._ops.supports(conv):
            return self._convolved(conv, self._ops.norm_activate(*arguments), None)
        padded = self._ops.norm_activate(*arguments, 1)
        self._caches[conv] = padded[:, :, -CACHED_FRAMES:, 1:-1, 1:-1].clone()
        return self._ops.convolve(padded, self._weights[conv])


class _Level:
    """Steps of the encoder up to where the size of frames changes, and their last result.

    Args:
        steps: one after the other.
        frames_seen: how many frames of the video before a call its result depends on.
    """

    def __init__(self, steps: Sequence[_Step], frames_seen: int) -> None:
        self._steps = steps
        self.frames_seen = frames_seen
        self._last: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, *, constant: bool, keep: bool) -> torch.Tensor:
        """Return the result, or the last one if that is known to be equal.

        Args:
            keep: whether the next result may be equal.
        """
        if constant and self._last is not None:
            return self._last
        for step in self._steps:
            x = step(x)
        self._last = x if keep else None
        return x


def _convolutions(block: Any) -> int:
    """Return the number of causal convolutions of a block that see more than one frame, one after the other."""
    return 2 * len(getattr(block, "resnets", [block] if hasattr(block, "conv1") else []))
