"""Blending of overlapping tiles of a frame. Independent of decoders."""

import torch

from runtime.core.tiles import OVERLAP, Span


def shares(placed: list[Span], scale: int) -> list[torch.Tensor]:
    """Return each tile's share of every pixel that it covers along one side; at any pixel they sum to 1.

    A tile fades in and out over its overlap, but not at the frame's own edges.

    Args:
        placed: from `core.tiles.spans`.
        scale: pixels of a latent.

    Returns:
        One vector a tile, float32.
    """
    first, last = placed[0].start, placed[-1].end
    ramp = max((placed[0].end - placed[0].start) // OVERLAP, 1) * scale
    weights = []
    for span in placed:
        size = (span.end - span.start) * scale
        rising = (torch.arange(size, dtype=torch.float32) + 0.5) / ramp
        weight = torch.ones(size, dtype=torch.float32)
        if span.start > first:
            weight = torch.minimum(weight, rising)
        if span.end < last:
            weight = torch.minimum(weight, rising.flip(0))
        weights.append(weight)
    total = torch.zeros((last - first) * scale, dtype=torch.float32)
    for span, weight in zip(placed, weights, strict=True):
        total[span.start * scale : span.end * scale] += weight
    return [weight / total[span.start * scale : span.end * scale] for span, weight in zip(placed, weights, strict=True)]
