"""The control frames of a clip as its model gets them, one after the other. Imports no torch."""

import itertools
from collections.abc import Callable, Iterator

from PIL import Image

from runtime.core.cancel import never
from runtime.core.images import ImageUse, VideoUse
from runtime.core.plan import ResolvedRequest
from runtime.core.request import OFF
from runtime.models.images import open_image
from runtime.models.videos import clip_frames
from runtime.video.images import fitted
from runtime.video.preprocessing import changes_of, control_frame


def control_frames(
    settings: ResolvedRequest, check: Callable[[], None] = never, every: int = 1
) -> Iterator[tuple[Image.Image, Image.Image | None]]:
    """Yield the control frames of a clip, RGB, each with where it changes: 255 there, else 0; `None` for everywhere.

    A mask of a background video says nothing about them.

    Args:
        settings: of a clip that has a control video.
        check: see `models.images.with_images`.
        every: 1 for all frames, 2 for every other one.

    Raises:
        InvalidRequestError: if the control video or the mask cannot be read, or has fewer frames by now.
        MachineError: if a program that reads them does not start.
    """
    assert settings.control is not None
    masks: Iterator[Image.Image | None] = itertools.repeat(None)
    mask = settings.mask if settings.background is None else None
    if isinstance(mask, VideoUse):
        masks = (frame.convert("L") for frame in clip_frames(mask, settings, "mask", check))
    elif mask is not None:
        masks = itertools.repeat(still_mask(settings, check))
    video = clip_frames(settings.control, settings, "control", check)
    for frame, changing in itertools.islice(zip(video, masks, strict=False), 0, None, every):
        check()
        made = frame if settings.preprocess == OFF else control_frame(frame, settings.preprocess, changing)
        yield made, None if changing is None else changes_of(changing)


def still_mask(settings: ResolvedRequest, check: Callable[[], None] = never) -> Image.Image:
    """Return the brightness of a mask that is an image, mode L, of the clip's size."""
    assert isinstance(settings.mask, ImageUse)
    image = open_image(settings.mask, "mask", check)
    return fitted(image, settings.width, settings.height, settings.image_fit, settings.image_position).convert("L")
