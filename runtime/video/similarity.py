"""Measure how similar two clips are, frame by frame, with ffmpeg's PSNR and SSIM filters."""

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import OutputError
from runtime.video.mp4 import find_ffmpeg

# Frame n is compared with frame n, whatever the frame rates, in RGB.
_FRAMES = "settb=1,setpts=N,format=gbrp"
_PSNR = re.compile(r"PSNR .*\baverage:(inf|[0-9.]+)")
_SSIM = re.compile(r"SSIM .*\bAll:([0-9.]+)")
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Similarity:
    """Similarity of two clips, over as many frames as both have.

    Attributes:
        psnr: peak signal-to-noise ratio of all pixels in RGB, in dB; infinite for identical frames.
        ssim: mean structural similarity; 1 for identical frames.
    """

    psnr: float
    ssim: float

    @property
    def identical(self) -> bool:
        """Whether no pixel differs."""
        return math.isinf(self.psnr)


def similarity(first: Path, second: Path) -> Similarity:
    """Compare two clips of the same size.

    Raises:
        OutputError: if one cannot be read, or their sizes differ.
    """
    graph = (
        f"[0:v]{_FRAMES},split[a][b];[1:v]{_FRAMES},split[c][d];"
        "[a][c]psnr=shortest=1:repeatlast=0[e];[b][d]ssim=shortest=1:repeatlast=0[f]"
    )
    command = [find_ffmpeg(), "-v", "info", "-nostats", "-i", str(first), "-i", str(second), "-lavfi", graph]
    command += ["-map", "[e]", "-f", "null", "-", "-map", "[f]", "-f", "null", "-"]
    try:
        run = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OutputError("video.comparison_timeout") from error
    log = run.stderr.decode("utf-8", "replace")
    psnr, ssim = _PSNR.search(log), _SSIM.search(log)
    if run.returncode != 0 or psnr is None or ssim is None:
        raise OutputError("video.not_comparable")
    return Similarity(float(psnr[1]), float(ssim[1]))
