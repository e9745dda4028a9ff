"""The clip of a video's first frames, to be watched while the others are decoded.

It is a second, quick encoding of the frames that the video's own encoder gets, which looks ahead too far to be watched
meanwhile. It is only for watching: a failure is logged, and the video is as it would be without it.
"""

import logging
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from runtime.core.errors import OutputError, TandemError
from runtime.core.plan import ExecutionPlan
from runtime.pipeline.files import CLIP, clip_name, remove_older_clips
from runtime.video.growing import GrowingStream

# The clip is written only if decoding takes so much longer; otherwise nobody sees it before the video.
_WORTHWHILE_SECONDS = 3.0
# The shortest clip, in seconds of the video.
_SHORTEST_SECONDS = 1.0
# Minimum interval of the clips, and the maximum share of the time for writing them.
_INTERVAL_SECONDS, _SHARE = 1.0, 0.05
# Bytes per pixel of the stream and the clips that exist at once.
_RATE = 0.3
# Removed with the partial files of a killed process.
_STREAM = "stream.h264.tmp"

logger = logging.getLogger(__name__)


class GrowingClip:
    """Writes the clips of one decoding, each with more frames than the one before.

    Use as a context manager: an exception removes the clips; otherwise the newest stays with the job's progress.

    Args:
        folder: of the job's checkpoints; `None` writes nothing.
    """

    def __init__(self, folder: Path | None, plan: ExecutionPlan) -> None:
        self._folder = None if folder is None else folder / CLIP
        self._plan = plan
        self._exit = ExitStack()
        self._stream: GrowingStream | None = None
        # The first chunk, and when it came: how long decoding takes is known when the second one comes.
        self._first: tuple[np.ndarray, float] | None = None
        self._ended = folder is None
        self._received = self._playable = 0
        self._next = 0.0

    def __enter__(self) -> "GrowingClip":
        """Remove the clips of an earlier decoding."""
        self._remove()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the encoder."""
        self._end()
        if kind is not None:
            self._remove()

    def add(self, frames: np.ndarray) -> int:
        """Encode frames; return how many frames from the start can be watched.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.
        """
        if not self._ended:
            try:
                self._add(frames, time.monotonic())
            except (OSError, TandemError) as error:
                logger.warning("The clip of the first frames could not be written: %s", error)
                self._end()
        return self._playable

    def _add(self, frames: np.ndarray, now: float) -> None:
        self._received += len(frames)
        frames_left = self._plan.frames - self._received
        if self._stream is None:
            if self._first is None:
                self._first = frames, now
                return
            first, began = self._first
            self._first = None
            if frames_left * (now - began) / len(frames) < _WORTHWHILE_SECONDS:
                self._end()
                return
            self._stream = self._started()
            self._stream.write(first)
        self._stream.write(frames)
        if frames_left and now >= self._next:
            self._save(self._stream, now)

    def _started(self) -> GrowingStream:
        """Start the encoder.

        Raises:
            OutputError: if the disk is too small, or the folder cannot be written.
        """
        plan = self._plan
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        needs, free = round(plan.width * plan.height * plan.frames * _RATE), shutil.disk_usage(self._folder).free
        if free < needs:
            raise OutputError("video.disk_too_small", folder=self._folder, needs=needs, free=free)
        stream = GrowingStream(self._folder / _STREAM, plan.width, plan.height, plan.fps)
        self._exit.enter_context(stream)
        return stream

    def _save(self, stream: GrowingStream, now: float) -> None:
        assert self._folder is not None
        frames = stream.frames
        if frames <= self._playable or frames < _SHORTEST_SECONDS * self._plan.fps:
            return
        stream.save(self._folder / clip_name(frames))
        self._playable = frames
        remove_older_clips(self._folder)
        ended = time.monotonic()
        self._next = ended + max(_INTERVAL_SECONDS, (ended - now) / _SHARE)

    def _end(self) -> None:
        self._ended, self._first = True, None
        self._exit.close()
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / _STREAM).unlink(missing_ok=True)

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
