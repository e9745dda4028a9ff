"""The limits for visitors of a share link: of a video, of the number of videos, and of disk space."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from runtime.core.errors import InvalidRequestError, LimitError
from runtime.core.images import ImageUse
from runtime.core.request import AUTO, FIELDS, GenerationRequest
from runtime.core.settings import Settings
from runtime.models.spec import ModelSpec
from runtime.planner.clip import frames_for, like_image, size_for

HOUR_SECONDS = 3600.0
# Uploads of one visitor, and of all visitors together, in an hour.
MOST_IMAGES, MOST_IMAGE_BYTES = 20, 1 << 30
_MINUTE_SECONDS = 60
# Disk space that is kept free for the owner's videos.
_RESERVED_BYTES = 1 << 29


class UploadLimit:
    """Limits how many bodies are received at once, each of which takes its size of memory. For one event loop.

    Args:
        each, most: maximum of one user, and of all.
        refusal: returns the error for another one.
    """

    def __init__(self, each: int, most: int, refusal: Callable[[], Exception]) -> None:
        self._each = each
        self._most = most
        self._refusal = refusal
        self._received: Counter[str] = Counter()

    @contextmanager
    def receiving(self, user: str) -> Iterator[None]:
        """Count a body of a user while it is received.

        Raises:
            Exception: the refusal, if there are too many.
        """
        if self._received[user] >= self._each or self._received.total() >= self._most:
            raise self._refusal()
        self._received[user] += 1
        try:
            yield
        finally:
            self._received[user] -= 1
            self._received = +self._received  # without users who send nothing any more


@dataclass(frozen=True)
class Limits:
    """Limits of each video, and of the number of videos.

    Attributes:
        frames, steps: maximum per video.
        sizes: largest sizes as (width, height); other sizes must fit into one of them in either orientation.
        waiting: maximum number of queued and running videos of one visitor.
        waiting_all: maximum number of queued and running videos of all visitors.
        per_hour: maximum number of videos that one visitor may submit in an hour.
    """

    frames: int
    steps: int
    sizes: tuple[tuple[int, int], ...]
    waiting: int
    waiting_all: int
    per_hour: int


def limits_of(settings: Settings, spec: ModelSpec) -> Limits:
    """Return the limits for a model: those in the settings, or the model's defaults where a setting is missing."""
    default_size = (spec.defaults.width, spec.defaults.height)
    return Limits(
        frames=settings.share_frames or spec.defaults.frames,
        steps=settings.share_steps or spec.defaults.steps,
        sizes=(settings.share_size,) if settings.share_size else tuple(dict.fromkeys((*spec.sizes, default_size))),
        waiting=settings.share_queue,
        waiting_all=settings.share_queue_all,
        per_hour=settings.share_rate,
    )


def defaults_within(spec: ModelSpec, limits: Limits) -> dict[str, int]:
    """Return the defaults for a visitor's video: the model's width, height, frames and steps, reduced to the limits."""
    default = (spec.defaults.width, spec.defaults.height)
    sizes = [size for size in (default, *spec.sizes) if allows_size(size, limits)]
    width, height = sizes[0] if sizes else _rounded_down(limits.sizes[0], spec)
    return {
        "width": width,
        "height": height,
        "frames": min(spec.defaults.frames, most_frames(spec, limits)),
        "steps": min(spec.defaults.steps, limits.steps),
    }


