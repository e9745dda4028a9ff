"""The sections of a FramePack video: in which order they are made, what each is made from, and where its frames belong.

And the segments of a clip of a character, as in diffusers' `WanAnimatePipeline`. Without torch.

Source of sections: Zhang and Agrawala, "Packing Input Frame Context in Next-Frame Prediction Models for Video
Generation" (arXiv 2504.12626), as in diffusers' `HunyuanVideoFramepackPipeline`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Latent frames that a section sees of those made before it: the nearest in full, then compressed 2 and 4 times.
HISTORY_1X, HISTORY_2X, HISTORY_4X = 1, 2, 16
HISTORY = HISTORY_1X + HISTORY_2X + HISTORY_4X
# Latent frames of a section in the published models.
LATENT_WINDOW = 9
# Beyond this many sections, the positions of all but a few are the same.
_MOST_DISTINCT = 4


class SamplingType(str, Enum):
    """The order of sections, with diffusers' names (`FramepackSamplingType`)."""

    # From the start to the end, as FramePack-F1 was trained.
    VANILLA = "vanilla"
    # From the end to the start, as FramePack-I2V was trained; the section made last begins with the given image.
    INVERTED_ANTI_DRIFTING = "inverted_anti_drifting"


@dataclass(frozen=True)
class Section:
    """One section of a video.

    Attributes:
        index: its number in the order of sampling, from 0.
        last: whether it is the last one made.
        padding: latent frames that lie between the image and the section; they are not made yet.
        prefix: the position of the image; positions are those of the rotary embedding, in latent frames.
        latents: the positions of its own latent frames.
        history_1x, history_2x, history_4x: the positions of the latent frames made before it.
        span: the frames of the video that its own latent frames stand for.
        decoded: the number of latent frames that are decoded once it is sampled: its own and its neighbour's.
        window: the frames of the video that these become.
        blended: those of `window` that blend with the frames decoded before; empty for the first section.
        frames: frames that no later section changes.
        pending: frames that the next section blends with its own; empty for the last section.
    """

    index: int
    last: bool
    padding: int
    prefix: range
    latents: range
    history_1x: range
    history_2x: range
    history_4x: range
    span: range
    decoded: int
    window: range
    blended: range
    frames: range
    pending: range

    @property
    def clean(self) -> tuple[int, ...]:
        """The positions of the latent frames that it sees in full: the image and the nearest frame made before."""
        return (*self.prefix, *self.history_1x)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            name: [value.start, value.stop, value.step] if isinstance(value, range) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Section":
        """Return the section of `as_json`."""
        fields: dict[str, Any] = {
            name: range(*value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Sections:
    """The division of a video into sections.

    Attributes:
        count: the number of sections, at least 1.
        window: the number of latent frames of each section.
        temporal_scale: frames per latent frame of the VAE.
    """

    count: int
    sampling_type: SamplingType
    window: int = LATENT_WINDOW
    temporal_scale: int = 4

    @property
    def inverted(self) -> bool:
        """Whether sections are made from the end of the video to its start."""
        return self.sampling_type is SamplingType.INVERTED_ANTI_DRIFTING

    @property
    def stride(self) -> int:
        """Frames that each section adds to the video."""
        return self.window * self.temporal_scale

    @property
    def frames(self) -> int:
        """Frames of the video: one of the image and those of each section."""
        return self.count * self.stride + 1

    @property
    def overlap(self) -> int:
        """Frames in which neighbouring sections blend."""
        return (self.window - 1) * self.temporal_scale + 1

    @property
    def history(self) -> int:
        """Latent frames to keep between sections, for any number of sections: for the next one and for decoding."""
        return max(HISTORY, 2 * self.window + 1)

    def __getitem__(self, index: int) -> Section:
        """Return a section by its number in the order of sampling."""
        padding = paddings(self.count)[index] * self.window if self.inverted else 0
        window = self._window(index)
        return Section(
            index=index,
            last=index == self.count - 1,
            padding=padding,
            span=self._span(index),
            decoded=(len(window) - 1) // self.temporal_scale + 1,
            window=window,
            blended=range(0) if index == 0 else self._pending(index - 1),
            frames=self._final(index),
            pending=self._pending(index),
            **self._positions(padding),
        )

    def __iter__(self) -> Iterator[Section]:
        return (self[index] for index in range(self.count))

    def _positions(self, padding: int) -> dict[str, range]:
        latents, compressed = {"latents": self.window}, {"history_2x": HISTORY_2X, "history_4x": HISTORY_4X}
        if self.inverted:
            sizes = {"prefix": 1, "padding": padding, **latents, "history_1x": HISTORY_1X, **compressed}
        else:
            sizes = {"prefix": 1, **dict(reversed(compressed.items())), "history_1x": HISTORY_1X, **latents}
        positions, start = {}, 0
        for name, size in sizes.items():
            positions[name] = range(start, start + size)
            start += size
        positions.pop("padding", None)
        return positions

    def _span(self, index: int) -> range:
        place = self.count - 1 - index if self.inverted else index
        return range(1 + place * self.stride, 1 + (place + 1) * self.stride)

    def _window(self, index: int) -> range:
        """Return the frames that are decoded after a section: of its own latent frames and those made before."""
        step, first, last = self.stride, index == 0, index == self.count - 1
        if self.inverted:
            stop = self.frames if first else self.frames - (index - 1) * step
            return range(0 if last else self.frames - index * step - self.overlap, stop)
        stop = (index + 1) * step + 1
        return range(0 if first else stop - step - self.overlap, stop)

    def _pending(self, index: int) -> range:
        window = self._window(index)
        if index == self.count - 1:
            return range(0)
        return window[: self.overlap] if self.inverted else window[-self.overlap :]

    def _final(self, index: int) -> range:
        window, pending = self._window(index), len(self._pending(index))
        return window[pending:] if self.inverted else window[: len(window) - pending]


def paddings(count: int) -> list[int]:
    """Return the distance of each section from the image, in sections, for inverted sampling.

    More than four sections are sampled as if they were four, which is all that the model was trained with.
    """
    if count > _MOST_DISTINCT:
        return [3] + [2] * (count - 3) + [1, 0]
    return list(reversed(range(count)))


def frames_in(seconds: float, fps: int, window: int = LATENT_WINDOW, temporal_scale: int = 4) -> int:
    """Return the frames of the video of whole sections whose length is nearest to `seconds`; at least one section.

    60 s at 30 frames per second are 50 sections, 1801 frames. The original FramePack rounds in the same way.
    """
    stride = window * temporal_scale
    return max(round(seconds * fps / stride), 1) * stride + 1


def section_count(frames: int, window: int = LATENT_WINDOW, temporal_scale: int = 4) -> int:
    """Return the smallest number of sections with at least so many frames.

    diffusers divides `num_frames` by the frames of a section decoded alone, so it makes more than it is asked for: 55
    sections, 66 s, for 1800 frames. Its video of n sections is that of num_frames = n * (4 * window - 3).
    """
    return max(math.ceil((frames - 1) / (window * temporal_scale)), 1)


@dataclass(frozen=True)
class Segment:
    """One segment of a clip that is made in several, from the start to the end.

    Attributes:
        index: its number, from 0.
        last: whether it is the last one.
        sources: the frames of the given videos that its frames follow, by number; beyond the end of the clip, they are
            those before it, backwards.
        given: how many of its first frames are the last ones of the segment before; 0 for the first.
        frames: the frames of the clip that it adds.
    """

    index: int
    last: bool
    sources: tuple[int, ...]
    given: int
    frames: range


@dataclass(frozen=True)
class Segments:
    """The division of a clip into segments of equal length.

    Attributes:
        frames: of the clip.
        length: the most frames of a segment; a shorter clip is one segment.
        overlap: frames that a segment shares with the one before.
    """

    frames: int
    length: int
    overlap: int

    @property
    def count(self) -> int:
        """The number of segments."""
        return max(math.ceil((self.frames - self.overlap) / (self.length - self.overlap)), 1)

    def __getitem__(self, index: int) -> Segment:
        """Return a segment by its number."""
        start = index * (self.length - self.overlap)
        given = self.overlap if index else 0
        stop = min(start + self.length, self.frames)
        length = self.length if self.count > 1 else self.frames
        # As a ball between two walls; the clip has more frames than it is extended by.
        sources = tuple(min(number, 2 * (self.frames - 1) - number) for number in range(start, start + length))
        return Segment(index, index == self.count - 1, sources, given, range(start + given, stop))
