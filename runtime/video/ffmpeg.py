"""Finds ffmpeg and says in one line why a run of it failed."""

import subprocess

import imageio_ffmpeg

from runtime.core.errors import MachineError, OutputError


def find_ffmpeg() -> str:
    """Return the path of an ffmpeg program: the one that imageio-ffmpeg brings, or `IMAGEIO_FFMPEG_EXE`.

    Raises:
        MachineError: if there is none that runs.
    """
    try:
        program: str = imageio_ffmpeg.get_ffmpeg_exe()
        subprocess.run([program, "-version"], check=True, capture_output=True)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise MachineError(
            "ffmpeg was not found, or does not run.",
            "Run the installer again, or install ffmpeg and set IMAGEIO_FFMPEG_EXE to its path.",
        ) from error
    return program


def failure(log: str, path: object) -> OutputError:
    """Return the error for an ffmpeg run that failed; `log` is its standard error."""
    if "No space left on device" in log:
        return OutputError(f"The disk is full: {path} was not saved.", "Free some space and try again.")
    lines = [line for line in log.splitlines() if line.strip()]
    return OutputError(
        f"ffmpeg could not write {path}: {lines[-1] if lines else 'it said nothing'}.",
        "Check the folder and its free space, and try again.",
    )
