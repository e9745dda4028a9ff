"""How a frame is cut into overlapping tiles: their positions, and how much is decoded twice."""

from dataclasses import dataclass

# As in diffusers: a quarter of a tile is its neighbour's too.
OVERLAP = 4


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
    step = tile - tile // OVERLAP
    count = -(-(length - tile) // step) + 1
    starts = [round(index * (length - tile) / (count - 1)) for index in range(count)]
    return [Span(start, start + tile) for start in starts]


def times_decoded(height: int, width: int, tile: int | None) -> float:
    """Return how often a latent of a frame is decoded on average: 1 where the frame is decoded whole (`None`).

    Args:
        height, width: of the frame, in latents.
        tile: of a tile's side, in latents.
    """
    if tile is None:
        return 1.0
    rows, columns = (sum(span.end - span.start for span in spans(side, tile)) for side in (height, width))
    return rows * columns / (height * width)
