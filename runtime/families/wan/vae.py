"""Wan's VAE decoder on diffusers' modules, with several latent frames per call and few passes over memory.

Equal to `AutoencoderKLWan._decode` up to rounding. Differences:

- The operation that computes the input of a causal convolution also prepends the two cached frames.
- Convolutions pad in space themselves, without a copy. The operation after a convolution adds its bias.
- With `channels_last`, activations are in the memory layout in which cuDNN's convolutions are fastest.
- The operations between two convolutions are one function. On GPUs with Triton, a kernel computes it (`vae_kernels`).
  Kernels also compute some convolutions; the function before then pads their input in space.

Caches have the format of engines (`programs.VaeForm`): two frames each, initially zeros.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify
from torch import nn

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.tiles import Span, spans
from runtime.execution.compilation import OnDegraded, WithFallback
from runtime.execution.decoded_frames import blend_weights, longer_side
from runtime.models.row_operations import triton_runs_on
from runtime.planner import constraints
from runtime.upstream.diffusers import causal_padding

CACHED_FRAMES = 2
# Frames yielded at once after the last tile.
_TILED_FRAMES = 4
# The Triton convolution supports input channels in multiples of this (GPUs copy 16 bytes at a time) and this spatial
# kernel size.
_CHANNEL_MULTIPLE, _KERNEL_SIZE = 8, (3, 3)
# Crops a tensor (…, height, width) to the part that a strip needs, at a place in the decoder. Places are numbered from
# 0: before each up block, before the output norm, and at the end.
Trim = Callable[[torch.Tensor, int], torch.Tensor]
_Operation = Callable[..., torch.Tensor]


def norm_activate(
    x: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor, before: torch.Tensor, padding: int = 0
) -> torch.Tensor:
    """Return the input of a causal convolution: the cached frames, then `x` normalized over channels and activated.

    Args:
        x: (1, channels, frames, height, width), the output of the previous convolution.
        bias: the bias of that convolution; `None` if it is already added.
        gamma: the scale of each channel, (channels, 1, 1, 1).
        before: the cached frames, in the layout of `x`.
        padding: width of the border of zeros around each frame, in pixels.
    """
    if bias is not None:
        x = x + bias.view(1, -1, 1, 1, 1)
    y = F.normalize(x.float(), dim=1).to(x.dtype) * gamma
    joined = torch.cat([before, F.silu(y)], dim=2)
    return F.pad(joined, (padding,) * 4) if padding else joined  # padding by 0 would copy


def add_residual(x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    """Return the output of a residual block: the last convolution's output `x`, its bias, and the shortcut."""
    return x + bias.view(1, -1, 1, 1, 1) + shortcut


def upsample(frames: torch.Tensor) -> torch.Tensor:
    """Return (frames, channels, height, width) at twice the height and width, by nearest-neighbor interpolation."""
    return F.interpolate(frames, scale_factor=2.0, mode="nearest-exact")


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve a padded input, without a bias."""
    return F.conv3d(x, weight)


def as_frames(pixels: torch.Tensor) -> torch.Tensor:
    """Return the decoder's output as frames, (frames, height, width, 3), float32 in -1 to 1.

    Inf becomes NaN, because clamping would turn an overflow into white.

    Args:
        pixels: (1, 3, frames, height, width).
    """
    frames = pixels[0].permute(1, 2, 3, 0).float()
    return frames.clamp(-1.0, 1.0).where(frames.isfinite(), torch.nan)


def upsampler_of(block: Any) -> Any:
    """Return the upsampler of a decoder's block, or `None`: Wan2.1's blocks have a list, TI2V-5B's a module."""
    several = getattr(block, "upsamplers", None)
    return several[0] if several is not None else getattr(block, "upsampler", None)


def gamma_of(norm: Any) -> torch.Tensor:
    """Return a norm's scale of each channel, (channels, 1, 1, 1)."""
    gamma: torch.Tensor = norm.gamma * norm.scale
    return gamma


class VaeOps:
    """The operations between convolutions, and convolutions without a bias, in PyTorch.

    Attributes:
        norm_activate, add_residual, upsample, convolve: the functions of this module, wrapped.

    Args:
        wrap: takes each of these functions and returns a faster version of it.
    """

    def __init__(self, wrap: Callable[[_Operation], _Operation] = lambda plain: plain) -> None:
        self.norm_activate, self.add_residual = wrap(norm_activate), wrap(add_residual)
        self.upsample, self.convolve = wrap(upsample), wrap(convolve)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0

    def supports(self, _conv: nn.Conv3d) -> bool:
        """Return whether `convolve` can replace a convolution; others run in PyTorch."""
        return False


