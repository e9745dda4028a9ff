"""A picture as it looks in a compressed video: models that were trained on frames of such videos start from it."""

import tempfile
from pathlib import Path

import numpy as np

from runtime.video.lossless import read_frames, write_frames


def recompressed(picture: np.ndarray, crf: int) -> np.ndarray:
    """Return a picture after H.264 with a constant rate factor, as diffusers' `apply_image_conditioning_crf` does.

    Args:
        picture: (height, width, 3), uint8, with even sides.

    Raises:
        MachineError: if there is no ffmpeg.
        OutputError: if ffmpeg fails, or the folder of temporary files is full.
    """
    height, width, _ = picture.shape
    encoder = ("-c:v", "libx264", "-crf", str(crf), "-preset", "veryfast", "-pix_fmt", "yuv420p", "-f", "matroska")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.mkv"
        write_frames(file, [picture[None]], width, height, 1, encoder)
        (compressed,) = read_frames(file, width, height, 1)
    return compressed
