"""Frames of a plan's videos, one at a time, at the plan's rate and of its size."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal

from PIL.Image import Image, fromarray

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.images import VideoUse
from runtime.core.plan import ExecutionPlan
from runtime.models.videos import open_video
from runtime.video.images import fitted
from runtime.video.reader import read_video

InputVideo = Literal["video", "control", "mask", "extend", "join"]


def fitted_frames(
    plan: ExecutionPlan,
    field: InputVideo,
    count: int,
    check: Callable[[], None] = never,
    warn: Callable[[Fact], None] | None = None,
) -> Iterator[Image]:
    """Yield the first frames of one of a plan's videos, in RGB.

    Args:
        check: see `models.videos.with_video`.
        warn: called if a part of the file is damaged.

    Raises:
        InvalidRequestError: if it cannot be read, or has fewer frames by now.
        MachineError: if there is no ffmpeg.
    """
    use = getattr(plan, field)
    assert isinstance(use, VideoUse)
    info = open_video(use, check, field)
    reading = read_video(info, 1, rate=Fraction(plan.fps), most=count, field=field, check=check)
    frames = 0
    while True:
        try:
            (frame,) = next(reading)
        except StopIteration as end:
            damage = end.value
            break
        frames += 1
        yield fitted(fromarray(frame), plan.width, plan.height, plan.image_fit, plan.image_position)
    if frames < count:
        raise InvalidRequestError(field, "source.shorter", file=use.name, frames=frames, planned=count)
    if damage and warn is not None:
        warn(Fact("source.damaged", {"file": use.name, "line": damage}))
