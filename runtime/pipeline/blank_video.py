"""Detect degenerate clips while their frames stream by (black, a single color, or frozen), and name the likely cause.

A false alarm would discard a good video, so each threshold is far from anything that a model generates from a prompt.
"""

from typing import Literal

import numpy as np

from runtime.core.errors import BadResultError
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.models.spec import is_transformer
from runtime.planner.placement import may_overflow

Fault = Literal["black", "blank", "frozen"]

_CODES: dict[Fault, str] = {
    "black": "pipeline.clip_black",
    "blank": "pipeline.clip_blank",
    "frozen": "pipeline.clip_frozen",
}
# Large frames are sampled at every fourth pixel in both directions.
_STRIDE, _LARGE = 4, 256
# A pixel up to this value, of 255, is black; a black clip may have this share of brighter pixels.
_DARK, _BRIGHT_SHARE = 14, 0.001
# A frame whose colors have a standard deviation below this is blank.
_FLAT = 1.5
# A pixel has changed if it differs by more than this from the previous frame; rounding in a decoder stays below.
_CHANGE = 6
# The first latent frame is decoded alone, so the first few frames differ even in a frozen clip.
_SETTLING_FRAMES = 5
# Beyond this, colors saturate and latents diverge.
_HIGH_GUIDANCE = 15.0
_FEW_STEPS = 4


class Detector:
    """Inspects a clip's frames in order."""

    def __init__(self) -> None:
        self._count = 0
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
            if not self._changed and self._last is not None and self._count >= _SETTLING_FRAMES:
                self._changed = bool((np.abs(frame.astype(np.int16) - self._last) > _CHANGE).any())
            self._last = frame.astype(np.int16)
            self._count += 1

    @property
    def fault(self) -> Fault | None:
        """The problem with the frames so far; `None` if there is none."""
        if not self._count:
            return None
        if self._bright <= _BRIGHT_SHARE * self._pixels:
            return "black"
        if self._contrast < _FLAT:
            return "blank"
        return "frozen" if not self._changed and self._count > _SETTLING_FRAMES else None


def blank_video_error(fault: Fault, plan: ExecutionPlan) -> BadResultError:
    """Return the error for a degenerate clip, with its likely cause."""
    return BadResultError(_CODES[fault], cause=likely_cause(fault, plan))


def likely_cause(fault: Fault, plan: ExecutionPlan) -> Fact:
    """Return the likely cause as a fact, which names the setting that helps."""
    vae = plan.components["vae"]
    if fault != "frozen" and vae.backend != PYTORCH:
        precision = vae.engines[-1].precision if vae.on_engine else vae.dtype
        return Fact("cause.vae_engine", {"backend": vae.backend, "precision": precision})
    scale = max(plan.guidance_scale, plan.guidance_scale_2 or 0.0)
    if scale > _HIGH_GUIDANCE:
        return Fact("cause.guidance_scale", {"scale": scale})
    for name, part in plan.components.items():
        if is_transformer(name) and part.backend != PYTORCH:
            return Fact("cause.transformer_engine", {"component": name, "backend": part.backend})
        if is_transformer(name) and part.quantization != "none":
            return Fact("cause.quantization", {"quantization": part.quantization})
    imprecise = fault != "frozen" and may_overflow(vae)
    if "float16" in {part.dtype for part in plan.components.values()}:
        if imprecise and vae.dtype == "float16":
            return Fact("cause.vae_precision", {"dtype": vae.dtype})
        return Fact("cause.float16")
    if plan.steps < _FEW_STEPS:
        return Fact("cause.few_steps", {"steps": plan.steps})
    return Fact("cause.vae_precision_or_weights", {"dtype": vae.dtype}) if imprecise else Fact("cause.weights")
