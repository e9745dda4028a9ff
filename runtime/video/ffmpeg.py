"""Find ffmpeg, and turn the log of a failed run into an error."""

import subprocess

import imageio_ffmpeg

from runtime.core.errors import MachineError, OutputError


def find_ffmpeg() -> str:
    """Return the path of an ffmpeg program: the one of imageio-ffmpeg, or `IMAGEIO_FFMPEG_EXE`.

    Raises:
        MachineError: if there is none that runs.
    """
    try:
        program: str = imageio_ffmpeg.get_ffmpeg_exe()
        subprocess.run([program, "-version"], check=True, capture_output=True)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise MachineError("video.no_ffmpeg") from error
    return program


def ffmpeg_error(log: str, file: object) -> OutputError:
    """Return the error for an ffmpeg run that failed; `log` is its standard error."""
    if "No space left on device" in log:
        return OutputError("video.disk_full", file=file)
    lines = [line for line in log.splitlines() if line.strip()]
    return OutputError("video.ffmpeg_failed", file=file, line=lines[-1] if lines else "no message")
