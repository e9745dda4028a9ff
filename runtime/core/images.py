"""The images and the video that a video starts from, in requests and plans.

`models.images` and `models.videos` find and check the files, and keep a copy of each under its digest. A request names
an image or a video by its file, or by the copy: "sha256:DIGEST/NAME", where the name is for people.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runtime.core.frozen import FrozenModel

PREFIX = "sha256:"
CROP, FIT = "crop", "fit"
# The middle: the part that stays when an image is cropped, in percent of what is cut.
MIDDLE = 50.0
_REFERENCE = re.compile(rf"{PREFIX}([0-9a-f]{{64}})(?:/([^/\\]+))?")
_DIGEST = re.compile(rf"{PREFIX}([0-9a-f]{{64}})(?![0-9a-f])")
_SHOWN_DIGITS = 8
# Begins a mask of boxes, which are joined by "+".
BOXES = "box:"
_AND = "+"
MOST_BOXES = 16
_WHOLE = 100.0
# How much is added to a frame on its left, top, right and bottom, in percent of its width and height.
Borders = tuple[float, float, float, float]
NO_BORDERS: Borders = (0.0, 0.0, 0.0, 0.0)


class ImageReference(NamedTuple):
    """The copy of an image or a video, as a request names it."""

    digest: str
    name: str


class InputFile(FrozenModel):
    """One image or video whose file was found and checked.

    Attributes:
        name: of the file that was given, in messages and results.
        path: the copy of the file in the cache folder, which is named by the digest; the file itself if nothing can be
            written there.
        digest: the file's SHA-256 in hexadecimal.
        width, height: of the upright image or frame, in pixels.
    """

    name: str
    path: Path
    digest: str
    width: int
    height: int

    @property
    def reference(self) -> str:
        """How requests name it once the file was found: by its copy, or without one by the file's path."""
        return f"{PREFIX}{self.digest}/{self.name}" if self.path.name == self.digest else str(self.path)

    def summary(self) -> dict[str, Any]:
        """Return what results record of it, as JSON values: its name and digest, not its path."""
        return self.model_dump(mode="json", exclude={"path"})


class ImageUse(InputFile):
    """One image."""


class ClipPart(FrozenModel):
    """A part of a video that has several.

    Attributes:
        prompt: what it was made from; empty if that is unknown.
        frames: how many the video has of it.
    """

    prompt: str
    frames: int


class VideoUse(InputFile):
    """One video.

    Attributes:
        fps: the rate at which its frames are read, in frames per second.
        frames: how many frames it has at that rate, counted up to the most that the request can take.
        seconds: its duration as the file states it; `None` if it does not.
        parts: of a video that is extended.
    """

    fps: int
    frames: int
    seconds: float | None = None
    parts: tuple[ClipPart, ...] = ()


class Box(NamedTuple):
    """A box in a frame, in percent of the frame's width and height."""

    left: float
    top: float
    width: float
    height: float

    def pixels(self, width: int, height: int) -> tuple[slice, slice]:
        """Return the rows and the columns of a frame that it covers, at least one of each."""
        columns, rows = _covered(self.left, self.width, width), _covered(self.top, self.height, height)
        return rows, columns


def _covered(start: float, length: float, side: int) -> slice:
    """Return the pixels of a side that a part of it covers, in percent of it."""
    first = min(round(start * side / _WHOLE), side - 1)
    return slice(first, max(round((start + length) * side / _WHOLE), first + 1))


class BoxMask(FrozenModel):
    """A mask that is white in boxes, in all frames."""

    boxes: tuple[Box, ...]

    @property
    def reference(self) -> str:
        """How requests name it, such as "box:10,20,30,40+60,0,40,100"."""
        return BOXES + _AND.join(",".join(f"{value:.12g}" for value in box) for box in self.boxes)

    @property
    def digest(self) -> str:
        """What identifies it: how requests name it."""
        return self.reference


def parse_boxes(text: str) -> BoxMask | None:
    """Return the boxes that a text such as "box:10,20,30,40" describes; `None` if it begins otherwise.

    Each is the distances from the left and the top, the width and the height, in percent of the frame.

    Raises:
        ValueError: if it begins so, and has no boxes within the frame, or more than `MOST_BOXES`.
    """
    if not text.startswith(BOXES):
        return None
    parts = text.removeprefix(BOXES).split(_AND)
    boxes = tuple(Box(*map(float, part.split(","))) for part in parts if part.count(",") == len(Box._fields) - 1)
    inside = all(
        0 <= start < start + length <= _WHOLE
        for box in boxes
        for start, length in ((box.left, box.width), (box.top, box.height))
    )
    if len(boxes) != len(parts) or len(boxes) > MOST_BOXES or not inside:
        raise ValueError(text)
    return BoxMask(boxes=boxes)


def with_borders(width: float, height: float, borders: Sequence[float]) -> tuple[float, float]:
    """Return the size of a frame after borders are added to it."""
    left, top, right, bottom = (border / _WHOLE for border in borders)
    return width * (1 + left + right), height * (1 + top + bottom)


def part_within(width: int, height: int, borders: Sequence[float]) -> tuple[slice, slice]:
    """Return the rows and the columns of a frame of this size that are not its borders, at least one of each."""
    left, top = borders[:2]
    across, down = (_WHOLE / side for side in with_borders(_WHOLE, _WHOLE, borders))
    return Box(left * across, top * down, _WHOLE * across, _WHOLE * down).pixels(width, height)


def input_key(field: str, number: int) -> str:
    """Return the key of one of several files of a request's field, from 0."""
    return f"{field}[{number}]"


def field_of(key: str) -> str:
    """Return the request's field of a key in `ResolvedRequest.inputs`."""
    return key.partition("[")[0]


def by_field(named: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Return names of files by the request's field, those of a field with several in a list.

    Args:
        named: by keys as in `ResolvedRequest.inputs`, in order.
    """
    grouped: dict[str, str | list[str]] = {}
    for key, name in named.items():
        field = field_of(key)
        grouped[field] = name if field == key else [*grouped.get(field, []), name]
    return grouped


def parse_reference(text: str) -> ImageReference | None:
    """Return the copy that a text names; `None` if it is the path of a file.

    Raises:
        ValueError: if it begins as a copy's name, but is not one.
    """
    if not text.startswith(PREFIX):
        return None
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return ImageReference(match[1], match[2] or match[1][:_SHOWN_DIGITS])


def referenced(text: str) -> set[str]:
    """Return the digests of all copies that are named anywhere in a text, such as a stored request."""
    return {match[1] for match in _DIGEST.finditer(text)}
