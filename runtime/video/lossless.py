"""Frames stored without loss: finished parts of a video that are joined at its end, bit for bit.

A part is FFV1 in Matroska with a checksum of each slice. It is complete and on the disk, or absent.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import numpy as np

from runtime.core.errors import OutputError
from runtime.core.files import move_over, sync_folder
from runtime.video.mp4 import cannot_write, ffmpeg_error, find_ffmpeg

_PARTIAL = ".tmp"
_RAW = ("-f", "rawvideo", "-pix_fmt", "rgb24")
# Level 3 has checksums; every frame is decoded alone.
_LOSSLESS = ("-c:v", "ffv1", "-level", "3", "-slicecrc", "1", "-g", "1", "-pix_fmt", "bgr0", "-f", "matroska")
# Without these, ffmpeg would read a playlist of that name and the files that it lists.
_ONLY_THIS = ("-protocol_whitelist", "file", "-f", "matroska")
_COLORS = 3


def write_frames(
    target: Path,
    frames: Iterable[np.ndarray],
    width: int,
    height: int,
    fps: int,
    encoder: Sequence[str] = _LOSSLESS,
) -> None:
    """Store frames; the file is on the disk when this returns.

    Args:
        target: replaced only when the new file is complete.
        frames: chunks of frames, (n, height, width, 3) uint8.
        encoder: ffmpeg's options for encoder and format, for a part that is not lossless.

    Raises:
        OutputError: if the disk is full or the file cannot be written.
        MachineError: if there is no ffmpeg.
    """
    options = ["-xerror", *_RAW, "-s", f"{width}x{height}", "-r", str(fps), "-i", "pipe:0", *encoder]
    feed_ffmpeg(target, options, (np.ascontiguousarray(chunk).data for chunk in frames), sync=True)


def feed_ffmpeg(target: Path, options: Sequence[str], data: Iterable[bytes | memoryview], *, sync: bool) -> None:
    """Write a file with ffmpeg from data on its standard input; a partial file is one that `sweep_parts` removes.

    Args:
        target: replaced only when the new file is complete.
        options: of the input, which is `pipe:0`, and of the output.
        sync: whether the file is on the disk when this returns.

    Raises:
        OutputError: if the data cannot be read, the disk is full, or the file cannot be written.
        MachineError: if there is no ffmpeg.
    """
    partial = target.with_name(f"{target.name}.{os.getpid()}{_PARTIAL}")
    command = [find_ffmpeg(), "-v", "error", "-y", *options, str(partial)]
    try:
        # In its own process group, so that Ctrl-C reaches only this process.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # ffmpeg has failed: see its log
                    for chunk in data:
                        pipe.write(chunk)
                log = process.stderr.read().decode("utf-8", "replace")
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise ffmpeg_error(log, target)
        if sync:
            with partial.open("r+b") as file:
                os.fsync(file.fileno())
        move_over(partial, target)
        if sync:
            sync_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def read_frames(source: Path, width: int, height: int, count: int) -> Generator[np.ndarray, None, None]:
    """Yield the frames of a stored part one by one, (height, width, 3) uint8, with the bits that were stored.

    Raises:
        OutputError: after the last frame at the latest, if the file is missing or damaged, or has more or fewer frames.
        MachineError: if there is no ffmpeg.
    """
    # With a rate of the input, times in the file are ignored; otherwise their rounding would drop or repeat frames.
    command = [find_ffmpeg(), "-v", "error", "-xerror", *_ONLY_THIS, "-r", "30", "-i", str(source), *_RAW, "pipe:1"]
    size, frames = width * height * _COLORS, 0
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            while data := process.stdout.read(size):
                frames += 1
                if frames > count or len(data) < size:
                    raise OutputError("video.part_damaged", file=source.name)
                yield np.frombuffer(data, np.uint8).reshape(height, width, _COLORS)
        except BaseException:
            process.kill()
            raise
        # ffmpeg only logs a wrong checksum.
        if frames != count or process.wait() != 0 or log.seek(0, os.SEEK_END):
            raise OutputError("video.part_damaged", file=source.name)


def sweep_parts(folder: Path) -> None:
    """Remove the incomplete parts that killed processes left in a folder of one job."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()
