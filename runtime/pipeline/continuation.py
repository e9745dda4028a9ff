"""The video that a job continues: its frames and its sound come first, and the new colors are matched to its last one.

The new part starts from that last frame, which the VAE encodes and decodes: it comes a second time, with slightly other
colors. The difference is measured there, and taken from all new frames, so that nothing changes at the seam.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.sound import Sound
from runtime.models.extended import FIELD
from runtime.models.videos import clip_frames, open_video
from runtime.video.reader import COLORS, read_sound, read_video
from runtime.video.sound_samples import continued, followed

# Frames that are read at once.
_AT_ONCE = 4
_WHITE = 255
# A VAE changes colors by a few percent. More is not a shift of colors, but another picture.
_MOST_GAIN, _MOST_OFFSET = 1.15, 0.08 * _WHITE


class Continuation:
    """Joins a new part to a video, and to one that follows; memory does not depend on their lengths.

    Args:
        plan: has the video that is continued.
        check: called many times a second while it is read; an exception that it raises ends that.
    """

    def __init__(self, plan: ExecutionPlan, check: Callable[[], None]) -> None:
        assert plan.extend is not None
        self._plan, self._use, self._check = plan, plan.extend, check
        self._table: np.ndarray | None = None
        # New frames that wait: at the start for all that the video has too, then for the video that follows.
        self._waiting = np.empty((0, plan.height, plan.width, COLORS), np.uint8)
        # New frames so far, and how many of the last ones the video that follows has too.
        self._count, self._shared = 0, 0 if plan.join is None else plan.extend_frames

    def join(self, frames: np.ndarray) -> Iterator[np.ndarray]:
        """Yield new frames with the colors of the video; before the first ones, all frames of the video.

        The first new frames, which are the last ones of the video, are left out. After the last new frame come those of
        the video that follows, if there is one; frames that both have fade from one to the other.

        Args:
            frames: the next ones, (n, height, width, 3) uint8.

        Raises:
            InvalidRequestError: if the video's file is gone or has changed, or it has fewer frames than planned.
            MachineError: if there is no ffmpeg.
        """
        self._count += len(frames)
        frames = np.concatenate([self._waiting, frames])
        if self._table is None:
            extend_frames = self._plan.extend_frames
            if len(frames) < extend_frames:
                self._waiting = frames
                return
            last = frames[:0]
            for earlier in self._earlier():
                yield earlier
                last = earlier[-1:]
            self._table = color_table(frames[extend_frames - 1], last[0])
            frames = frames[extend_frames:]
        ready = max(len(frames) - self._shared, 0)
        self._waiting = frames[ready:]
        if ready:
            yield self._colored(frames[:ready])
        if self._plan.join is not None and self._count == self._plan.frames:
            yield from self._later(self._colored(self._waiting))

    def _colored(self, frames: np.ndarray) -> np.ndarray:
        """Return new frames with the colors of the video that they continue."""
        assert self._table is not None
        return np.stack([self._table[color][frames[..., color]] for color in range(COLORS)], axis=-1)

    def _later(self, shared: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the frames of the video that follows, the first ones faded into from new ones."""
        assert self._plan.join is not None
        following = self._plan.join
        frames = clip_frames(following, self._plan, "join", self._check, end=following.frames)
        for number, image in enumerate(frames):
            frame = np.asarray(image)
            if number < len(shared):
                share = (number + 1) / (len(shared) + 1)
                frame = np.rint((1 - share) * shared[number] + share * frame).astype(np.uint8)
            yield frame[None]

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
        joined = continued(earlier, sound, use.frames, use.fps)
        following = self._plan.join
        if following is None:
            return joined
        layout = {} if joined is None else {"rate": joined.rate, "channels": len(joined.samples)}
        seconds = Fraction(following.frames, use.fps)
        later = read_sound(
            open_video(following, self._check, "join"), seconds, field="join", check=self._check, **layout
        )
        return followed(joined, later, sum(part.frames for part in self._plan.parts) - following.frames, use.fps)

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