class DecoderSteps:
    """The decoder of a `diffusers.AutoencoderKLWan`, one call at a time.

    Args:
        decoder: a `WanDecoder3d`; the memory layout of its weights is changed.
        channels_last: whether activations and weights are in channels-last layout. Required if `ops` supports any
            convolution.
        ops: the operations between convolutions.
    """

    def __init__(self, decoder: Any, *, channels_last: bool = False, ops: VaeOps | None = None) -> None:
        self._decoder = decoder
        self.layout = torch.channels_last_3d if channels_last else torch.contiguous_format
        self.ops = ops or VaeOps()
        lay_out(decoder, self.ops, channels_last=channels_last)

    def __call__(
        self, z: torch.Tensor, caches: list[torch.Tensor], *, first: bool, trim: Trim | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Decode latent frames; return pixels, (1, channels, frames, height, width), and the caches for the next call.

        Args:
            z: (1, channels, latent frames, height, width), after `post_quant_conv`.
            caches: from the previous call; empty for the first. This call empties the list, to free used caches early.
            first: whether `z` is the clip's first latent frame, which is decoded to one frame.
            trim: must be the same in all calls of a clip, because it also determines the size of the caches.
        """
        return _Call(self, caches, trim, first=first).run(self._decoder, z)


def lay_out(module: nn.Module, ops: VaeOps, *, channels_last: bool) -> None:
    """Change the memory layout of the convolutions' weights to the one that their kernels read."""
    for conv in module.modules():
        if isinstance(conv, nn.Conv3d | nn.Conv2d):
            conv.weight.data = laid_out(conv, ops, channels_last=channels_last)


def laid_out(conv: nn.Conv3d | nn.Conv2d, ops: VaeOps, *, channels_last: bool) -> torch.Tensor:
    """Return a convolution's weight in the memory layout that its kernel reads."""
    weight = conv.weight.data
    if isinstance(conv, nn.Conv3d) and ops.supports(conv):
        # The kernel reads weights with contiguous output channels.
        return weight.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)
    if not channels_last:
        return weight
    flat = isinstance(conv, nn.Conv2d)
    return weight.contiguous(memory_format=torch.channels_last if flat else torch.channels_last_3d)


