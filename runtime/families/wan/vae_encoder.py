"""Wan's VAE encoder on diffusers' modules, for videos and for clips whose frames are mostly equal.

`vae_video_encoder` computes videos. Of an image and gray frames, only frames that differ are computed,
with an equal result up to rounding: a convolution in time sees the two frames before each frame, so after a few equal
frames its output is constant too. Of an image and 80 gray frames, those are 12 in the first and largest level, 20 in
the second. So few frames are fastest in PyTorch's own layout: with the decoder's kernels, an H200 takes a fifth longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanAttentionBlock,
    WanResample,
    patchify,
)

from runtime.core.facts import Fact
from runtime.core.plan import Speed
from runtime.core.tiles import spans
from runtime.execution.decoded_frames import blend_weights
from runtime.families.wan.spec import MOST_ENCODED_FRAMES
from runtime.families.wan.vae import CACHED_FRAMES, PyTorchVaePart, VaeOps, norm_activate, triton_ops
from runtime.families.wan.vae_video_encoder import VideoEncoderSteps, calls_of, repeats_of
from runtime.upstream.diffusers import causal_padding

_Frames = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Clip:
    """Frames of which a part is constant.

    Attributes:
        start: the first frames, (1, channels, frames, height, width); at least one.
        repeats: how often the last of them is repeated.
        end: the frames after that; `None` without any.
    """

    start: torch.Tensor
    repeats: int = 0
    end: torch.Tensor | None = None

    @property
    def frames(self) -> int:
        """The number of frames."""
        return self.start.shape[2] + self.repeats + (0 if self.end is None else self.end.shape[2])

    def whole(self) -> torch.Tensor:
        """Return all frames."""
        repeated = [self.start[:, :, -1:].expand(-1, -1, self.repeats, -1, -1)] if self.repeats else []
        parts = [self.start, *repeated, *([] if self.end is None else [self.end])]
        return torch.cat(parts, dim=2) if len(parts) > 1 else self.start

    def begun(self, frames: int) -> "Clip":
        """Return the same clip with so many frames in `start`, or all if only that leaves two repeats before `end`."""
        more = frames - self.start.shape[2]
        if more > self.repeats or (self.end is not None and self.repeats - more < CACHED_FRAMES):
            return Clip(self.whole())
        if more <= 0:
            return self
        repeated = self.start[:, :, -1:].expand(-1, -1, more, -1, -1)
        return replace(self, start=torch.cat([self.start, repeated], dim=2), repeats=self.repeats - more)

    def each(self, function: _Frames) -> "Clip":
        """Return the clip after a function that treats every frame alike and alone."""
        return Clip(function(self.start), self.repeats, None if self.end is None else function(self.end))


class PyTorchVideoEncoder(PyTorchVaePart):
    """The encoder of a `diffusers.AutoencoderKLWan`, computed by `EncoderSteps`; see `execution.components`.

    Args:
        module: its weights may be on another device until it is called.
        device: the device that computes; by default, that of the weights.
    """

    def __init__(self, module: AutoencoderKLWan, device: str | torch.device | None = None) -> None:
        super().__init__(module, module.encoder, device)
        self._steps = EncoderSteps(module.encoder)
        self._ops: VaeOps = VaeOps()
        self._channels_last = False

    def compute(self, speed: Speed, on_degraded: Callable[[str, Fact], None] | None = None) -> None:
        """Apply a plan's `Speed` to videos from the next call on; see `PyTorchDenoiser.compute`."""
        ops = triton_ops(self._mean.device, self._dtype, speed, on_degraded)
        self._ops, self._channels_last = ops or VaeOps(), ops is not None

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self._ops.compile_seconds

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def latents(self, images: Sequence[torch.Tensor], frames: int, tile: int | None = None) -> torch.Tensor:
        """See `VideoEncoder`; tiles overlap by a quarter, and are blended as in decoding."""
        return self._in_tiles(
            images[0].shape[1:], tile, lambda y, x: self._whole([image[:, y, x] for image in images], frames)
        )

    @torch.no_grad()
    def video_latents(
        self,
        video: torch.Tensor,
        tile: int | None,
        check: Callable[[], None],
        shown: torch.Tensor | None = None,
        chunk: int = 1,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `VideoEncoder`; a tile is encoded for the whole video before the next one starts."""
        return self._in_tiles(
            video.shape[1:3],
            tile,
            lambda y, x: self._video(video[:, y, x], _part(shown, y, x), _part(before, y, x), check, chunk),
        )

    def _in_tiles(
        self, size: Sequence[int], tile: int | None, encode: Callable[[slice, slice], torch.Tensor]
    ) -> torch.Tensor:
        """Return the latents of frames of a size, blended from those that `encode` returns of each tile's pixels."""
        scale: int = self._vae.config.scale_factor_spatial
        height, width = (side // scale for side in size)
        if tile is None or max(height, width) <= tile:
            return encode(slice(None), slice(None))
        rows, columns = spans(height, tile), spans(width, tile)
        blended: torch.Tensor | None = None
        for row, down in zip(rows, blend_weights(rows, 1), strict=True):
            for column, across in zip(columns, blend_weights(columns, 1), strict=True):
                y, x = (slice(span.start * scale, span.end * scale) for span in (row, column))
                part = encode(y, x)
                if blended is None:
                    blended = part.new_zeros((*part.shape[:3], height, width))
                share = (down[:, None] * across).to(part.device)
                blended[..., row.start : row.end, column.start : column.end] += part * share
        assert blended is not None
        return blended

    def _whole(self, images: Sequence[torch.Tensor], frames: int) -> torch.Tensor:
        first, *last = [self._frame(image) for image in images]
        gray = frames - len(images)
        start = torch.cat([first, torch.zeros_like(first)], dim=2) if gray > 0 else first
        clip = Clip(start, max(gray - 1, 0), last[0] if last else None)
        moments = self._vae.quant_conv(self._steps(clip))
        return self._normalized(moments)

    def _video(
        self,
        video: torch.Tensor,
        shown: torch.Tensor | None,
        before: torch.Tensor | None,
        check: Callable[[], None],
        chunk: int,
    ) -> torch.Tensor:
        """Return the latents of a video."""
        stride = self._vae.config.scale_factor_temporal
        steps = VideoEncoderSteps(self._vae.encoder, stride, self._ops, channels_last=self._channels_last)
        repeated = repeats_of(video, shown, stride, 0 if before is None else len(before))
        latents = []
        for call in calls_of(repeated, min(chunk, max(MOST_ENCODED_FRAMES // stride, 1))):
            check()
            part = slice(max(1 + stride * (call.start - 1), 0), 1 + stride * (call.stop - 1))
            pixels = video[part].to(self._mean.device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
            if shown is not None:
                pixels *= shown[part].to(pixels.device)
            if before is not None and len(before[part]):
                pixels[:, :, : len(before[part])] = before[part].to(pixels.device).permute(3, 0, 1, 2)
            encoded = steps(self._patched(pixels.to(self._dtype)), repeats=repeated[call.start])
            latents.append(self._normalized(self._vae.quant_conv(encoded)))
        return torch.cat(latents, dim=2)

    def _normalized(self, moments: torch.Tensor) -> torch.Tensor:
        # The mean of the distribution, as in diffusers' pipelines.
        mean: torch.Tensor = moments[:, : self._mean.shape[1]].float()
        return (mean - self._mean) / self._std

    def _frame(self, image: torch.Tensor) -> torch.Tensor:
        return self._patched(image.to(self._mean.device, self._dtype)[None, :, None])

    def _patched(self, frames: torch.Tensor) -> torch.Tensor:
        size = self._vae.config.patch_size
        patched: torch.Tensor = frames if size is None else patchify(frames, size)
        return patched


def _part(frames: torch.Tensor | None, y: slice, x: slice) -> torch.Tensor | None:
    return None if frames is None else frames[:, y, x]


class EncoderSteps:
    """The encoder of a `diffusers.AutoencoderKLWan`, level by level.

    Args:
        encoder: a `WanEncoder3d`.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def __call__(self, clip: Clip) -> torch.Tensor:
        """Encode a clip of 1 + 4n frames; return latents before `quant_conv`, (1, channels, 1 + n, height, width)."""
        encoder: Any = self._encoder
        x = _convolved(clip, encoder.conv_in)
        for block in encoder.down_blocks:
            x = self._down(block, x)
        mid = encoder.mid_block
        x = self._residual(mid.resnets[0], x)
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            x = self._residual(resnet, x.each(attention))
        return _convolved(x, encoder.conv_out, encoder.norm_out).whole()

    def _down(self, block: Any, x: Clip) -> Clip:
        if isinstance(block, WanAttentionBlock):
            return x.each(block)
        if isinstance(block, WanResample):
            return self._downsample(block, x)
        if not hasattr(block, "avg_shortcut"):
            return self._residual(block, x)
        before = x
        for resnet in block.resnets:
            x = self._residual(resnet, x)
        if block.downsampler is not None:
            x = self._downsample(block.downsampler, x)
        return _joined(x, _averaged(block.avg_shortcut, before), torch.add)

    def _residual(self, block: Any, x: Clip) -> Clip:
        y = _convolved(_convolved(x, block.conv1, block.norm1), block.conv2, block.norm2)
        return _joined(y, x.each(block.conv_shortcut), torch.add)

    def _downsample(self, block: Any, x: Clip) -> Clip:
        def halved(frames: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = block.resample(frames[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0)
            return out

        x = x.each(halved)
        return self._downsample_time(block.time_conv, x) if block.mode == "downsample3d" else x

    def _downsample_time(self, conv: Any, x: Clip) -> Clip:
        """Halve the number of frames after the first: each is computed from two frames and the one before them."""
        x = _evened(x)
        convolved = conv(x.start) if x.start.shape[2] > 1 else x.start[:, :, :0]
        start = torch.cat([x.start[:, :, :1], convolved], dim=2)
        if x.end is None:
            return Clip(start, x.repeats // 2)
        # The frame before is constant.
        return Clip(start, x.repeats // 2, conv(torch.cat([x.start[:, :, -1:], x.end], dim=2)))


def _convolved(x: Clip, conv: Any, norm: Any = None) -> Clip:
    """Normalize and activate, if there is a norm, and convolve causally in time."""
    x = x.begun(x.start.shape[2] + min(CACHED_FRAMES, x.repeats))

    def after(before: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return torch.cat([before, frames], dim=2)
        return norm_activate(frames, None, norm.gamma * norm.scale, before)

    def convolved(frames: torch.Tensor) -> torch.Tensor:
        return F.conv3d(frames, conv.weight, conv.bias, padding=(0, *causal_padding(conv)[1:]))

    zeros = torch.zeros_like(x.start[:, :, :1]).expand(-1, -1, CACHED_FRAMES, -1, -1)
    start = after(zeros, x.start)
    end = None if x.end is None else convolved(after(start[:, :, -CACHED_FRAMES:], x.end))
    return Clip(convolved(start), x.repeats, end)


def _evened(x: Clip) -> Clip:
    """Return the same clip with an even number of frames in each part, the first frame apart.

    The last two frames that are computed together in `start`, and the one before them, are constant.
    """
    count = x.start.shape[2] + CACHED_FRAMES
    x = x.begun(min(count + 1 - count % 2, x.start.shape[2] + x.repeats))
    if x.end is None or x.end.shape[2] % 2 == 0:
        return x
    x = replace(x, repeats=x.repeats - 1, end=torch.cat([x.start[:, :, -1:], x.end], dim=2))
    return x if x.repeats >= CACHED_FRAMES else Clip(x.whole())


def _averaged(shortcut: Any, x: Clip) -> Clip:
    """Return a clip after an `AvgDown3D`; one that halves the number of frames leaves the first one apart."""
    if shortcut.factor_t == 1:
        return x.each(shortcut)
    x = _evened(x)
    later = [shortcut(x.start[:, :, 1:])] if x.start.shape[2] > 1 else []
    start = torch.cat([shortcut(x.start[:, :, :1]), *later], dim=2)
    return Clip(start, x.repeats // 2, None if x.end is None else shortcut(x.end))


def _joined(first: Clip, second: Clip, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Clip:
    """Return the frame by frame sum of two clips with the same number of frames."""
    frames = max(first.start.shape[2], second.start.shape[2])
    first, second = first.begun(frames), second.begun(frames)
    if first.repeats != second.repeats:
        first, second = Clip(first.whole()), Clip(second.whole())
    end = None if first.end is None or second.end is None else add(first.end, second.end)
    return Clip(add(first.start, second.start), first.repeats, end)
