"""Previews of a clip while it is made, drawn rarely enough to cost almost nothing."""

import time
from collections.abc import Callable

import numpy as np
import torch

from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec
from runtime.video.preview import encode_frames, encode_preview, resize

# Minimum interval: a preview takes 10 ms, as long as several steps of a small model on a GPU.
_SECONDS = 0.25
# Maximum share of the time: previews of many frames take longer.
_SHARE = 0.03


class Previews:
    """Draws the previews of one job, as often as the time budget allows."""

    def __init__(self, spec: ModelSpec, plan: ExecutionPlan) -> None:
        self._latent_rgb = spec.latent_rgb
        self._plan = plan
        self._next = -1.0
        self._frames: list[np.ndarray] = []

    def of_latents(self, estimate: torch.Tensor) -> bytes | None:
        """Return an animated WebP of the predicted clean latents, if it is time for one."""
        rgb_of = self._latent_rgb
        if rgb_of is None:
            return None

        def draw() -> bytes:
            factors = torch.tensor(rgb_of.factors, device=estimate.device, dtype=torch.float32)
            bias = torch.tensor(rgb_of.bias, device=estimate.device, dtype=torch.float32)
            rgb = torch.einsum("cfhw,cr->fhwr", estimate[0], factors) + bias
            return encode_preview(rgb.cpu().numpy(), round(1000 * self._plan.seconds_of_video / len(rgb)))

        return self._timed(draw)

    def of_frames(self, frames: np.ndarray) -> bytes | None:
        """Return an animated WebP of the frames so far, if it is time for one.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.
        """
        self._frames.extend(resize(frames))
        return self._timed(lambda: encode_frames(self._frames, round(1000 / self._plan.fps)))

    def forget_frames(self) -> None:
        """Forget the frames, because decoding starts again."""
        self._frames.clear()

    def _timed(self, draw: Callable[[], bytes]) -> bytes | None:
        started = time.monotonic()
        if started < self._next:
            return None
        preview = draw()
        ended = time.monotonic()
        self._next = ended + max(_SECONDS, (ended - started) / _SHARE)
        return preview
