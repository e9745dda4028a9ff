"""Images of a clip as frames of its size, and what it begins and ends with among control frames. Imports no torch."""

from collections import deque
from collections.abc import Callable, Iterator

from PIL import Image

from runtime.core.cancel import never
from runtime.core.images import field_of
from runtime.core.plan import ResolvedRequest
from runtime.models.images import open_image
from runtime.models.videos import clip_frames
from runtime.video.images import fitted
from runtime.video.preprocessing import UNKNOWN


def images_of(settings: ResolvedRequest, check: Callable[[], None] = never) -> list[Image.Image]:
    """Read a clip's images; return them as frames of its size.

    Args:
        check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if one cannot be read.
    """
    size = settings.width, settings.height
    return [
        fitted(open_image(use, field_of(field), check), *size, settings.image_fit, settings.image_position)
        for field, use in settings.images.items()
    ]


def given_frames(
    settings: ResolvedRequest, check: Callable[[], None] = never
) -> tuple[list[Image.Image], list[Image.Image]]:
    """Return the frames that a clip begins with, and those that it ends with, of the clip's size.

    They are the last frames of a video that it continues, or its image; the first ones of a video that follows, or its
    last image.

    Raises:
        InvalidRequestError: if one cannot be read.
        MachineError: if a program that reads them does not start.
    """
    still = settings if settings.extend is None else settings.replace(image=None)
    images = dict(zip(still.images, images_of(still, check), strict=True))
    first, last = ([images[field]] if field in images else [] for field in ("image", "last_image"))
    if settings.extend is not None:
        frames = clip_frames(settings.extend, settings, "extend", check, end=settings.extend.frames)
        first = list(deque(frames, settings.extend_frames))
    if settings.join is not None:
        last = list(clip_frames(settings.join, settings, "join", check, end=settings.extend_frames))
    return first, last


def with_given_frames(
    settings: ResolvedRequest,
    controls: Iterator[tuple[Image.Image, Image.Image | None]] | None,
    check: Callable[[], None] = never,
    every: int = 1,
) -> Iterator[tuple[Image.Image, Image.Image | None]]:
    """Yield the control frames of a clip with the given ones in their places, which do not change.

    Args:
        controls: from `control_frames`, with the same `every`; `None` without a control video: other frames are gray.
        check, every: see `control_frames`.

    Raises:
        InvalidRequestError, MachineError: see `given_frames`.
    """
    first, last = given_frames(settings, check)
    places = dict(enumerate(first)) | dict(enumerate(last, settings.frames - len(last)))
    size = settings.width, settings.height
    for number in range(0, settings.frames, every):
        check()
        shown = (Image.new("RGB", size, (UNKNOWN,) * 3), None) if controls is None else next(controls)
        yield (places[number], Image.new("L", size)) if number in places else shown
