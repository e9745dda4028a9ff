"""Frames to H.264 in MP4: a bounded queue and a thread before ffmpeg; no half file survives.

Two files are written in a hidden folder beside the target: the stream as it comes, then a copy of it with the index in
front (faststart) and the metadata, which holds timings that are known only at the end. The copy is renamed over the
target. A folder that a killed process left is removed by the next writer.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from runtime.core.errors import OutputError
from runtime.video.ffmpeg import failure, find_ffmpeg
from runtime.video.metadata import to_ffmetadata

_QUEUED_CHUNKS = 4
_LINES_KEPT = 50
SCRATCH = ".tandem-"
LOCK = "lock"
# Between making its folder and locking it, a writer takes milliseconds.
_STARTING_SECONDS = 60.0
# A small picture is shown enlarged, where compression shows; there it costs little to have less of it.
_CRF, _SMALL_CRF = "17", "10"
_SMALL_PIXELS = 320 * 240
# Studio-range BT.709 is what players assume; said in the stream, so that colours survive.
_BT709 = "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"


class VideoWriter:
    """Writes one MP4.

    Use as a context manager: `write` chunks of frames, then `finish`. Leaving without `finish` removes every trace.

    Args:
        target: the MP4 to write, replaced only when the new one is whole.
        width, height: of the frames, in pixels.
        fps: frames per second.
    """

    def __init__(self, target: Path, width: int, height: int, fps: int) -> None:
        self._target = target
        self._ffmpeg = find_ffmpeg()
        self._size = (width, height)
        self._fps = fps
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_CHUNKS)
        self._error: OutputError | None = None
        # The disk may be full: what ffmpeg says is kept in memory.
        self._said: deque[str] = deque(maxlen=_LINES_KEPT)

    def __enter__(self) -> "VideoWriter":
        """Start ffmpeg.

        Raises:
            OutputError: if the target's folder cannot be written.
        """
        check_target(self._target)
        try:
            sweep(self._target.parent)
            self._folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=self._target.parent))
            self._lock = FileLock(self._folder / LOCK)
            self._lock.acquire()
        except OSError as error:
            raise _cannot_write(self._target, error) from error
        width, height = self._size
        command = [self._ffmpeg, "-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
        command += ["-s", f"{width}x{height}", "-r", str(self._fps), "-i", "pipe:0"]
        crf = _SMALL_CRF if width * height <= _SMALL_PIXELS else _CRF
        command += ["-vf", f"scale=out_color_matrix=bt709:out_range=tv,{_BT709}", "-c:v", "libx264", "-crf", crf]
        command += ["-preset", "medium", "-pix_fmt", "yuv420p", str(self._folder / "stream.mp4")]
        # Its own process group: Ctrl-C reaches us, and we end it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, name="video-log", daemon=True)
        self._listener.start()
        self._thread = threading.Thread(target=self._feed, name="video-writer", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop ffmpeg if it still runs and remove what is not the finished video."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._drain()
        self._listener.join()
        self._lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, frames: np.ndarray) -> None:
        """Queue frames, (n, height, width, 3) uint8; waits while the queue is full.

        Raises:
            OutputError: if ffmpeg failed on an earlier chunk.
        """
        self._put(np.ascontiguousarray(frames).tobytes())

    def close_stream(self) -> None:
        """Wait until every frame is encoded.

        Raises:
            OutputError: if ffmpeg failed.
        """
        self._put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._process.wait() != 0:
            raise self._failure()

    def finish(self, title: str, facts: Mapping[str, Any]) -> None:
        """Write the metadata and put the video in its place; call `close_stream` first.

        Raises:
            OutputError: if the disk is full or the target cannot be replaced.
        """
        whole = self._folder / "whole.mp4"
        notes = self._folder / "notes.txt"
        try:
            notes.write_text(to_ffmetadata(title, facts), encoding="utf-8")
            command = [self._ffmpeg, "-v", "error", "-y", "-i", str(self._folder / "stream.mp4"), "-i", str(notes)]
            command += ["-map", "0:v", "-map_metadata", "1", "-c", "copy", "-movflags", "+faststart", str(whole)]
            run = subprocess.run(command, capture_output=True, check=False, start_new_session=True)
            if run.returncode != 0:
                raise failure(run.stderr.decode("utf-8", "replace"), self._target)
            with whole.open("r+b") as file:
                os.fsync(file.fileno())
            whole.replace(self._target)
        except OSError as error:
            raise _cannot_write(self._target, error) from error

    def _put(self, item: bytes | None) -> None:
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return

    def _feed(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            with pipe:
                while (data := self._queue.get()) is not None:
                    pipe.write(data)
        except OSError:
            self._process.wait()
            self._error = self._failure()

    def _drain(self) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(0.05)

    def _listen(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        with pipe:
            self._said.extend(line.decode("utf-8", "replace") for line in pipe)

    def _failure(self) -> OutputError:
        self._listener.join()
        return failure("\n".join(self._said), self._target)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left behind; the lock of one that lives is held."""
    for left in folder.glob(f"{SCRATCH}*"):
        if not (left / LOCK).exists():
            if _is_old(left):
                shutil.rmtree(left, ignore_errors=True)
            continue  # else its writer is just starting
        with contextlib.suppress(Timeout):
            with FileLock(left / LOCK, timeout=0):
                pass
            shutil.rmtree(left, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime > _STARTING_SECONDS
    return False


def check_target(path: Path) -> None:
    """Check that an MP4 can be written at `path`.

    Raises:
        OutputError: if it is not an .mp4, its folder is missing or not writable, or something else is there.
    """
    if path.suffix.lower() != ".mp4":
        raise OutputError(f"{path} does not end in .mp4.", "Give the video a name that ends in .mp4.")
    try:
        if not path.parent.is_dir():
            raise OutputError(f"There is no folder {path.parent}.", "Make the folder first, or name another one.")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file that can be replaced.", "Name another file.")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> OutputError:
    reason = getattr(error, "strerror", None) or str(error)
    if "No space left" in reason:
        return OutputError(f"The disk is full: {path} was not saved.", "Free some space and try again.")
    return OutputError(f"{path} cannot be written: {reason}.", "Name a file in a folder that you can write to.")
