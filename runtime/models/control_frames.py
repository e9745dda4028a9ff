"""The control frames of a clip as its model gets them, one after the other. Imports no torch."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from runtime.core.cancel import never
from runtime.core.images import BoxMask, VideoUse, part_within
from runtime.core.plan import ResolvedRequest
from runtime.core.request import BY_MODEL, OFF
from runtime.models.images import open_image
from runtime.models.made_frames import MadeFrames, picture_of
from runtime.models.videos import clip_frames
from runtime.video.images import fitted
from runtime.video.preprocessing import CHANGED, UNKNOWN, changes_of, control_frame, within_mask

Settings = TypeVar("Settings", bound=ResolvedRequest)


def control_frames(
    settings: ResolvedRequest,
    check: Callable[[], None] = never,
    every: int = 1,
    made: np.ndarray | None = None,
) -> Iterator[tuple[Image.Image, Image.Image | None]]:
    """Yield the control frames of a clip, RGB, each with where it changes: 255 there, else 0; `None` for everywhere.

    A mask of a background video says nothing about them.

    Args:
        settings: of a clip that has a control video.
        check: see `models.images.with_images`.
        every: 1 for all frames, 2 for every other one.
        made: what a model made of them, see `MadeFrames`; without it, frames for a model stay as they are.

    Raises:
        InvalidRequestError: if the control video or the mask cannot be read, or has fewer frames by now.
        MachineError: if a program that reads them does not start.
    """
    assert settings.control is not None
    shown, _ = within_borders(settings)
    masks: Iterator[Image.Image | None] = itertools.repeat(None)
    mask = settings.mask if settings.background is None else None
    if isinstance(mask, VideoUse) and mask.frames > 1:
        masks = (frame.convert("L") for frame in clip_frames(mask, shown, "mask", check))
    elif mask is not None:
        masks = itertools.repeat(still_mask(shown, check))
    video = clip_frames(settings.control, shown, "control", check)
    numbered = zip(itertools.count(), video, masks, strict=False)
    for number, frame, changing in itertools.islice(numbered, 0, None, every):
        check()
        shown_frame = _of_control(frame, changing, settings.preprocess, None if made is None else made[number])
        changes = None if changing is None else changes_of(changing)
        yield (shown_frame, changes) if shown is settings else _outpainted(shown_frame, changes, settings)


def _of_control(frame: Image.Image, mask: Image.Image | None, kind: str, made: np.ndarray | None) -> Image.Image:
    """Return the control frame of a frame; see `control_frames` for `made`, which is of this frame."""
    if kind == OFF or (kind in BY_MODEL and made is None):
        return frame
    return control_frame(frame, kind, mask) if made is None else within_mask(picture_of(made), frame, mask)


def made_frames(settings: ResolvedRequest, cache_dir: Path) -> MadeFrames | None:
    """Return where the control frames are that a model makes of a clip; `None` if none does."""
    return None if settings.preprocessor is None else MadeFrames(within_borders(settings)[0], cache_dir)


def still_mask(settings: ResolvedRequest, check: Callable[[], None] = never) -> Image.Image:
    """Return the brightness of a mask that holds for all frames, mode L, of the clip's size.

    It is an image, boxes, or a video with one frame.
    """
    if isinstance(settings.mask, VideoUse):
        (frame,) = clip_frames(settings.mask, settings, "mask", check, end=1)
        return frame.convert("L")
    if isinstance(settings.mask, BoxMask):
        mask = Image.new("L", (settings.width, settings.height))
        for rows, columns in (box.pixels(*mask.size) for box in settings.mask.boxes):
            mask.paste(CHANGED, (columns.start, rows.start, columns.stop, rows.stop))
        return mask
    assert settings.mask is not None
    image = open_image(settings.mask, "mask", check)
    return fitted(image, settings.width, settings.height, settings.image_fit, settings.image_position).convert("L")


def within_borders(settings: Settings) -> tuple[Settings, tuple[slice, slice]]:
    """Return the settings of the part of a clip that a control video with borders fills, and its rows and columns."""
    rows, columns = part_within(settings.width, settings.height, settings.outpaint)
    if not any(settings.outpaint):
        return settings, (rows, columns)
    return settings.replace(width=columns.stop - columns.start, height=rows.stop - rows.start), (rows, columns)


def _outpainted(
    frame: Image.Image, changes: Image.Image | None, settings: ResolvedRequest
) -> tuple[Image.Image, Image.Image]:
    """Return a control frame, and where it changes, with borders that change."""
    size = settings.width, settings.height
    rows, columns = part_within(*size, settings.outpaint)
    whole, mask = Image.new("RGB", size, (UNKNOWN,) * 3), Image.new("L", size, CHANGED)
    whole.paste(frame, (columns.start, rows.start))
    mask.paste(changes or Image.new("L", frame.size), (columns.start, rows.start))
    return whole, mask
