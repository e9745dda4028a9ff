"""Clips that show nothing: black, of one flat colour, or frozen. Seen from the frames as they stream by.

A false alarm would cost a good video, so each of these is far from anything that a model makes of a prompt: in a black
clip next to nothing is brighter than night, in a blank one no frame has any contrast, and in a frozen one no spot ever
changes.
"""

from typing import Literal

import numpy as np

Fault = Literal["black", "blank", "frozen"]

# Every fourth pixel both ways of a large frame is looked at: what shows something shows it there too.
_STRIDE, _LARGE = 4, 256
# Brighter than this, of 255, is not black; a few specks may be.
_DARK, _SPECKS = 14, 0.001
# A frame whose colours deviate by less than this from their mean is flat.
_FLAT = 1.5
# A spot has changed if it differs by more than this from the frame before; rounding in a decoder stays below.
_CHANGE = 6
# The first latent frame is decoded alone, so the next few frames settle, however still the clip.
_SETTLING = 5


class Detector:
    """Looks at a clip's frames in order."""

    def __init__(self) -> None:
        self._seen = 0
        self._bright = 0
        self._pixels = 0
        self._contrast = 0.0
        self._changed = False
        self._last: np.ndarray | None = None

    def look(self, frames: np.ndarray) -> None:
        """Look at the next frames, (n, height, width, 3) uint8."""
        stride = _STRIDE if min(frames.shape[1:3]) >= _LARGE else 1
        for frame in frames[:, ::stride, ::stride]:
            self._bright += int((frame.max(axis=-1) > _DARK).sum())
            self._pixels += frame.shape[0] * frame.shape[1]
            if self._contrast < _FLAT:
                self._contrast = max(self._contrast, float(frame.std(axis=(0, 1)).max()))
            if not self._changed and self._last is not None and self._seen >= _SETTLING:
                self._changed = bool((np.abs(frame.astype(np.int16) - self._last) > _CHANGE).any())
            self._last = frame.astype(np.int16)
            self._seen += 1

    @property
    def fault(self) -> Fault | None:
        """What is wrong with the frames seen so far; `None` if they show something."""
        if not self._seen:
            return None
        if self._bright <= _SPECKS * self._pixels:
            return "black"
        if self._contrast < _FLAT:
            return "blank"
        return "frozen" if not self._changed and self._seen > _SETTLING else None
