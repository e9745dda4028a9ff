"""Sound of a video: samples and their rate."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sound:
    """Samples of a video's sound.

    Attributes:
        samples: (channels, samples), float32 in -1 to 1.
        rate: samples per second.
    """

    samples: np.ndarray
    rate: int
