"""A VAE that decodes one strip of each frame, exactly: what it gives is that part of the whole frame.

The decoder's first part, with attention over the whole frame, is computed whole by everybody: it is 2 % of the work.
After it there are only convolutions, which see one row or column further each. So before each block a strip is cut out
with as many neighbours as the blocks from there on look at; their edges go wrong, since a convolution pads them with
zeros, and are cut off before the next one. Nothing is sent between processes, and the causal caches are the strip's
own. At 832×480 that is 54 % of the arithmetic of Wan2.1's whole frame for each of 2, and 32 % for each of 4.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from runtime.core.plan import EAGER, Speed
from runtime.core.tiles import Span
from runtime.execution.video_decoder import PyTorchVideoDecoder


class StripDecoder:
    """Decodes strip `number` of `count`, along the longer side.

    Args:
        module: its weights on `device`.
        device: where it computes.
        speed: how.
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
        along = longer_side(latents)
        length = latents.shape[along]
        cuts = _cuts(self._blocks, length, _strip(length, self._number, self._count))

        def trim(x: torch.Tensor, number: int) -> torch.Tensor:
            cut = cuts[number]
            return x.narrow(along, cut.start, cut.end - cut.start)

        yield from self._whole.go_on(latents, chunk, 0, (), trim)


def longer_side(latents: torch.Tensor) -> int:
    """Return the axis of latents, (…, height, width), along which frames are cut."""
    return 4 if latents.shape[4] >= latents.shape[3] else 3


def _strip(length: int, number: int, count: int) -> Span:
    return Span(length * number // count, length * (number + 1) // count)


def _cuts(blocks: list[Any], length: int, strip: Span) -> list[Span]:
    """Return what is kept at each place of `vae_steps.Trim`, in positions of what is there."""
    doubling = [_upsampler(block) is not None for block in blocks]
    lengths = [length]
    for doubles in doubling:
        lengths.append(2 * lengths[-1] if doubles else lengths[-1])
    scale = lengths[-1] // length
    kept = Span(strip.start * scale, strip.end * scale)
    needed = _wider(kept, 1, lengths[-1])  # the last convolution
    # In positions of the whole frame, from the end.
    wanted = [kept, needed]
    for block, doubles, size in zip(reversed(blocks), reversed(doubling), reversed(lengths[:-1]), strict=True):
        if doubles:
            # The convolution behind the doubling looks one further, where two positions come from one.
            needed = Span((needed.start - 1) // 2, (needed.end + 2) // 2)
        needed = _wider(needed, 2 * len(block.resnets), size)
        wanted.append(needed)
    cuts, first = [], 0
    for span, doubles in zip(reversed(wanted), [*doubling, False, False], strict=True):
        cuts.append(Span(span.start - first, span.end - first))
        first = 2 * span.start if doubles else span.start
    return cuts


def _wider(span: Span, by: int, length: int) -> Span:
    return Span(max(span.start - by, 0), min(span.end + by, length))


def _upsampler(block: Any) -> Any:
    """Return what doubles a block's side: Wan2.1's blocks have a list for it, TI2V-5B's a module."""
    several = getattr(block, "upsamplers", None)
    return several[0] if several is not None else getattr(block, "upsampler", None)
