"""Videos that are continued: the file, its parts and its last frame, added to a model's spec. Imports no torch."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import Field, TypeAdapter, ValidationError

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.images import ClipPart, ImageUse, VideoUse
from runtime.core.request import MAX_FRAMES, MAX_PROMPT_CHARACTERS, GenerationRequest
from runtime.models.images import image_models, keep_image
from runtime.models.spec import ModelSpec
from runtime.models.videos import find_video, open_video
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_video

FIELD = "extend"
_PARTS = TypeAdapter(Annotated[tuple[ClipPart, ...], Field(min_length=1, max_length=MAX_FRAMES)])
# The files of last frames, by the video's digest: a form asks for a plan with each change.
_LAST_FRAMES: dict[str, bytes] = {}
_MOST_ENTRIES = 16


def with_extended(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the video that a request continues, and its last frame as the image.

    Args:
        cache_dir, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if the video cannot be read or is too long, the model does not start from an image, or the
            request has another start.
        MachineError: if there is no ffmpeg.
        OutputError: if the disk is too full for a copy.
    """
    if request.extend is None:
        return spec
    if request.image is not None or request.video is not None:
        raise InvalidRequestError(FIELD, "source.two_starts")
    if spec.image_input is None:
        able = [model.name for model in image_models(weights_dir)]
        raise InvalidRequestError(FIELD, "source.not_continued", model=spec.title, models=able)
    use = find_video(request.extend, FIELD, cache_dir, None, MAX_FRAMES, keep=keep, check=check)
    if use.frames >= MAX_FRAMES:
        raise InvalidRequestError(FIELD, "source.too_many_frames", file=use.name, most=MAX_FRAMES)
    use = use.replace(parts=_parts_of(use))
    return replace(spec, extend=use, image=_last_frame(use, cache_dir if keep else None, check))


def _parts_of(use: VideoUse) -> tuple[ClipPart, ...]:
    """Return the parts of a video, from its metadata if Tandem made it."""
    try:
        metadata = read_metadata(use.path)
    except OutputError:
        metadata = {}
    request, plan = metadata.get("request"), metadata.get("plan")
    with contextlib.suppress(ValidationError):
        parts = _PARTS.validate_python(plan.get("parts") if isinstance(plan, dict) else None)
        if sum(part.frames for part in parts) == use.frames:
            return parts
    prompt = request.get("prompt") if isinstance(request, dict) else None
    known = isinstance(prompt, str) and len(prompt) <= MAX_PROMPT_CHARACTERS
    return (ClipPart(prompt=str(prompt) if known else "", frames=use.frames),)


def _last_frame(use: VideoUse, cache_dir: Path | None, check: Callable[[], None]) -> ImageUse:
    """Return the last frame of a video as an image, whose file is kept unless `cache_dir` is `None`."""
    if use.digest not in _LAST_FRAMES:
        info = open_video(use, FIELD, check)
        frames = deque(read_video(info, 1, rate=Fraction(use.fps), most=use.frames, field=FIELD, check=check), 1)
        file = BytesIO()
        Image.fromarray(frames[0][0]).save(file, "PNG", compress_level=1)
        if len(_LAST_FRAMES) >= _MOST_ENTRIES:
            _LAST_FRAMES.clear()
        _LAST_FRAMES[use.digest] = file.getvalue()
    data, name = _LAST_FRAMES[use.digest], f"{Path(use.name).stem} (last frame).png"
    if cache_dir is not None:
        return keep_image(data, name, FIELD, cache_dir, check=check)
    digest = hashlib.sha256(data).hexdigest()
    return ImageUse(name=name, path=use.path, digest=digest, width=use.width, height=use.height)
