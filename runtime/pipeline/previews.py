"""Previews of a clip while it is made, drawn rarely enough to cost almost nothing."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec
from runtime.pipeline.latent_colors import LatentColors
from runtime.video.preview import encode_frames, encode_preview, resize

# Minimum interval: a preview takes 10 ms, as long as several steps of a small model on a GPU.
_SECONDS = 0.25
# Maximum share of the time: previews of many frames take longer.
_SHARE = 0.03


class Previews:
    """Draws the previews of one job, as often as the time budget allows.

    Attributes:
        colors: of latents; they learn from what the job decodes.

    Args:
        cache_dir: the cache folder; `None` without one.
    """

    def __init__(self, spec: ModelSpec, plan: ExecutionPlan, cache_dir: Path | None) -> None:
        self.colors = LatentColors(cache_dir, spec)
        self._plan = plan
        self._next = -1.0
        self._frames: list[np.ndarray] = []

    def of_latents(self, estimate: torch.Tensor) -> bytes | None:
        """Return an animated WebP of the predicted clean latents, if it is time for one and their colors are known."""

        def draw() -> bytes | None:
            rgb = self.colors.colors(estimate)
            if rgb is None:
                return None
            return encode_preview(rgb.cpu().numpy(), round(1000 * self._plan.seconds_of_video / len(rgb)))

        return self._timed(draw)

    def of_frames(self, frames: np.ndarray, *, last: bool) -> bytes | None:
        """Return an animated WebP of the frames so far, if it is time for one.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.
            last: whether the video is complete. The result becomes its poster: if it is not time for a preview, it is
                the frame in the middle, which takes a millisecond.
        """
        self._frames.extend(resize(frames))
        duration = round(1000 / self._plan.fps)
        preview = self._timed(lambda: encode_frames(self._frames, duration))
        if preview is None and last:
            return encode_frames([self._frames[len(self._frames) // 2]], duration)
        return preview

    def forget_frames(self) -> None:
        """Forget the frames, because decoding starts again."""
        self._frames.clear()

    def _timed(self, draw: Callable[[], bytes | None]) -> bytes | None:
        started = time.monotonic()
        if started < self._next:
            return None
        preview = draw()
        if preview is not None:
            ended = time.monotonic()
            self._next = ended + max(_SECONDS, (ended - started) / _SHARE)
        return preview