class _Call:
    """One call of `DecoderSteps`, with its input and output caches."""

    def __init__(self, steps: DecoderSteps, caches: list[torch.Tensor], trim: Trim | None, *, first: bool) -> None:
        self._ops, self._layout = steps.ops, steps.layout
        self._caches_in = caches
        self._caches_out: list[torch.Tensor] = []
        self._trim = trim
        self._first = first

    def run(self, decoder: Any, z: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        z = z.contiguous(memory_format=self._layout)
        x = self._convolve(decoder.conv_in, torch.cat([self._next_cache(z), z], dim=2), with_bias=True)
        mid = decoder.mid_block
        x = self._residual(mid.resnets[0], x)
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            x = self._residual(resnet, attention(x).contiguous(memory_format=self._layout))
        for number, block in enumerate(decoder.up_blocks):
            x = self._up(block, self._crop(x, number))
        blocks, norm = len(decoder.up_blocks), decoder.norm_out
        x = self._crop(x, blocks)
        padded = self._ops.norm_activate(x, None, gamma_of(norm), self._next_cache(x))
        return self._crop(self._convolve(decoder.conv_out, padded, with_bias=True), blocks + 1), self._caches_out

    def _crop(self, x: torch.Tensor, number: int) -> torch.Tensor:
        # A view would keep the whole tensor in memory.
        return x if self._trim is None else self._trim(x, number).contiguous(memory_format=self._layout)

    def _next_cache(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next input cache; at the clip's start, zeros shaped like frames of `x`."""
        if self._caches_in:
            return self._caches_in.pop(0).contiguous(memory_format=self._layout)
        frames = torch.zeros_like(x[:, :, :1]).expand(-1, -1, CACHED_FRAMES, -1, -1)
        return frames.contiguous(memory_format=self._layout)

    def _convolve(self, conv: Any, padded: torch.Tensor, *, with_bias: bool = False) -> torch.Tensor:
        """Convolve an input that starts with the cached frames, and cache its last frames for the next call."""
        self._save_cache(padded)
        space = (0, *causal_padding(conv)[1:])
        return F.conv3d(padded, conv.weight, conv.bias if with_bias else None, padding=space)

    def _save_cache(self, padded: torch.Tensor) -> None:
        self._caches_out.append(padded[:, :, -CACHED_FRAMES:].clone(memory_format=self._layout))

    def _residual(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        shortcut = block.conv_shortcut(x)
        y = self._norm_convolve(block.norm1, x, None, block.conv1)
        y = self._norm_convolve(block.norm2, y, block.conv1.bias, block.conv2)
        out: torch.Tensor = self._ops.add_residual(y, block.conv2.bias, shortcut)
        return out

    def _norm_convolve(self, norm: Any, x: torch.Tensor, bias: torch.Tensor | None, conv: Any) -> torch.Tensor:
        """Add `bias` to `x`, normalize, activate and convolve."""
        arguments = (x, bias, gamma_of(norm), self._next_cache(x))
        if not self._ops.supports(conv):
            return self._convolve(conv, self._ops.norm_activate(*arguments))
        padded = self._ops.norm_activate(*arguments, 1)
        self._save_cache(padded[..., 1:-1, 1:-1])
        out: torch.Tensor = self._ops.convolve(padded, conv.weight)
        return out

    def _up(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        block_input = x
        for resnet in block.resnets:
            x = self._residual(resnet, x)
        upsampler, shortcut = upsampler_of(block), getattr(block, "avg_shortcut", None)
        if upsampler is not None:
            x = self._upsample(upsampler, x)
        return x if shortcut is None else x + shortcut(block_input, first_chunk=self._first)

    def _upsample(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        if block.mode == "upsample3d":
            x = self._upsample_time(block.time_conv, x)
        conv = block.resample[1]
        wide = self._ops.upsample(x[0].transpose(0, 1))
        return F.conv2d(wide, conv.weight, conv.bias, padding=1).transpose(0, 1).unsqueeze(0)

    def _upsample_time(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        if self._first:
            self._caches_out.append(self._next_cache(x))
            return x
        padded = torch.cat([self._next_cache(x), x], dim=2)
        x = self._convolve(conv, padded, with_bias=True)
        b, c, t, h, w = x.shape
        if self._layout is torch.channels_last_3d:
            # The same result as below, with the copy in channels-last order.
            pixels = x.permute(0, 2, 3, 4, 1).unflatten(4, (2, c // 2)).permute(0, 1, 4, 2, 3, 5)
            return pixels.reshape(b, 2 * t, h, w, c // 2).permute(0, 4, 1, 2, 3)
        return x.view(b, 2, c // 2, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c // 2, 2 * t, h, w)


def triton_ops(
    device: torch.device, dtype: torch.dtype, speed: Speed, on_degraded: Callable[[str, Fact], None] | None
) -> "TritonVaeOps | None":
    """Return the operations as Triton kernels, if a plan's `Speed` has them and they run on the device."""

    def report(reason: Fact) -> None:
        if on_degraded is not None:
            on_degraded("vae_kernels", reason)

    fast = speed.vae_kernels and speed.channels_last and triton_runs_on(device)
    return TritonVaeOps(device, dtype, report) if fast else None


class TritonVaeOps(VaeOps):
    """`VaeOps` computed by Triton kernels.

    Args:
        device, dtype: of the decoder.
        on_degraded: called once if a kernel failed; PyTorch runs from then on.
        kernels: the module with the kernels, by default `vae_kernels`; tests replace it.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, on_degraded: OnDegraded | None = None, kernels: Any = None
    ) -> None:
        self._fallback = WithFallback("execution.triton_failed", on_degraded)
        self._kernels = kernels
        super().__init__(self._with_kernel)
        self._has_convolution = dtype in {torch.float16, torch.bfloat16} and (
            kernels is not None or torch.cuda.get_device_capability(device) == constraints.HOPPER
        )

    @property
    def compile_seconds(self) -> float:
        """See `VaeOps`."""
        return self._fallback.seconds

    def supports(self, conv: nn.Conv3d) -> bool:
        """See `VaeOps`."""
        return (
            self._has_convolution
            and conv.out_channels == constraints.OUTPUTS_BY_KERNEL
            and conv.in_channels % _CHANNEL_MULTIPLE == 0
            and conv.kernel_size[1:] == _KERNEL_SIZE
        )

    def _with_kernel(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function that calls the kernel named like `plain`, or `plain` itself once a kernel has failed."""

        def kernel(*arguments: Any) -> torch.Tensor:
            self._kernels = self._kernels or import_module("runtime.families.wan.vae_kernels")
            out: torch.Tensor = getattr(self._kernels, plain.__name__)(*arguments)
            return out

        return lambda *arguments: self._fallback.run(kernel, plain, arguments)


class PyTorchVaePart:
    """The encoder or the decoder of a `diffusers.AutoencoderKLWan`, and the statistics of its latents.

    Args:
        module: its weights may be on another device until it is called.
        part: the module's encoder or decoder.
        device: the device that computes; by default, that of the weights.
    """

    def __init__(self, module: AutoencoderKLWan, part: nn.Module, device: str | torch.device | None = None) -> None:
        self._vae: Any = module
        config: Any = module.config
        parameter = next(part.parameters())
        device, shape = device or parameter.device, (1, config.z_dim, 1, 1, 1)
        # Always float32: rounding would shift all colors.
        self._mean = torch.tensor(config.latents_mean, device=device, dtype=torch.float32).view(shape)
        self._std = torch.tensor(config.latents_std, device=device, dtype=torch.float32).view(shape)
        self._dtype = parameter.dtype


class PyTorchVideoDecoder(PyTorchVaePart):
    """The decoder of a `diffusers.AutoencoderKLWan`, computed by `DecoderSteps`.

    The first latent frame is decoded alone, then any number per call. The result does not depend on that number, up to
    rounding.

    Args:
        module: its weights may be on another device until it is called.
        device: the device that computes; by default, that of the weights.
    """

    def __init__(self, module: AutoencoderKLWan, device: str | torch.device | None = None) -> None:
        super().__init__(module, module.decoder, device)
        self._patch_size: int | None = self._vae.config.patch_size
        self._steps = DecoderSteps(module.decoder)

    def compute(self, speed: Speed, on_degraded: Callable[[str, Fact], None] | None = None) -> None:
        """Apply a plan's `Speed` from the next call on; see `PyTorchDenoiser.compute`."""
        ops = triton_ops(self._mean.device, self._dtype, speed, on_degraded)
        self._steps = DecoderSteps(self._vae.decoder, channels_last=speed.channels_last, ops=ops)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self._steps.ops.compile_seconds

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if tile is None or max(latents.shape[3:]) <= tile:
            yield from self.decode_from(latents, chunk, 0, ())
        else:
            yield from self._tiled(latents, chunk, tile)

    def _tiled(self, latents: torch.Tensor, chunk: int, tile: int) -> Iterator[torch.Tensor]:
        """Decode tile by tile, each through the whole clip, so that only the caches of one tile are in memory.

        Tiles have equal sizes, overlap by a quarter, and are blended as in `AutoencoderKLWan.tiled_decode`. The clip is
        collected in RAM in float16, whose rounding error is a sixteenth of an 8-bit step.
        """
        scale = self._vae.config.scale_factor_spatial
        rows, columns = spans(latents.shape[3], tile), spans(latents.shape[4], tile)
        clip: torch.Tensor | None = None
        for row, down in zip(rows, blend_weights(rows, scale), strict=True):
            for column, across in zip(columns, blend_weights(columns, scale), strict=True):
                share = (down[:, None] * across)[None, :, :, None].to(self._mean.device)
                start = 0
                part = latents[..., row.start : row.end, column.start : column.end]
                for frames in self.decode_from(part, chunk, 0, ()):
                    if clip is None:
                        count = (latents.shape[2] - 1) * self._vae.config.scale_factor_temporal + 1
                        size = (count, latents.shape[3] * scale, latents.shape[4] * scale, frames.shape[3])
                        clip = torch.zeros(size, dtype=torch.float16)
                    end = start + len(frames)
                    place = clip[
                        start:end, row.start * scale : row.end * scale, column.start * scale : column.end * scale
                    ]
                    place += (frames * share).half().cpu()
                    start = end
                    yield clip[:0].float()
        assert clip is not None
        for start in range(0, len(clip), _TILED_FRAMES):
            yield clip[start : start + _TILED_FRAMES].float()

    @torch.inference_mode()
    def decode_from(
        self,
        latents: torch.Tensor,
        chunk: int,
        start: int,
        caches: Sequence[torch.Tensor],
        trim: Trim | None = None,
    ) -> Iterator[torch.Tensor]:
        """Decode from latent frame `start`, with the caches that an engine returned for the frames before it.

        Caches have two frames each, zeros before the clip: the convolutions pad with zeros, so the result is equal.
        `trim` crops each frame to the needed part.
        """
        vae = self._vae
        state = [cache.to(self._mean.device, self._dtype) for cache in caches]
        while start < latents.shape[2]:
            end = min(start + chunk, latents.shape[2]) if start else 1
            # Latents may be in a file: only those of one call are read.
            z = latents[:, :, start:end].to(self._mean.device, self._mean.dtype) * self._std + self._mean
            z = vae.post_quant_conv(z.to(self._dtype))
            out, state = self._steps(z, state, first=start == 0, trim=trim)
            if self._patch_size is not None:
                out = unpatchify(out, patch_size=self._patch_size)
            yield as_frames(out)
            start = end


class StripDecoder:
    """Decodes one of several strips into which the longer side of the frames is divided.

    Args:
        module: the VAE, with its weights on `device`.
        device: the device that computes.
        number, count: the number of the strip, from 0, and of all strips.
        speed: execution options.
    """

    def __init__(
        self,
        module: AutoencoderKLWan,
        device: str | torch.device,
        number: int,
        count: int,
        speed: Speed = EAGER,
    ) -> None:
        self._whole = PyTorchVideoDecoder(module, device)
        self._whole.compute(speed)
        self._blocks: list[Any] = list(cast("Any", module).decoder.up_blocks)
        self._number = number
        self._count = count

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield decoded frames in order, as `VideoDecoder.frames` does, but for one strip of each.

        Args:
            latents: of whole frames, (1, channels, latent frames, height, width).
            chunk: latent frames to decode in one call, after the first, which is always alone.

        Yields:
            (frames, height, width, 3), float32 in -1 to 1; height or width is the strip's.
        """
        axis = longer_side(latents)
        length = latents.shape[axis]
        cuts = _cuts(self._blocks, length, _strip(length, self._number, self._count))

        def trim(x: torch.Tensor, number: int) -> torch.Tensor:
            cut = cuts[number]
            return x.narrow(axis, cut.start, cut.end - cut.start)

        yield from self._whole.decode_from(latents, chunk, 0, (), trim)


def _strip(length: int, number: int, count: int) -> Span:
    return Span(length * number // count, length * (number + 1) // count)


def _cuts(blocks: list[Any], length: int, strip: Span) -> list[Span]:
    """Return the part that `Trim` keeps at each place, relative to its input there.

    Goes backwards from the strip's pixels and widens the part by what each convolution reads.

    Args:
        blocks: the decoder's up blocks.
        length: length of the divided side in latents.
        strip: the strip in latents.
    """
    doubling = [upsampler_of(block) is not None for block in blocks]
    lengths = [length]
    for doubles in doubling:
        lengths.append(2 * lengths[-1] if doubles else lengths[-1])
    scale = lengths[-1] // length
    pixels = Span(strip.start * scale, strip.end * scale)
    needed = _wider(pixels, 1, lengths[-1])  # the last convolution
    # Relative to the whole frame, from the last place to the first one.
    spans_needed = [pixels, needed]
    for block, doubles, size in zip(reversed(blocks), reversed(doubling), reversed(lengths[:-1]), strict=True):
        if doubles:
            # The convolution after the upsampling reads one more pixel on each side; each pixel becomes two.
            needed = Span((needed.start - 1) // 2, (needed.end + 2) // 2)
        needed = _wider(needed, 2 * len(block.resnets), size)
        spans_needed.append(needed)
    cuts, offset = [], 0  # of the input in the whole frame
    for span, doubles in zip(reversed(spans_needed), [*doubling, False, False], strict=True):
        cuts.append(Span(span.start - offset, span.end - offset))
        offset = 2 * span.start if doubles else span.start
    return cuts


def _wider(span: Span, by: int, length: int) -> Span:
    """Return the span, `by` longer on each side, within 0..`length`."""
    return Span(max(span.start - by, 0), min(span.end + by, length))
