"""Finished sections of a video on disk, in a folder next to the job's checkpoints, until they are joined.

A section is written before the checkpoint that counts it. So whatever a checkpoint counts is there after a crash, and
what it does not count is made again with the same bits. In addition there is a clip of all finished sections, to be
played while the next one is made; it is not needed for anything else.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from runtime.core.errors import OutputError, TandemError
from runtime.pipeline.files import CLIP, SECTIONS, clip_name, remove_older_clips
from runtime.video.growing import join_parts, write_part
from runtime.video.lossless import read_frames, sweep_parts, write_frames
from runtime.video.mp4 import cannot_write

# The number of the frames that the last finished section left to blend, for a video that ends with it.
PENDING = -1
# Bytes per value of a frame: FFV1 needs less, except for noise.
_RATE = 0.6
_NAME = re.compile(r"(\d{4,})\.(?:mkv|h264|mp4)")

logger = logging.getLogger(__name__)


class SectionFiles:
    """The finished sections of one job, numbered in the order they are made.

    Args:
        checkpoints: the folder of the job's checkpoints.
        width, height: of the frames, in pixels.
        fps: frames per second.
    """

    def __init__(self, checkpoints: Path, width: int, height: int, fps: int) -> None:
        self.folder = checkpoints / SECTIONS
        self._clip = checkpoints / CLIP
        self._size = (width, height)
        self._fps = fps

    def begin(self, done: int) -> None:
        """Remove what belongs to no finished section: partial files, and sections that no checkpoint counts.

        Args:
            done: sections that the checkpoint counts, from which the job resumes; 0 without one.

        Raises:
            OutputError: if a section that it counts is missing.
        """
        sweep_parts(self.folder)
        sweep_parts(self._clip)
        numbers = self._numbers()
        for number in numbers:
            if number >= done:
                with contextlib.suppress(OSError):
                    self._file(number).unlink()
        for path, number in [*_numbered(self._clip, ".h264"), *_numbered(self._clip, ".mp4")]:
            # A clip is named by the sections that it has, which are numbered from 0.
            if number >= done + (path.suffix == ".mp4"):
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            self._file(PENDING).unlink()
        missing = sorted(set(range(done)) - set(numbers))
        if missing:
            raise OutputError("video.part_damaged", file=self._file(missing[0]).name)

    def check_disk(self, frames: int) -> None:
        """Check that the disk has space for so many frames.

        Raises:
            OutputError: if it has not, or the folder cannot be made.
        """
        self._make()
        width, height = self._size
        needs, free = round(3 * width * height * frames * _RATE), shutil.disk_usage(self.folder).free
        if free < needs:
            raise OutputError("video.disk_too_small", folder=self.folder, needs=needs, free=free)

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def write(self, number: int, frames: Iterable[np.ndarray]) -> None:
        """Store a section; its file is on the disk when this returns.

        Args:
            number: of the section, from 0, or `PENDING`.
            frames: chunks of its frames, (n, height, width, 3) uint8.

        Raises:
            OutputError: if the disk is full or the folder cannot be written.
        """
        self._make()
        write_frames(self._file(number), frames, *self._size, self._fps)

    def joined(self, sections: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yield the frames of sections one by one, (height, width, 3) uint8; one frame is in memory at a time.

        Args:
            sections: (number, frames) of each section, in the order of time.

        Raises:
            OutputError: if a section is missing or damaged; for damage, after its last frame at the latest.
        """
        for number, count in sections:
            if count:  # the first section of several that are made from the end has no frames of its own yet
                yield from read_frames(self._file(number), *self._size, count)

    def grow(self, parts: Sequence[tuple[int, int]], pending: np.ndarray) -> None:
        """Write the clip of all finished sections; a failure is logged, since the clip is only for watching.

        Parts that an earlier run did not encode are encoded from the stored sections.

        Args:
            parts: see `joined`; one is `PENDING`.
            pending: the frames of `PENDING`, (n, height, width, 3) uint8.
        """
        done = len(parts) - 1
        try:
            self._clip.mkdir(parents=True, exist_ok=True)
            files = []
            for number, count in parts:
                part = self._clip / self._file(number).with_suffix(".h264").name
                frames = [pending] if number == PENDING else read_frames(self._file(number), *self._size, count)
                if count and (number == PENDING or not part.exists()):
                    write_part(part, frames, *self._size, self._fps)
                files += [part] if count else []
            join_parts(self._clip / clip_name(done), files, self._fps)
            remove_older_clips(self._clip)
        except (OSError, TandemError) as error:
            logger.warning("The clip of the finished sections could not be written: %s", error)

    def _file(self, number: int) -> Path:
        return self.folder / ("pending.mkv" if number == PENDING else f"{number:04d}.mkv")

    def _numbers(self) -> list[int]:
        """Return the numbers of the sections that are there."""
        return sorted(number for _, number in _numbered(self.folder, ".mkv"))


def _numbered(folder: Path, suffix: str) -> list[tuple[Path, int]]:
    """Return the files of a folder that are named by a number, each with it."""
    paths = folder.glob(f"*{suffix}") if folder.is_dir() else ()
    return [(path, int(match[1])) for path in paths if (match := _NAME.fullmatch(path.name))]
