"""An MP4 of the part of a video that is finished, to be watched while the rest is made.

Frames are encoded once, as an H.264 stream without a container; an MP4 of it is written without encoding again. The
frames come in finished parts of the video, each a file of its own that refers to no other, so that parts can be joined
in any order; or one by one from the start, in one file that grows.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from runtime.video.lossless import feed_ffmpeg, write_frames
from runtime.video.mp4 import TO_BT709, FrameEncoder

# Frames are in the order of time, without which a stream has no times.
_H264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-bf", "0", "-pix_fmt", "yuv420p", "-f", "h264")
# A frame is in the file as soon as it is encoded, and begins with a delimiter.
_AT_ONCE = ("-tune", "zerolatency", "-aud", "1", "-flush_packets", "1")
# A start code and a NAL unit of type 9; H.264 has no start codes within a NAL unit.
_DELIMITER = re.compile(rb"\x00\x00\x00\x01\x09")
_CHUNK_BYTES = 1 << 16


def write_part(target: Path, frames: Iterable[np.ndarray], width: int, height: int, fps: int) -> None:
    """Encode a part.

    Args:
        target: replaced only when the new file is complete.
        frames: chunks of frames, (n, height, width, 3) uint8.

    Raises: see `lossless.write_frames`.
    """
    write_frames(target, frames, width, height, fps, ("-vf", TO_BT709, *_H264))


def join_parts(target: Path, parts: Iterable[Path], fps: int) -> None:
    """Write an MP4 of parts in the order of time.

    Args:
        target: the MP4, replaced only when the new file is complete.
        parts: files of `write_part`.

    Raises:
        OutputError: if a part cannot be read, the disk is full, or the file cannot be written.
        MachineError: if there is no ffmpeg.
    """
    _write_mp4(target, (data for part in parts for data in _contents(part, part.stat().st_size)), fps)


class GrowingStream(FrameEncoder):
    """Encodes a video from its start, and writes MP4s of the frames that are encoded so far.

    Args:
        file: of the stream.
        width, height, fps: see `FrameEncoder`.
    """

    def __init__(self, file: Path, width: int, height: int, fps: int) -> None:
        super().__init__(file, width, height, fps, (*_AT_ONCE, *_H264), file)
        self._file, self._fps = file, fps
        self._bytes = self._scanned = self._delimiters = 0

    @property
    def frames(self) -> int:
        """The number of frames that are complete in the file: all before the last delimiter."""
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._scanned)
                data = file.read()
            starts = [match.start() for match in _DELIMITER.finditer(data)]
            if starts:
                self._delimiters += len(starts)
                self._bytes = self._scanned + starts[-1]
                self._scanned = self._bytes + 1
        return max(self._delimiters - 1, 0)

    def save(self, target: Path) -> None:
        """Write an MP4 of the frames that `frames` has counted.

        Args:
            target: replaced only when the new file is complete.

        Raises: see `join_parts`.
        """
        _write_mp4(target, _contents(self._file, self._bytes), self._fps)


def _write_mp4(target: Path, stream: Iterable[bytes], fps: int) -> None:
    """Write an MP4 of an H.264 stream."""
    options = ["-framerate", str(fps), "-f", "h264", "-i", "pipe:0", "-c", "copy", "-movflags", "+faststart"]
    feed_ffmpeg(target, [*options, "-f", "mp4"], stream, sync=False)


def _contents(file: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file."""
    with file.open("rb") as opened:
        while size > 0 and (data := opened.read(min(_CHUNK_BYTES, size))):
            size -= len(data)
            yield data
