"""Small animated WebP previews of a clip that is being made."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

_HEIGHT = 112
_QUALITY = 60
_STILL_QUALITY = 80


def encode_preview(rgb: np.ndarray, milliseconds_per_frame: int) -> bytes:
    """Return an animated WebP.

    Args:
        rgb: (frames, height, width, 3), -1 to 1.
        milliseconds_per_frame: how long each frame shows.
    """
    pixels = ((rgb.clip(-1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
    return encode_frames(resize(pixels), milliseconds_per_frame)


def resize(frames: np.ndarray) -> list[np.ndarray]:
    """Return frames, (n, height, width, 3) uint8, in the size of a preview."""
    size = (round(_HEIGHT * frames.shape[2] / frames.shape[1]), _HEIGHT)
    # Averages of whole pixels first: less than half of the time; a picture differs by 0.2 of 255 on average.
    images = (Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0) for frame in frames)
    return [np.asarray(image) for image in images]


def encode_frames(frames: Sequence[np.ndarray], milliseconds_per_frame: int) -> bytes:
    """Return an animated WebP of frames that `resize` made."""
    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=milliseconds_per_frame,
        loop=0,
        quality=_QUALITY,
        method=0,
    )
    return buffer.getvalue()


def still(animated: bytes) -> bytes:
    """Return the middle frame of an animated WebP, as a WebP.

    Raises:
        ValueError: if it is not a WebP.
    """
    try:
        with Image.open(io.BytesIO(animated), formats=["WEBP"]) as image:
            image.seek(getattr(image, "n_frames", 1) // 2)
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "WEBP", quality=_STILL_QUALITY)
    except (OSError, EOFError, SyntaxError) as error:
        raise ValueError("not a WebP") from error
    return buffer.getvalue()
