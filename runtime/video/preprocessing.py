"""Control frames of a video's frames, without a model: edges, scribbles, gray and blurred frames."""

import math

import numpy as np
from PIL import Image, ImageFilter, ImageOps

# Of a mask's values, above which a pixel changes: diffusers compares values of 0 to 1 with 0.5.
CHANGES_ABOVE = 127
# Of what changes in a mask; and of what is not known of a control frame, as in the example of diffusers'
# `WanVACEPipeline`.
CHANGED, UNKNOWN = 255, 128
# Of Canny's method: the blur before it, in pixels, and the change of a color, of 255, within that many pixels that
# begins an edge, and that continues one.
_BLUR, _STRONG, _WEAK = 1.4, 22.0, 8.0
# A scribble has fewer and thicker lines: the frame is blurred more, and its edges are so many pixels wide.
_SCRIBBLE_BLUR, _SCRIBBLE_WIDTH = 3.0, 3
# A blurred frame keeps about so many different places along its shorter side.
_PLACES = 24
# The next pixel, as (y, x), in each of four directions of the slope.
_NEXT = ((0, 1), (1, 1), (1, 0), (1, -1))


def control_frame(frame: Image.Image, kind: str, mask: Image.Image | None) -> Image.Image:
    """Return what `preprocessed` makes of a frame; of one with a mask, of mode L, where it changes."""
    return within_mask(preprocessed(frame, kind), frame, mask)


def within_mask(made: Image.Image, frame: Image.Image, mask: Image.Image | None) -> Image.Image:
    """Return what was made of a frame, where a mask of mode L changes it; without one, everywhere."""
    return made if mask is None else Image.composite(made, frame, changes_of(mask))


def changes_of(mask: Image.Image) -> Image.Image:
    """Return where a mask changes a frame: 255 there, else 0. Both have mode L."""
    return mask.point([CHANGED if value > CHANGES_ABOVE else 0 for value in range(256)])


def preprocessed(frame: Image.Image, kind: str) -> Image.Image:
    """Return the control frame of a frame, both RGB and of one size.

    Args:
        kind: "edges" are white lines on black (Canny), "scribble" thick black lines on white, "gray" is the brightness,
            "blur" leaves colors and large shapes; none of `core.request.BY_MODEL`.
    """
    if kind == "blur":
        return frame.filter(ImageFilter.GaussianBlur(min(frame.size) / _PLACES / 2))
    if kind == "gray":
        return frame.convert("L").convert("RGB")
    if kind == "edges":
        return Image.fromarray(edges(frame, _BLUR)).convert("RGB")
    lines = Image.fromarray(edges(frame, _SCRIBBLE_BLUR)).filter(ImageFilter.MaxFilter(_SCRIBBLE_WIDTH))
    return ImageOps.invert(lines).convert("RGB")


def edges(frame: Image.Image, blur: float) -> np.ndarray:
    """Return the edges of an RGB image, (height, width) uint8, 255 on lines one pixel wide, else 0.

    The method is Canny's: the slope of the blurred colors, at each pixel of the color that changes most, is kept where
    it is largest across an edge, and weak parts count where they continue strong ones. Source: J. Canny, A
    Computational Approach to Edge Detection, 1986.

    Args:
        blur: standard deviation of the Gaussian, in pixels.
    """
    colors = np.asarray(frame.filter(ImageFilter.GaussianBlur(blur)), dtype=np.float32) * blur
    padded = np.pad(colors, ((1, 1), (1, 1), (0, 0)), mode="edge")
    down, right = (padded[2:, 1:-1] - padded[:-2, 1:-1]) / 2, (padded[1:-1, 2:] - padded[1:-1, :-2]) / 2
    most = np.hypot(down, right).argmax(2)[..., None]
    down, right = (np.take_along_axis(values, most, 2)[..., 0] for values in (down, right))
    slope = np.hypot(down, right)
    direction = np.round(np.arctan2(down, right) / (math.pi / 4)).astype(np.int64) % len(_NEXT)
    around = np.pad(slope, 1)
    height, width = slope.shape
    ridge = np.zeros(slope.shape, dtype=bool)
    for number, (y, x) in enumerate(_NEXT):
        before = around[1 - y : 1 - y + height, 1 - x : 1 - x + width]
        after = around[1 + y : 1 + y + height, 1 + x : 1 + x + width]
        # Of two neighbours of the same slope one is kept.
        ridge |= (direction == number) & (slope > before) & (slope >= after)
    line = _continued(ridge & (slope >= _STRONG), ridge & (slope >= _WEAK))
    return line.astype(np.uint8) * 255


def _continued(strong: np.ndarray, weak: np.ndarray) -> np.ndarray:
    """Return strong pixels and the weak ones that are connected with them."""
    # With a border, so that pixels have all neighbours; one after the other.
    line, able = (np.pad(pixels, 1).ravel() for pixels in (strong, weak))
    width = strong.shape[1] + 2
    neighbours = np.array([y * width + x for y in (-1, 0, 1) for x in (-1, 0, 1)])
    new = np.flatnonzero(line)
    while new.size:
        around = (new[:, None] + neighbours).ravel()
        new = np.unique(around[able[around] & ~line[around]])
        line[new] = True
    return line.reshape(-1, width)[1:-1, 1:-1]
