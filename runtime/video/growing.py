"""An MP4 of the parts of a video that are finished: each part is encoded once, and joining encodes nothing again.

A part is an H.264 stream without a container, which refers to no other part, so parts can be joined in any order.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from runtime.video.lossless import write_frames
from runtime.video.mp4 import TO_BT709, cannot_write, ffmpeg_error, find_ffmpeg

# Frames are in the order of time, without which a stream has no times.
_ENCODER = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-bf", "0", "-pix_fmt", "yuv420p", "-f", "h264")


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
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [find_ffmpeg(), "-v", "error", "-y", "-framerate", str(fps), "-f", "h264", "-i", "pipe:0"]
    command += ["-c", "copy", "-movflags", "+faststart", "-f", "mp4", str(partial)]
    try:
        # In its own process group, so that Ctrl-C reaches only this process.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                _feed(process, parts)
                log = b"" if process.stderr is None else process.stderr.read()
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise ffmpeg_error(log.decode("utf-8", "replace"), target)
        partial.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _feed(process: subprocess.Popen[bytes], parts: Iterable[Path]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # ffmpeg has failed: see its log
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, pipe)
