"""Overlapping tiles of a frame: their positions, and how often a latent is decoded on average."""

from dataclasses import dataclass

# A tile overlaps its neighbor by a quarter, as in diffusers.
OVERLAP = 4


@dataclass(frozen=True)
class Span:
    """Position of a tile along one side, in latents."""

    start: int
    end: int


def spans(length: int, tile: int) -> list[Span]:
    """Return equal tiles, evenly spaced, that cover `length` and overlap by at least a quarter; one if it fits.

    Args:
        length: length of the side in latents.
        tile: length of a tile in latents, at least 4.
    """
    if length <= tile:
        return [Span(0, length)]
    step = tile - tile // OVERLAP
    count = -(-(length - tile) // step) + 1
    starts = [round(index * (length - tile) / (count - 1)) for index in range(count)]
    return [Span(start, start + tile) for start in starts]


def call_size(height: int, width: int, tile: int | None) -> tuple[int, int]:
    """Return (height, width) of what one call computes: the frame, or a tile of it, in the unit of all three."""
    return (height, width) if tile is None else (min(height, tile), min(width, tile))


def times_decoded(height: int, width: int, tile: int | None) -> float:
    """Return how often a latent is decoded on average.

    Args:
        height, width: size of the frame in latents.
        tile: length of a tile in latents; `None` without tiling.
    """
    if tile is None:
        return 1.0
    rows, columns = (sum(span.end - span.start for span in spans(side, tile)) for side in (height, width))
    return rows * columns / (height * width)
