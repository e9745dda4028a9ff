"""Latents to a small animated picture, so that a clip shows itself while it is made."""

import io

import numpy as np
from PIL import Image

_HEIGHT = 112
_QUALITY = 60


def encode_preview(rgb: np.ndarray, milliseconds_per_frame: int) -> bytes:
    """Return an animated WebP.

    Args:
        rgb: (frames, height, width, 3), -1 to 1.
        milliseconds_per_frame: how long each frame shows.
    """
    pixels = ((rgb.clip(-1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
    width = round(_HEIGHT * rgb.shape[2] / rgb.shape[1])
    images = [Image.fromarray(frame).resize((width, _HEIGHT), Image.Resampling.BICUBIC) for frame in pixels]
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
