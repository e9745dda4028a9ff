"""Detect sound that failed (NaN or Inf), is silent, or is clipped: warnings, because the frames may be good."""

from typing import NamedTuple

import numpy as np

from runtime.core.facts import Fact
from runtime.core.sound import Sound

# About -80 dB: quieter sound is not audible.
_SILENCE = 1e-4
# A sample from this value on is at full scale: a vocoder's tanh reaches 1 only by rounding.
_FULL = 0.999
# Sound with this share of samples at full scale is distorted audibly; a few peaks are not.
_CLIPPED_SHARE = 1e-3


class InspectedSound(NamedTuple):
    """Sound as it can be saved, and what is wrong with it.

    Attributes:
        sound: `None` if it cannot be saved.
    """

    sound: Sound | None
    warnings: tuple[Fact, ...] = ()


def inspected(sound: Sound) -> InspectedSound:
    """Return sound as it can be saved, within -1 to 1, with warnings."""
    if not np.isfinite(sound.samples).all():
        return InspectedSound(None, (Fact("pipeline.sound_not_finite"),))
    peaks = np.abs(sound.samples)
    if peaks.max(initial=0) < _SILENCE:
        return InspectedSound(sound, (Fact("pipeline.sound_silent"),))
    share = float((peaks >= _FULL).mean())
    within = Sound(sound.samples.clip(-1, 1), sound.rate)
    return InspectedSound(within, (Fact("pipeline.sound_clipped", {"share": share}),) if share > _CLIPPED_SHARE else ())
