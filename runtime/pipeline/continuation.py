"""The video that a job continues: its frames and its sound come first, and the new colors are matched to its last one.

The new part starts from that last frame, which the VAE encodes and decodes: it comes a second time, with slightly other
colors. The difference is measured there, and taken from all new frames, so that nothing changes at the seam.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from runtime.core.errors import InvalidRequestError
from runtime.core.images import VideoUse
from runtime.core.sound import Sound
from runtime.models.extended import FIELD
from runtime.models.videos import open_video
from runtime.video.reader import read_sound, read_video
from runtime.video.sound_samples import continued

# Frames that are read at once.
_AT_ONCE = 4
_WHITE = 255
# A VAE changes colors by a few percent. More is not a shift of colors, but another picture.
_MOST_GAIN, _MOST_OFFSET = 1.15, 0.08 * _WHITE


class Continuation:
    """Joins a new part to a video; memory does not depend on their lengths.

    Args:
        use: the video that is continued.
        check: called many times a second while it is read; an exception that it raises ends that.
    """

    def __init__(self, use: VideoUse, check: Callable[[], None]) -> None:
        self._use, self._check = use, check
        self._table: np.ndarray | None = None

    def join(self, frames: np.ndarray) -> Iterator[np.ndarray]:
        """Yield new frames with the colors of the video; before the first ones, all frames of the video.

        The first new frame, which is the last one of the video, is left out.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.

        Raises:
            InvalidRequestError: if the video's file is gone or has changed, or it has fewer frames than planned.
            MachineError: if there is no ffmpeg.
        """
        if self._table is None:
            last = frames[:0]
            for earlier in self._earlier():
                yield earlier
                last = earlier[-1:]
            self._table = color_table(frames[0], last[0])
            frames = frames[1:]
        if len(frames):
            colors = range(frames.shape[-1])
            yield np.stack([self._table[color][frames[..., color]] for color in colors], axis=-1)

    def join_sound(self, sound: Sound | None) -> Sound | None:
        """Return the sound of both parts, see `sound_samples.continued`.

        Args:
            sound: of the new part; `None` if it has none.

        Raises:
            InvalidRequestError: if the video's file is gone or has changed.
            MachineError: if there is no ffmpeg.
        """
        use = self._use
        info = open_video(use, self._check, FIELD)
        layout = {} if sound is None else {"rate": sound.rate, "channels": len(sound.samples)}
        seconds = Fraction(use.frames, use.fps)
        earlier = read_sound(info, seconds, field=FIELD, check=self._check, **layout)
        return continued(earlier, sound, use.frames, use.fps)

    def _earlier(self) -> Iterator[np.ndarray]:
        use, count = self._use, 0
        info = open_video(use, self._check, FIELD)
        reading = read_video(info, _AT_ONCE, rate=Fraction(use.fps), most=use.frames, field=FIELD, check=self._check)
        for frames in reading:
            count += len(frames)
            yield frames
        if count < use.frames:
            raise InvalidRequestError(FIELD, "source.shorter", file=use.name, frames=count, planned=use.frames)


def color_table(frame: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the value for each 8-bit value of each color that makes a frame most like another one, (3, 256) uint8.

    For each color, it is a straight line: the least squares of all pixels, within the limits of what a VAE changes.

    Args:
        frame, target: the same picture, (height, width, 3) uint8.
    """
    values, rows = np.arange(_WHITE + 1, dtype=np.float64), []
    for channel in range(frame.shape[-1]):
        x, y = (picture[..., channel].astype(np.float64).ravel() for picture in (frame, target))
        deviation = x - x.mean()
        spread = float(deviation @ deviation)
        gain = float(deviation @ (y - y.mean())) / spread if spread else 1.0
        gain = min(max(gain, 1 / _MOST_GAIN), _MOST_GAIN)
        offset = min(max(float(y.mean() - gain * x.mean()), -_MOST_OFFSET), _MOST_OFFSET)
        rows.append(np.clip(np.rint(gain * values + offset), 0, _WHITE))
    return np.stack(rows).astype(np.uint8)