def most_frames(spec: ModelSpec, limits: Limits) -> int:
    """Return the largest number of frames that the limits allow and the model supports."""
    stride = spec.frame_stride
    return max((limits.frames - 1) // stride * stride + 1, spec.least_frames)


def allows_size(size: tuple[int, int], limits: Limits) -> bool:
    """Return whether a visitor's video may be of this size."""
    return any(_fits(size, largest) for largest in limits.sizes)


def filled_in(request: GenerationRequest, spec: ModelSpec, limits: Limits) -> GenerationRequest:
    """Replace "auto" by defaults within the limits, and reset the fields that visitors may not set.

    Args:
        spec: with the images of the request, whose proportions the size has if the limits allow it.
    """
    defaults = defaults_within(spec, limits)
    if spec.image is not None:
        width, height = _size_of_image(request, spec, spec.image, limits)
        defaults |= {"width": width, "height": height}
    if request.seconds != AUTO:
        fps = spec.defaults.fps if request.fps == AUTO else int(request.fps)
        request = request.replace(frames=frames_for(request, spec, fps), seconds=AUTO)
    filled = {name: value for name, value in defaults.items() if getattr(request, name) == AUTO}
    reset = {
        name: info.get_default(call_default_factory=True)
        for name, info in GenerationRequest.model_fields.items()
        if FIELDS[name].group in {"acceleration", "loras", "finishing"}
    }
    return request.replace(**{**filled, **reset, "build": "never"})


def _size_of_image(request: GenerationRequest, spec: ModelSpec, image: ImageUse, limits: Limits) -> tuple[int, int]:
    """Return the size that follows from an image, made smaller until the limits allow it."""
    size = size_for(request, spec)
    if {request.width, request.height} == {AUTO}:
        pixels, least = prod(size), prod(spec.least_size)
        while not allows_size(size, limits) and pixels > least:
            pixels = pixels * 9 // 10
            size = like_image(spec, image, pixels)
    return size


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Check that a video is within the limits.

    Args:
        request: as `filled_in` returns it.

    Raises:
        InvalidRequestError: if it is not; names the field.
    """
    for name, most in (("frames", limits.frames), ("steps", limits.steps)):
        value = getattr(request, name)
        if value > most:
            raise InvalidRequestError(name, "server.visitor_maximum", value=value, maximum=most)
    width, height = int(request.width), int(request.height)
    if not allows_size((width, height), limits):
        raise InvalidRequestError("width", "server.visitor_size", width=width, height=height, maximum=_largest(limits))


def check_queue(limits: Limits, own_waiting: int, all_waiting: int, submitted: Sequence[float], now: float) -> None:
    """Check that a visitor may queue another video now.

    Args:
        own_waiting, all_waiting: numbers of queued and running videos of this visitor, and of all.
        submitted: times of this visitor's earlier submissions in seconds, ascending, on the clock of `now`.

    Raises:
        LimitError: if a limit is reached.
    """
    if own_waiting >= limits.waiting:
        raise LimitError("server.visitor_queue_full", maximum=limits.waiting)
    if all_waiting >= limits.waiting_all:
        raise LimitError("server.queue_full")
    recent = [at for at in submitted if now - at < HOUR_SECONDS]
    if len(recent) >= limits.per_hour:
        minutes = max(1, round((recent[-limits.per_hour] + HOUR_SECONDS - now) / _MINUTE_SECONDS))
        raise LimitError("server.visitor_rate", maximum=limits.per_hour, minutes=minutes)


def check_uploads(times: Sequence[float], all_bytes: int, now: float) -> None:
    """Check that a visitor may upload another image now.

    Args:
        times: of this visitor's earlier uploads in seconds, ascending, on the clock of `now`.
        all_bytes: what all visitors have uploaded in the last hour.

    Raises:
        LimitError: if a limit is reached.
    """
    recent = [at for at in times if now - at < HOUR_SECONDS]
    if len(recent) >= MOST_IMAGES:
        minutes = max(1, round((recent[-MOST_IMAGES] + HOUR_SECONDS - now) / _MINUTE_SECONDS))
        raise LimitError("server.visitor_images", maximum=MOST_IMAGES, minutes=minutes)
    if all_bytes >= MOST_IMAGE_BYTES:
        raise LimitError("server.images_full")


def check_disk(free_bytes: int) -> None:
    """Check that the disk for videos has enough free space.

    Raises:
        LimitError: if it has not.
    """
    if free_bytes < _RESERVED_BYTES:
        raise LimitError("server.disk_full")


def describe_limits(limits: Limits) -> str:
    """Return the limits as a sentence."""
    each = "one video" if limits.waiting == 1 else f"{limits.waiting} videos"
    return (
        f"At most {limits.frames} frames, {_largest(limits)} and {limits.steps} steps; "
        f"{each} at a time, {limits.per_hour} an hour."
    )


def _rounded_down(size: tuple[int, int], spec: ModelSpec) -> tuple[int, int]:
    """Return a size rounded down to the model's strides, or its smallest one."""
    sides = zip(size, spec.strides, spec.least_size, strict=True)
    width, height = (max(side // stride * stride, least) for side, stride, least in sides)
    return width, height


def _fits(size: tuple[int, int], largest: tuple[int, int]) -> bool:
    return max(size) <= max(largest) and min(size) <= min(largest)


def _largest(limits: Limits) -> str:
    """Return the allowed sizes as text, without those that fit into another one."""
    sizes = [
        size
        for index, size in enumerate(limits.sizes)
        if not any(
            # Of two sizes that differ in orientation only, the first is kept.
            _fits(size, candidate) and (not _fits(candidate, size) or place < index)
            for place, candidate in enumerate(limits.sizes)
            if candidate != size
        )
    ]
    return " or ".join(f"{width}×{height}" for width, height in sizes)
