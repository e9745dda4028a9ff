"""Decodes a clip in overlapping groups of latent frames and blends the overlaps, see `models.vae_groups`."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from runtime.models.vae_groups import GROUP, STRIDE, groups_of


class GroupDecoder(Protocol):
    """A decoder of groups of latent frames, in PyTorch."""

    def group(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """Return the frames of a group, (frames, height, width, 3), float32.

        Args:
            latents: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            tile: see `execution.components.VideoDecoder.frames`.
        """


def blended_groups(latents: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the frames of a clip, (frames, height, width, 3), as they are complete.

    Source: `diffusers.AutoencoderKLHunyuanVideo._temporal_tiled_decode`.

    Args:
        latents: (1, channels, latent frames, height, width).
        decode: returns the frames of a group, in memory of their own.
    """
    overlap: torch.Tensor | None = None
    for group in groups_of(latents.shape[2]):
        frames = decode(latents[:, :, group.start : group.stop])
        scale = (frames.shape[0] - 1) // max(len(group) - 1, 1)
        stride, end = STRIDE * scale, (GROUP - 1) * scale
        # The first frame of each group is the last latent frame of another one, alone.
        first = 1 if overlap is None else 0
        frames = frames if overlap is None else _blended(overlap, frames[1:])
        overlap = frames[first + stride : first + end].clone()
        yield frames[: first + stride] if len(group) == GROUP else frames


def _blended(before: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Return frames whose first ones fade in over those before."""
    count = min(len(before), len(frames))
    shares = torch.arange(count, device=frames.device).view(-1, 1, 1, 1) / count
    return torch.cat([before[:count] * (1 - shares) + frames[:count] * shares, frames[count:]])
