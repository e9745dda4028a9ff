"""A VAE that decodes one strip of each frame, exactly: what it gives is that part of the whole frame.

The decoder's first part, with attention over the whole frame, is computed whole by everybody: it is 2 % of the work.
After it there are only convolutions, which see one row or column further each. So before each block a strip is cut out
with as many neighbours as the blocks from there on look at; their edges go wrong, since a convolution pads them with
zeros, and are cut off before the next one. Nothing is sent between processes, and the causal caches are the strip's
own. At 832×480 that is 54 % of the arithmetic of Wan2.1's whole frame for each of 2, and 32 % for each of 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import CACHE_T, AutoencoderKLWan, unpatchify

from runtime.components.vae_steps import as_frames
from runtime.core.tiles import Span


@dataclass(frozen=True)
class _Level:
    """One block of the decoder: what it is given, in its own positions, and whether it doubles the side."""

    given: Span
    doubles: bool


class StripDecoder:
    """Decodes strip `number` of `count`, along the longer side.

    Args:
        module: its weights on `device`.
        device: where it computes.
    """

    def __init__(self, module: AutoencoderKLWan, device: str | torch.device, number: int, count: int) -> None:
        self._vae: Any = module
        self._number = number
        self._count = count
        config: Any = module.config
        parameter = next(module.decoder.parameters())
        shape = (1, config.z_dim, 1, 1, 1)
        # In float32 always: rounded, they would shift every colour.
        self._mean = torch.tensor(config.latents_mean, device=device, dtype=torch.float32).view(shape)
        self._std = torch.tensor(config.latents_std, device=device, dtype=torch.float32).view(shape)
        self._dtype = parameter.dtype

    @torch.inference_mode()
    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield decoded frames in order, as `VideoDecoder.frames` does, but for one strip of each.

        Args:
            latents: of whole frames, (1, channels, latent frames, height, width).
            chunk: latent frames to decode in one call, after the first, which is always alone.

        Yields:
            (frames, height, width, 3), float32 in -1 to 1; height or width is the strip's.
        """
        vae = self._vae
        z = latents.to(self._mean.device, self._mean.dtype) * self._std + self._mean
        z = vae.post_quant_conv(z.to(self._dtype))
        along = longer_side(z)
        levels, kept = _levels(vae.decoder, z.shape[along], _strip(z.shape[along], self._number, self._count))
        held: list[Any] = [None] * vae._cached_conv_counts["decoder"]
        start = 0
        while start < z.shape[2]:
            end = min(start + chunk, z.shape[2]) if start else 1
            out = _decoded(vae.decoder, z[:, :, start:end], held, along, levels, kept, first=start == 0)
            if vae.config.patch_size is not None:
                out = unpatchify(out, patch_size=vae.config.patch_size)
            yield as_frames(out)
            start = end


def longer_side(latents: torch.Tensor) -> int:
    """Return the axis of latents, (…, height, width), along which frames are cut."""
    return 4 if latents.shape[4] >= latents.shape[3] else 3


def _strip(length: int, number: int, count: int) -> Span:
    return Span(length * number // count, length * (number + 1) // count)


def _levels(decoder: Any, length: int, strip: Span) -> tuple[list[_Level], Span]:
    """Return what each block is to be given, and what is kept at the end, in the positions of the last block."""
    blocks = list(decoder.up_blocks)
    doubling = [_upsampler(block) is not None for block in blocks]
    lengths = [length]
    for doubles in doubling:
        lengths.append(2 * lengths[-1] if doubles else lengths[-1])
    scale = lengths[-1] // length
    kept = Span(strip.start * scale, strip.end * scale)
    needed = _wider(kept, 1, lengths[-1])  # the last convolution
    levels: list[_Level] = []
    for block, doubles, size in zip(reversed(blocks), reversed(doubling), reversed(lengths[:-1]), strict=True):
        if doubles:
            # The convolution behind the doubling looks one further, where two positions come from one.
            needed = Span((needed.start - 1) // 2, (needed.end + 2) // 2)
        needed = _wider(needed, 2 * len(block.resnets), size)
        levels.insert(0, _Level(needed, doubles))
    return levels, kept


def _wider(span: Span, by: int, length: int) -> Span:
    return Span(max(span.start - by, 0), min(span.end + by, length))


def _upsampler(block: Any) -> Any:
    """Return what doubles a block's side: Wan2.1's blocks have a list for it, TI2V-5B's a module."""
    several = getattr(block, "upsamplers", None)
    return several[0] if several is not None else getattr(block, "upsampler", None)


def _decoded(
    decoder: Any, z: torch.Tensor, caches: list[Any], along: int, levels: list[_Level], kept: Span, *, first: bool
) -> torch.Tensor:
    """Decode latent frames as `WanDecoder3d.forward` does, with what is not needed cut off on the way."""
    index = [0]
    x = _convolved(decoder.conv_in, z, caches, index)
    x = decoder.mid_block(x, feat_cache=caches, feat_idx=index)
    there = Span(0, x.shape[along])
    for block, level in zip(decoder.up_blocks, levels, strict=True):
        x, there = _cut(x, along, there, level.given), level.given
        x = block(x, feat_cache=caches, feat_idx=index, first_chunk=first)
        if level.doubles:
            there = Span(2 * there.start, 2 * there.end)
    x = _cut(x, along, there, Span(max(kept.start - 1, there.start), min(kept.end + 1, there.end)))
    there = Span(max(kept.start - 1, there.start), min(kept.end + 1, there.end))
    x = decoder.nonlinearity(decoder.norm_out(x))
    return _cut(_convolved(decoder.conv_out, x, caches, index), along, there, kept)


def _cut(x: torch.Tensor, along: int, there: Span, wanted: Span) -> torch.Tensor:
    return x.narrow(along, wanted.start - there.start, wanted.end - wanted.start)


def _convolved(convolution: Any, x: torch.Tensor, caches: list[Any], index: list[int]) -> torch.Tensor:
    """Run a causal convolution with its cache, as `WanDecoder3d.forward` does for its first and last."""
    number = index[0]
    cache, before = x[:, :, -CACHE_T:].clone(), caches[number]
    if cache.shape[2] < CACHE_T and before is not None:
        cache = torch.cat([before[:, :, -1:], cache], dim=2)
    out: torch.Tensor = convolution(x, before)
    caches[number] = cache
    index[0] += 1
    return out
