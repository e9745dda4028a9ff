"""Control frames of pictures whose edges are known."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from runtime.core.request import BY_MODEL, OFF, PREPROCESSING
from runtime.video.preprocessing import preprocessed

SIZE = (160, 96)


def drawn(*, contrast: int = 255, noise: float = 0.0) -> Image.Image:
    """A bright ellipse on black."""
    picture = Image.new("RGB", SIZE)
    ImageDraw.Draw(picture).ellipse((40, 20, 120, 76), fill=(contrast, contrast, contrast))
    spread = np.random.default_rng(1).normal(0, noise, (SIZE[1], SIZE[0], 3))
    return Image.fromarray(np.clip(np.asarray(picture) + spread, 0, 255).astype(np.uint8))


def lines(frame: Image.Image) -> np.ndarray:
    return np.asarray(frame)[..., 0] > 127


@pytest.mark.parametrize("picture", [drawn(), drawn(contrast=90), drawn(noise=6)], ids=["bright", "dim", "noisy"])
def test_edges_are_a_closed_thin_line_around_a_shape(picture: Image.Image) -> None:
    made = preprocessed(picture, "edges")
    line = lines(made)
    assert (made.size, made.mode) == (SIZE, "RGB")
    # All of it is within two pixels of the ellipse, and goes around it once.
    y, x = np.nonzero(line)
    radius = np.hypot((x - 80) / 40.5, (y - 48) / 28.5)
    assert abs(radius - 1).max() < 2.5 / 28
    angles = np.histogram(np.arctan2(y - 48, x - 80), 60)[0]
    assert angles.min() >= 1
    # No block of two by two pixels, so it is thin.
    assert line.sum() < 1.3 * np.pi * (40.5 + 28.5)
    # Filled from the corner, the inside is not reached.
    filled = Image.fromarray(line.astype(np.uint8) * 255)
    ImageDraw.floodfill(filled, (0, 0), 128)
    assert filled.getpixel((80, 48)) == 0


def test_weak_edges_count_where_they_continue_strong_ones() -> None:
    ramp = np.zeros((64, 128), dtype=np.float32)
    # One edge whose contrast falls from left to right, and a faint one by itself.
    ramp[32:] = np.linspace(160, 40, 128)[None]
    alone = np.zeros_like(ramp)
    alone[32:] = 45
    strong, faint = (Image.fromarray(values.astype(np.uint8)).convert("RGB") for values in (ramp, alone))
    assert np.logical_or.reduce(lines(preprocessed(strong, "edges"))[30:34])[4:-4].all()
    assert not lines(preprocessed(faint, "edges")).any()


def test_nothing_has_no_edges() -> None:
    assert not lines(preprocessed(Image.new("RGB", SIZE, (90, 120, 30)), "edges")).any()
    assert lines(preprocessed(Image.new("RGB", SIZE), "scribble")).all()


def test_a_scribble_is_thick_and_dark_on_white() -> None:
    made = lines(preprocessed(drawn(noise=6), "scribble"))
    assert 0.7 < made.mean() < 0.97
    dark = ~made
    assert dark.sum() > 2 * lines(preprocessed(drawn(), "edges")).sum()


def test_gray_is_the_brightness_and_blur_keeps_colors() -> None:
    picture = Image.linear_gradient("L").convert("RGB").resize(SIZE)
    ImageDraw.Draw(picture).rectangle((0, 0, 80, 96), fill=(200, 30, 60))
    gray, blurred = (np.asarray(preprocessed(picture, kind)).astype(int) for kind in ("gray", "blur"))
    assert (gray == np.asarray(picture.convert("L"))[..., None]).all()
    assert abs(blurred[:, :60] - np.asarray(picture)[:, :60]).max() < 8
    # The edge is spread.
    assert 4 <= (abs(np.diff(blurred[48, :, 0])) > 4).sum() < 30


@pytest.mark.parametrize("kind", [kind for kind in PREPROCESSING if kind not in {OFF, *BY_MODEL}])
@pytest.mark.parametrize("size", [(16, 16), (1, 2), (832, 480)])
def test_frames_keep_their_size(kind: str, size: tuple[int, int]) -> None:
    assert preprocessed(Image.radial_gradient("L").convert("RGB").resize(size), kind).size == size
