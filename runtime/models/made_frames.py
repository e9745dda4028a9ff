"""Control frames that a model made of a clip, on the disk: a file for each clip. Imports no torch.

They are kept in the cache, so that a job that is resumed, another job with them, and the page need not make them again.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.core.disk_caches import CONTROL_FRAMES, evict, files_of
from runtime.core.errors import OutputError
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.plan import ResolvedRequest
from runtime.core.request import DEPTH
from runtime.video.mp4 import cannot_write
from runtime.video.reader import COLORS


class MadeFrames:
    """The control frames of one clip, without borders.

    Args:
        settings: of the clip, of the size that its control video has; see `models.control_frames.within_borders`.
        cache_dir: the cache, or another folder.
    """

    def __init__(self, settings: ResolvedRequest, cache_dir: Path) -> None:
        assert settings.control is not None
        assert settings.preprocessor is not None
        size = settings.height, settings.width
        colors = () if settings.preprocessor.kind == DEPTH else (COLORS,)
        self._shape: tuple[int, ...] = (settings.frames, *size, *colors)
        depends = [settings.control.digest, settings.preprocessor.digest, self._shape, settings.fps]
        depends += [settings.control_start, settings.image_fit, settings.image_position]
        name = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]
        self._path = cache_dir / CONTROL_FRAMES.name / f"{name}.npy"

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._path.parent

    def read(self) -> np.ndarray | None:
        """Return the frames, of which no more than what is read is in memory; `None` if they are not there, or damaged.

        They are (frames, height, width) for depth and (frames, height, width, 3) for poses, uint8.
        """
        try:
            frames: np.ndarray = np.load(self._path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return frames if frames.shape == self._shape and frames.dtype == np.uint8 else None

    def write(self, frames: Iterable[np.ndarray]) -> np.ndarray:
        """Store frames, which are computed meanwhile, and return them, as `read` does.

        Args:
            frames: one after the other, as `read` has them. If it raises, nothing is stored.

        Raises:
            OutputError: if the disk is full or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_partial_files(self.folder)
            replace_file(self._path, self._file(frames))
        except OSError as error:
            raise cannot_write(self._path, error) from error
        evict(files_of(self.folder), CONTROL_FRAMES.max_bytes, keep=self._path)
        stored = self.read()
        if stored is None:
            raise OutputError("video.part_damaged", file=self._path.name)
        return stored

    def _file(self, frames: Iterable[np.ndarray]) -> Iterator[bytes]:
        """Yield the parts of a file in NumPy's format."""
        header = io.BytesIO()
        entry = {"descr": "|u1", "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(header, entry)
        yield header.getvalue()
        for frame in frames:
            yield frame.tobytes()


def picture_of(frame: np.ndarray) -> Image.Image:
    """Return a frame of `MadeFrames` as an RGB image."""
    return Image.fromarray(np.asarray(frame)).convert("RGB")


def blank_frames(frames: np.ndarray) -> int:
    """Return how many frames are black: those without people."""
    return sum(not frame.any() for frame in frames)
