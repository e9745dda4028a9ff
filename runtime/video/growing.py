"""An MP4 of the parts of a video that are finished: each part is encoded once, and joining encodes nothing again.

A part is an H.264 stream without a container, which refers to no other part, so parts can be joined in any order.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from runtime.video.lossless import feed_ffmpeg, write_frames
from runtime.video.mp4 import TO_BT709

# Frames are in the order of time, without which a stream has no times.
_ENCODER = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-bf", "0", "-pix_fmt", "yuv420p", "-f", "h264")
_CHUNK_BYTES = 1 << 16


def write_part(target: Path, frames: Iterable[np.ndarray], width: int, height: int, fps: int) -> None:
    """Encode a part.

    Args:
        target: replaced only when the new file is complete.
        frames: chunks of frames, (n, height, width, 3) uint8.

    Raises: see `lossless.write_frames`.
    """
    write_frames(target, frames, width, height, fps, ("-vf", TO_BT709, *_ENCODER))


def join_parts(target: Path, parts: Iterable[Path], fps: int) -> None:
    """Write an MP4 of parts in the order of time.

    Args:
        target: the MP4, replaced only when the new file is complete.
        parts: files of `write_part`.

    Raises:
        OutputError: if a part cannot be read, the disk is full, or the file cannot be written.
        MachineError: if there is no ffmpeg.
    """
    options = ["-framerate", str(fps), "-f", "h264", "-i", "pipe:0", "-c", "copy", "-movflags", "+faststart"]
    feed_ffmpeg(target, [*options, "-f", "mp4"], _contents(parts), sync=False)


def _contents(parts: Iterable[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data
