"""Detect degenerate clips while their frames stream by: black, a single color, or frozen.

A false alarm would discard a good video, so each threshold is far from anything that a model generates from a prompt.
"""

from typing import Literal

import numpy as np

Fault = Literal["black", "blank", "frozen"]

# Large frames are sampled at every fourth pixel in both directions.
_STRIDE, _LARGE = 4, 256
# A pixel up to this value, of 255, is black; a black clip may have this share of brighter pixels.
_DARK, _BRIGHT_SHARE = 14, 0.001
# A frame whose colours have a standard deviation below this is blank.
_FLAT = 1.5
# A pixel has changed if it differs by more than this from the previous frame; rounding in a decoder stays below.
_CHANGE = 6
# The first latent frame is decoded alone, so the first few frames differ even in a frozen clip.
_SETTLING_FRAMES = 5


class Detector:
    """Inspects a clip's frames in order."""

    def __init__(self) -> None:
        self._seen = 0
        self._bright = 0
        self._pixels = 0
        self._contrast = 0.0
        self._changed = False
        self._last: np.ndarray | None = None

    def inspect(self, frames: np.ndarray) -> None:
        """Inspect the next frames, (n, height, width, 3) uint8."""
        stride = _STRIDE if min(frames.shape[1:3]) >= _LARGE else 1
        for frame in frames[:, ::stride, ::stride]:
            self._bright += int((frame.max(axis=-1) > _DARK).sum())
            self._pixels += frame.shape[0] * frame.shape[1]
            if self._contrast < _FLAT:
                self._contrast = max(self._contrast, float(frame.std(axis=(0, 1)).max()))
            if not self._changed and self._last is not None and self._seen >= _SETTLING_FRAMES:
                self._changed = bool((np.abs(frame.astype(np.int16) - self._last) > _CHANGE).any())
            self._last = frame.astype(np.int16)
            self._seen += 1

    @property
    def fault(self) -> Fault | None:
        """The problem with the frames so far; `None` if there is none."""
        if not self._seen:
            return None
        if self._bright <= _BRIGHT_SHARE * self._pixels:
            return "black"
        if self._contrast < _FLAT:
            return "blank"
        return "frozen" if not self._changed and self._seen > _SETTLING_FRAMES else None
