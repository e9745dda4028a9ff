"""New frames between those of a video, computed by ffmpeg's minterpolate while frames arrive."""

import math
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import Self

from runtime.core.cancel import never
from runtime.core.errors import MachineError, OutputError
from runtime.video.mp4 import FrameProcess, find_ffmpeg, last_line
from runtime.video.reader import COLORS

# Motion of blocks, in both directions, which overlap; see docs/interpolate.md for how it compares with other options.
# Two frames whose brightness differs by 10 % on average, and by 10 % more than two before, are a cut.
_METHOD = "mi_mode=mci:mc_mode=aobmc:me_mode=bidir:scd=fdiff:scd_threshold=10"
# Sides of blocks in pixels, of small frames and of others, in which subjects are larger.
_SMALL_BLOCK, _BLOCK = 8, 16
_SMALL_PIXELS = 640 * 360
# minterpolate leaves the part of a side beyond the last whole block without motion, and takes no smaller frames.
_LEAST_SIDE = 32
_CHANNELS = "in_color_matrix=bt709:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int+full_chroma_inp"
_POLL_SECONDS = 0.1


def _options(factor: int, block: int) -> list[str]:
    """Return ffmpeg's options that write the new frames between those of its input, which has one frame a second."""
    filters = (
        # YUV is what minterpolate takes; all of 0 to 255 in each channel loses least.
        f"scale=in_range=pc:out_range=pc:{_CHANNELS},format=yuv444p,"
        f"minterpolate=fps={factor}:mb_size={block}:{_METHOD},"
        f"select=mod(n\\,{factor}),scale=in_range=pc:out_range=pc:{_CHANNELS}"
    )
    return ["-vf", filters, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]


def check_interpolator() -> None:
    """Check that ffmpeg can interpolate, before frames are computed.

    Raises:
        MachineError: if there is no ffmpeg, or it lacks minterpolate.
    """
    command = [find_ffmpeg(), "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-r", "1"]
    command += ["-s", f"{_LEAST_SIDE}x{_LEAST_SIDE}", "-i", "pipe:0", *_options(2, _BLOCK)]
    frame = bytes(_LEAST_SIDE * _LEAST_SIDE * COLORS)
    # In its own process group, so that Ctrl-C reaches only this process.
    done = subprocess.run(command, input=3 * frame, capture_output=True, check=False, start_new_session=True)
    if done.returncode != 0 or len(done.stdout) != len(frame):
        line = last_line(done.stderr.decode("utf-8", "replace"))
        raise MachineError("interpolate.no_filter", program=command[0], line=line)


class FrameInterpolator(FrameProcess):
    """Adds new frames after each frame that arrives; memory does not depend on their number.

    A video gets `factor` times as many frames. At `factor` times the rate it lasts as long as before, because its last
    frame is repeated: it is shown as long as before. The frames that arrive come out unchanged.

    Use as a context manager: `add` chunks of frames, then `finish`.

    Args:
        width, height: of the frames, in pixels.
        factor: frames of the result for each that arrives.
        check: called while it waits for ffmpeg; may raise.

    Raises:
        MachineError: if there is no ffmpeg.
    """

    _stdout = subprocess.PIPE

    def __init__(self, width: int, height: int, factor: int, check: Callable[[], None] = never) -> None:
        self._factor, self._width, self._height = factor, width, height
        self._sides = tuple(max(-(-side // _BLOCK) * _BLOCK, _LEAST_SIDE) for side in (height, width))
        block = _SMALL_BLOCK if width * height < _SMALL_PIXELS else _BLOCK
        super().__init__(self._sides[1], self._sides[0], 1, _options(factor, block), check)
        # Frames whose followers are not computed; all but the last are on their way through ffmpeg.
        self._waiting: deque[np.ndarray] = deque()
        # The followers of one frame each, in order; `None` when ffmpeg has ended. It has no more than ffmpeg was given
        # since it was last emptied.
        self._new: queue.Queue[np.ndarray | None] = queue.Queue()

    def __enter__(self) -> Self:
        """Start ffmpeg."""
        super().__enter__()
        self._reader = threading.Thread(target=self._read, name="interpolated", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *arguments: object) -> None:
        """Stop ffmpeg if it is still running."""
        super().__exit__(*arguments)
        self._reader.join()

    def add(self, frames: np.ndarray) -> Iterator[np.ndarray]:
        """Take frames, (n, height, width, 3) uint8; yield what is finished, of the same form.

        Raises:
            OutputError: if ffmpeg failed.
        """
        for frame in frames:
            self._waiting.append(frame.copy())
            self._give(frame)
            while not self._new.empty():
                yield self._next()

    def finish(self) -> Iterator[np.ndarray]:
        """Yield the remaining frames.

        Raises:
            OutputError: if ffmpeg failed.
        """
        if len(self._waiting) > 1:
            # minterpolate keeps the last frame, which makes no new one, to itself.
            self._give(self._waiting[-1])
            self._put(None)
            while len(self._waiting) > 1:
                yield self._next()
        if self._waiting:
            yield np.repeat(self._waiting.pop()[None], self._factor, axis=0)

    def _give(self, frame: np.ndarray) -> None:
        rows, columns = (side - length for side, length in zip(self._sides, frame.shape, strict=False))
        self.write(np.pad(frame, ((0, rows), (0, columns), (0, 0)), "edge") if rows or columns else frame)

    def _next(self) -> np.ndarray:
        """Wait for the followers of the first waiting frame; return both."""
        while True:
            try:
                new = self._new.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                self._check()
        if new is None:
            self._process.wait()
            raise self._failure()
        return np.concatenate([self._waiting.popleft()[None], new])

    def _read(self) -> None:
        pipe, shape = self._process.stdout, (self._factor - 1, *self._sides, COLORS)
        assert pipe is not None
        size = math.prod(shape)
        with pipe:
            while len(data := pipe.read(size)) == size:
                frames = np.frombuffer(data, np.uint8).reshape(shape)
                self._new.put(frames[:, : self._height, : self._width])
        self._new.put(None)

    def _error_of(self, log: str) -> OutputError:
        return OutputError("interpolate.failed", line=last_line(log))
