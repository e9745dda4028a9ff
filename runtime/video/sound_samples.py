"""Sound in step with frames: of a video, of a loop and of a video that continues another one; and its file for ffmpeg.

Functions of samples, (channels, samples) float32. Positions are rounded to the nearest sample.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np

from runtime.core.plan import Looping
from runtime.core.sound import Sound

# Samples that are converted at once, so that an hour takes little more memory than it has.
_AT_ONCE = 1 << 20


def sample_at(frames: int | Fraction, fps: int | Fraction, rate: int) -> int:
    """Return the sample with which a frame starts."""
    return round(Fraction(frames) * rate / Fraction(fps))


def fitted(sound: Sound, frames: int | Fraction, fps: int | Fraction) -> Sound:
    """Return sound as long as so many frames: the end is cut off, or silence follows."""
    count = sample_at(frames, fps, sound.rate)
    samples = sound.samples[:, :count]
    return Sound(np.pad(samples, ((0, 0), (0, count - samples.shape[1]))), sound.rate)


def looped(sound: Sound, looping: Looping | None, frames: int, fps: int | Fraction) -> Sound:
    """Return the sound of a loop, which can be repeated without a jump.

    Played backwards, sound turns where the picture does, in the middle of the first and of the last frame. A video that
    ends on its first frame loses its last one, whose sound fades into that of the first one.

    Args:
        looping: see `ExecutionPlan.looping`; `None` returns the sound of the frames.
        frames: of the video before it is a loop.
    """
    sound = fitted(sound, frames, fps)
    if looping is None or frames == 1:
        return sound
    if looping == "same frame":
        count = sample_at(frames - 1, fps, sound.rate)
        end = sound.samples[:, count:]
        samples = sound.samples[:, :count].copy()
        samples[:, : end.shape[1]] = _faded(end[:, :count], samples[:, : end.shape[1]])
        return Sound(samples, sound.rate)
    count, turn = sample_at(2 * frames - 2, fps, sound.rate), sample_at(Fraction(1, 2), fps, sound.rate)
    phase = (np.arange(count) - turn) % count
    return Sound(sound.samples[:, turn + np.minimum(phase, count - phase)], sound.rate)


def continued(earlier: Sound | None, new: Sound | None, earlier_frames: int, fps: int | Fraction) -> Sound | None:
    """Return the sound of a video and of a new part, whose first frame is the last one of the video.

    Where both have sound, it fades from one to the other in that frame. A part without sound is silent.

    Args:
        earlier: of the video; of the same rate and channels as `new`.
        new: of the new part, from the frame that both have.
    """
    either = new if earlier is None else earlier
    if either is None:
        return None
    rate = either.rate
    start, joint = (sample_at(frames, fps, rate) for frames in (earlier_frames - 1, earlier_frames))
    before = None if earlier is None else fitted(earlier, earlier_frames, fps).samples
    after = None if new is None else new.samples
    if before is None:
        assert after is not None
        before = np.zeros((len(after), joint), np.float32)
    elif after is not None:
        shared = min(joint - start, after.shape[1])
        before = before.copy()
        before[:, start : start + shared] = _faded(before[:, start : start + shared], after[:, :shared])
    rest = [] if after is None else [after[:, joint - start :]]
    return Sound(np.concatenate([before, *rest], axis=1), rate)


def followed(sound: Sound | None, later: Sound | None, frames: int, fps: int | Fraction) -> Sound | None:
    """Return the sound of so many frames and of a video that follows them; what is missing before it is silent.

    Args:
        later: of the same rate and channels as `sound`.
    """
    if later is None:
        return sound
    if sound is None:
        sound = Sound(np.zeros((len(later.samples), 0), np.float32), later.rate)
    before = fitted(sound, frames, fps).samples
    return Sound(np.concatenate([before, later.samples], axis=1), later.rate)


def _faded(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return samples that fade from one to the other in a straight line, both (channels, samples)."""
    count = min(first.shape[1], second.shape[1])
    share = np.linspace(0, 1, count, endpoint=False, dtype=np.float32)
    return first[:, :count] * (1 - share) + second[:, :count] * share


def write_samples(sound: Sound, file: Path) -> list[str]:
    """Write samples, limited to -1 to 1, to a file; return ffmpeg's options that open it.

    Raises:
        OSError: if it cannot be written.
    """
    channels, count = sound.samples.shape
    with file.open("wb") as out:
        for start in range(0, count, _AT_ONCE):
            part = np.clip(sound.samples[:, start : start + _AT_ONCE], -1, 1)
            out.write(np.ascontiguousarray(part.T, "<f4").data)
    return ["-f", "f32le", "-ar", str(sound.rate), "-ac", str(channels), "-i", str(file)]
