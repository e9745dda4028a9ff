"""How alike two clips are, frame by frame, by ffmpeg's own measures."""

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import OutputError
from runtime.video.ffmpeg import find_ffmpeg

# The nth frame is compared with the nth, however fast each clip plays; in RGB, as people see it.
_FRAMES = "settb=1,setpts=N,format=gbrp"
_PSNR = re.compile(r"PSNR .*\baverage:(inf|[0-9.]+)")
_SSIM = re.compile(r"SSIM .*\bAll:([0-9.]+)")
_PATIENCE_SECONDS = 300


@dataclass(frozen=True)
class Likeness:
    """How alike two clips are, over as many frames as both have.

    Attributes:
        psnr: peak signal-to-noise ratio of all pixels in RGB, in dB; infinite where they are the same.
        ssim: mean structural similarity, 1 where they are the same.
    """

    psnr: float
    ssim: float

    @property
    def same(self) -> bool:
        """Whether no pixel differs."""
        return math.isinf(self.psnr)


def likeness(one: Path, other: Path) -> Likeness:
    """Compare two clips of one size.

    Raises:
        OutputError: if one cannot be read, or their sizes differ.
    """
    graph = (
        f"[0:v]{_FRAMES},split[a][b];[1:v]{_FRAMES},split[c][d];"
        "[a][c]psnr=shortest=1:repeatlast=0[e];[b][d]ssim=shortest=1:repeatlast=0[f]"
    )
    command = [find_ffmpeg(), "-v", "info", "-nostats", "-i", str(one), "-i", str(other), "-lavfi", graph]
    command += ["-map", "[e]", "-f", "null", "-", "-map", "[f]", "-f", "null", "-"]
    try:
        run = subprocess.run(command, capture_output=True, check=False, timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OutputError("Comparing the two clips takes too long.", "Compare shorter ones.") from error
    said = run.stderr.decode("utf-8", "replace")
    psnr, ssim = _PSNR.search(said), _SSIM.search(said)
    if run.returncode != 0 or psnr is None or ssim is None:
        raise OutputError("The two clips cannot be compared.", "Take two whole videos of one size.")
    return Likeness(float(psnr[1]), float(ssim[1]))
