"""A copy of a video that says nothing of how it was made, to be given away."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from runtime.core.errors import OutputError
from runtime.video.encode import LOCK, SCRATCH
from runtime.video.ffmpeg import failure, find_ffmpeg


@contextmanager
def bare_copy(video: Path) -> Iterator[Path]:
    """Make the copy, pictures bit for bit the same, and remove it when left.

    It lies in a folder like those of `encode`: if this process is killed, the next writer removes it.

    Raises:
        OutputError: if the video cannot be read, or nothing can be written beside it.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=video.parent))
    except OSError as error:
        raise OutputError(
            f"{video.parent} cannot be written to: {error.strerror}.", "Free some space, or mend the folder."
        ) from error
    # It may be left on another thread than it was entered on.
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire()
        copy = folder / "bare.mp4"
        command = [find_ffmpeg(), "-v", "error", "-y", "-i", str(video), "-map", "0:v", "-map_metadata", "-1"]
        command += ["-map_metadata:s", "-1", "-bitexact", "-c", "copy", "-movflags", "+faststart", str(copy)]
        run = subprocess.run(command, capture_output=True, check=False)
        if run.returncode != 0:
            raise failure(run.stderr.decode("utf-8", "replace"), video.name)
        yield copy
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
