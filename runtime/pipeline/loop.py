"""Frames of a video that can be played again and again without a jump."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from runtime.video.mp4 import cannot_write


class Loop:
    """Passes frames on, and then those that lead back to the first one; use as a context manager.

    A video that ends on its first frame loses its last one, which would be shown twice. Any other is played backwards.
    Its frames are in a file meanwhile, so that memory does not depend on their number.

    Args:
        output: the video, next to which the file is.
        plays_back: whether the video is played backwards.
    """

    def __init__(self, output: Path, *, plays_back: bool) -> None:
        self._output, self._plays_back = output, plays_back
        self._count, self._last = 0, np.empty((0, 0, 0, 0), np.uint8)

    def __enter__(self) -> "Loop":
        """Open the file.

        Raises:
            OutputError: if that is not possible.
        """
        try:
            self._file = tempfile.TemporaryFile(dir=self._output.parent)
        except OSError as error:
            raise cannot_write(self._output, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file."""
        self._file.close()

    def add(self, frames: np.ndarray) -> np.ndarray:
        """Return the frames to show now.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.

        Raises:
            OutputError: if the disk is full.
        """
        if not self._plays_back:
            frames = np.concatenate([self._last.reshape(-1, *frames.shape[1:]), frames])
            self._last = frames[-1:]
            return frames[:-1]
        try:
            self._file.write(np.ascontiguousarray(frames).data)
        except OSError as error:
            raise cannot_write(self._output, error) from error
        self._count, self._last = self._count + len(frames), frames[-1:]
        return frames

    def back(self) -> Iterator[np.ndarray]:
        """Yield the frames between the last and the first one, backwards, one at a time."""
        shape, size = self._last.shape, self._last.nbytes
        for number in range(self._count - 2, 0, -1):
            self._file.seek(number * size)
            yield np.frombuffer(self._file.read(size), np.uint8).reshape(shape)
