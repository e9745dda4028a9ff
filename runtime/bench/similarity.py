"""Similarity of the decoded frames of two clips: PSNR and SSIM."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PEAK = 255.0
_SSIM_SIDE, _SSIM_SIGMA = 11, 1.5
# SSIM takes half a second per frame of 832×480; of large clips, some evenly spaced frames are compared.
_SSIM_FRAMES, _SSIM_PIXELS = 16, 16 * 832 * 480
_MIDDLE = 128.0
_SSIM_C1, _SSIM_C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2


@dataclass(frozen=True)
class Similarity:
    """Similarity of two clips.

    Attributes:
        psnr: peak signal-to-noise ratio of all pixels in RGB, in dB; infinite for equal clips.
        ssim: mean structural similarity of the color channels, 1 for equal clips; of some frames of a large clip.
        largest: largest difference of a color value, of 255.
    """

    psnr: float
    ssim: float
    largest: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; for equal clips "same" is true and "psnr" is `None`."""
        same = math.isinf(self.psnr)
        return {
            "same": same,
            "psnr": None if same else self.psnr,
            "ssim": self.ssim,
            "largest": self.largest,
        }


def similarity(frames: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> Similarity:
    """Compare two clips of the same length and size.

    Args:
        frames, reference: batches of frames, (n, height, width, 3) uint8; batch sizes may differ.

    Raises:
        ValueError: if the clips differ in length or size.
    """
    first, second = (np.concatenate(list(clip)) for clip in (frames, reference))
    if first.shape != second.shape:
        raise ValueError(f"clips of {first.shape} and {second.shape}")
    squares, largest = 0.0, 0
    for frame, expected in zip(first, second, strict=True):
        difference = frame.astype(np.int32) - expected
        squares += float(np.square(difference).sum())
        largest = max(largest, int(np.abs(difference).max()))
    psnr = 10 * math.log10(_PEAK**2 * first.size / squares) if squares else math.inf
    chosen = _compared_frames(len(first), first.shape[1] * first.shape[2]) if squares else ()
    ssim = statistics.mean(_ssim(first[index], second[index]) for index in chosen) if chosen else 1.0
    return Similarity(psnr, ssim, largest)


def _compared_frames(frames: int, pixels: int) -> Sequence[int]:
    """Return the indices of frames for SSIM: all of a small clip, some of a large one."""
    most = max(_SSIM_PIXELS // pixels, _SSIM_FRAMES)
    return range(0, frames, -(-frames // most))


def _ssim(frame: np.ndarray, reference: np.ndarray) -> float:
    """Return the structural similarity of two frames, averaged over pixels and color channels.

    Source: Wang, Bovik, Sheikh, Simoncelli 2004: Gaussian windows of 11×11 with σ = 1.5 that are within the frame.
    """
    # Centered at zero, since variances are small differences of large numbers.
    x, y = (torch.from_numpy(part).permute(2, 0, 1).double() - _MIDDLE for part in (frame, reference))
    offsets = torch.arange(_SSIM_SIDE, dtype=torch.float64) - _SSIM_SIDE // 2
    weights = torch.exp(-offsets.square() / (2 * _SSIM_SIGMA**2))
    weights = weights / weights.sum()
    maps = torch.cat([x, y, x * x, y * y, x * y])
    for axis in (1, 2):
        # A sum of shifted frames is faster than PyTorch's convolution in float64.
        inside = maps.shape[axis] - _SSIM_SIDE + 1
        blurred = maps.narrow(axis, 0, inside) * weights[0]
        for at, weight in enumerate(weights[1:].tolist(), start=1):
            blurred.add_(maps.narrow(axis, at, inside), alpha=weight)
        maps = blurred
    mx, my, xx, yy, xy = maps.chunk(5)
    vx, vy, vxy = xx - mx * mx, yy - my * my, xy - mx * my
    mx, my = mx + _MIDDLE, my + _MIDDLE
    similar = (2 * mx * my + _SSIM_C1) * (2 * vxy + _SSIM_C2)
    similar /= (mx * mx + my * my + _SSIM_C1) * (vx + vy + _SSIM_C2)
    return float(similar.mean())
