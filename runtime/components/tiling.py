"""Cuts a frame into overlapping tiles and says how much of each counts where. Knows nothing about decoders."""

from dataclasses import dataclass

import torch

# As `AutoencoderKLWan.enable_tiling`: a quarter of a tile is its neighbour's too.
_OVERLAP = 4


@dataclass(frozen=True)
class Span:
    """A tile's place along one side, in latents."""

    start: int
    end: int


def spans(length: int, tile: int) -> list[Span]:
    """Return equal tiles, evenly spaced, that cover `length` and overlap by at least a quarter; one if it fits.

    Args:
        length: of a frame's side, in latents.
        tile: of a tile's side, in latents; at least 4, so that a quarter of it is something.
    """
    if length <= tile:
        return [Span(0, length)]
    step = tile - tile // _OVERLAP
    count = -(-(length - tile) // step) + 1
    starts = [round(index * (length - tile) / (count - 1)) for index in range(count)]
    return [Span(start, start + tile) for start in starts]


def shares(placed: list[Span], scale: int) -> list[torch.Tensor]:
    """Return each tile's share of every pixel that it covers along one side; at any pixel they sum to 1.

    A tile fades in and out over its overlap, but not at the frame's own edges.

    Args:
        placed: from `spans`.
        scale: pixels of a latent.

    Returns:
        One vector a tile, float32.
    """
    first, last = placed[0].start, placed[-1].end
    ramp = max((placed[0].end - placed[0].start) // _OVERLAP, 1) * scale
    weights = []
    for span in placed:
        size = (span.end - span.start) * scale
        rising = (torch.arange(size, dtype=torch.float32) + 0.5) / ramp
        weight = torch.ones(size)
        if span.start > first:
            weight = torch.minimum(weight, rising)
        if span.end < last:
            weight = torch.minimum(weight, rising.flip(0))
        weights.append(weight)
    total = torch.zeros((last - first) * scale)
    for span, weight in zip(placed, weights, strict=True):
        total[span.start * scale : span.end * scale] += weight
    return [weight / total[span.start * scale : span.end * scale] for span, weight in zip(placed, weights, strict=True)]
