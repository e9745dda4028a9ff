"""Clips of what videos were made from, frame by frame as their models got it: to compare both."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.core.cancel import never
from runtime.core.plan import ResolvedRequest
from runtime.models.control_frames import control_frames, made_frames
from runtime.models.videos import clip_frames
from runtime.video.mp4 import VideoWriter

# Files of a job's folder.
BEFORE = "before.mp4"
_CRF = 20


def make_before(
    settings: ResolvedRequest, folder: Path, check: Callable[[], None] = never, *, cache_dir: Path | None = None
) -> Path | None:
    """Return the MP4 of a video's control frames, or of the video that it changes; `None` if it has neither.

    It has the size, the frames and the rate of the decoded video, and is kept in the job's folder.

    Args:
        cache_dir: has the control frames that a model made; without them, the clip shows the control video.
        check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if the control video or the video cannot be read any more.
        MachineError: if there is no ffmpeg.
        OutputError: if the folder cannot be written.
    """
    target = folder / BEFORE
    frames = _frames(settings, cache_dir, check)
    if target.is_file() or frames is None:
        return target if frames is not None else None
    with VideoWriter(target, settings.width, settings.height, settings.fps, _CRF) as writer:
        for frame in frames:
            writer.write(np.asarray(frame)[None])
        writer.close_stream()
        writer.finish("", {})
    return target


def _frames(
    settings: ResolvedRequest, cache_dir: Path | None, check: Callable[[], None]
) -> Iterator[Image.Image] | None:
    if settings.control is not None:
        place = None if cache_dir is None else made_frames(settings, cache_dir)
        made = None if place is None else place.read()
        return (frame for frame, _ in control_frames(settings, check, made=made))
    return None if settings.video is None else clip_frames(settings.video, settings, "video", check)
