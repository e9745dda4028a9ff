"""Videos that are continued: the file, its parts and its last frame, added to a model's spec. Imports no torch."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import Field, TypeAdapter, ValidationError

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.images import ClipPart, ImageUse, VideoUse
from runtime.core.plan import plain_output
from runtime.core.request import AUTO, EXTEND_FRAMES, MAX_FRAMES, MAX_PROMPT_CHARACTERS, GenerationRequest
from runtime.models.images import all_models, image_models, keep_image, remember
from runtime.models.spec import ModelSpec
from runtime.models.videos import find_video, open_video
from runtime.video.mp4 import find_metadata
from runtime.video.reader import read_video

FIELD = "extend"
_PARTS = TypeAdapter(Annotated[tuple[ClipPart, ...], Field(min_length=1, max_length=MAX_FRAMES)])
# The files of last frames, by the video's digest: a form asks for a plan with each change.
_LAST_FRAMES: dict[str, bytes] = {}
_MOST_FRAMES = 16


def with_extended(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the video that a request continues, its last frame as the image, and what follows it.

    Args:
        cache_dir, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if the video cannot be read, is too long, or was enlarged or interpolated, if the model
            does not start from an image, or the request has another start.
        MachineError: if there is no ffmpeg.
        OutputError: if the disk is too full for a copy.
    """
    check_extended(spec, request, weights_dir)
    if request.extend is None:
        return spec
    use, image = continued(request.extend, cache_dir, keep=keep, check=check)
    following = None
    if request.join is not None:
        following = find_video(request.join, cache_dir, use.fps, MAX_FRAMES, field="join", keep=keep, check=check)
        if following.frames >= MAX_FRAMES:
            raise InvalidRequestError("join", "source.too_many_frames", file=following.name, most=MAX_FRAMES)
        following = following.replace(parts=_parts_of(following, _metadata_of(following)))
    shortest = min((use, *([] if following is None else [following])), key=lambda video: video.frames)
    usual = min(EXTEND_FRAMES, shortest.frames) if spec.takes_given_frames else 1
    extend_frames = usual if request.extend_frames == AUTO else int(request.extend_frames)
    if extend_frames > shortest.frames:
        data = {"value": extend_frames, "video": shortest.name, "frames": shortest.frames}
        raise InvalidRequestError("extend_frames", "source.extend_frames", **data)
    return replace(spec, extend=use, image=image, extend_frames=extend_frames, join=following)


def check_extended(spec: ModelSpec, request: GenerationRequest, weights_dir: Path) -> None:
    """Check that a model continues the video of a request, without reading a file; see `with_extended`.

    Raises:
        InvalidRequestError: if it cannot, or from its last frame only, or the request has another start or end.
    """
    if request.extend is None:
        alone = "join" if request.join is not None else None if request.extend_frames in {AUTO, 1} else "extend_frames"
        if alone is not None:
            raise InvalidRequestError(alone, "source.join_alone", field=alone)
        return
    if request.image is not None or request.video is not None:
        raise InvalidRequestError(FIELD, "source.two_starts")
    if not spec.starts_from_images:
        able = [model.name for model in image_models(weights_dir)]
        raise InvalidRequestError(FIELD, "source.not_continued", model=spec.title, models=able)
    if request.join is not None and request.last_image is not None:
        raise InvalidRequestError("join", "source.two_ends")
    if not spec.takes_given_frames and (request.join is not None or request.extend_frames not in {AUTO, 1}):
        field = "extend_frames" if request.join is None else "join"
        able = [model.name for model in all_models(weights_dir) if model.takes_given_frames]
        raise InvalidRequestError(field, "source.one_frame", field=field, model=spec.title, models=able)


def continued(
    file: str, cache_dir: Path | None, *, keep: bool = True, check: Callable[[], None] = never
) -> tuple[VideoUse, ImageUse]:
    """Return a video that a request continues, checked, and its last frame; see `with_extended`."""
    use = find_video(file, cache_dir, None, MAX_FRAMES, field=FIELD, keep=keep, check=check)
    if use.frames >= MAX_FRAMES:
        raise InvalidRequestError(FIELD, "source.too_many_frames", file=use.name, most=MAX_FRAMES)
    metadata = _metadata_of(use)
    _check_not_finished(use, metadata)
    use = use.replace(parts=_parts_of(use, metadata))
    return use, _last_frame(use, cache_dir if keep else None, check)


def _metadata_of(use: VideoUse) -> dict[str, Any]:
    """Return what Tandem wrote into a video about its request and plan; empty for other videos."""
    metadata = find_metadata(use.path)
    return {name: value for name, value in metadata.items() if name in {"request", "plan"} and isinstance(value, dict)}


def _check_not_finished(use: VideoUse, metadata: Mapping[str, Any]) -> None:
    """Check that a video of Tandem has the frames that the model made.

    Raises:
        InvalidRequestError: if they were enlarged or interpolated, with the name of the video that was kept.
    """
    request = metadata.get("request", {})
    made = [request.get(name) for name in ("width", "height", "fps")]
    if all(isinstance(value, int) for value in made) and made != [use.width, use.height, use.fps]:
        plain = plain_output(Path(use.name)).name
        raise InvalidRequestError(FIELD, "source.finished", file=use.name, plain=plain)


def _parts_of(use: VideoUse, metadata: Mapping[str, Any]) -> tuple[ClipPart, ...]:
    """Return the parts of a video as its metadata states them; one if it states none."""
    with contextlib.suppress(ValidationError):
        parts = _PARTS.validate_python(metadata.get("plan", {}).get("parts"))
        if sum(part.frames for part in parts) == use.frames:
            return parts
    prompt = metadata.get("request", {}).get("prompt")
    usable = isinstance(prompt, str) and len(prompt) <= MAX_PROMPT_CHARACTERS
    return (ClipPart(prompt=str(prompt) if usable else "", frames=use.frames),)


def _last_frame(use: VideoUse, cache_dir: Path | None, check: Callable[[], None]) -> ImageUse:
    """Return the last frame of a video as an image, whose file is kept unless `cache_dir` is `None`."""
    if use.digest not in _LAST_FRAMES:
        info = open_video(use, check, FIELD)
        frames = deque(read_video(info, 1, rate=Fraction(use.fps), most=use.frames, field=FIELD, check=check), 1)
        file = BytesIO()
        Image.fromarray(frames[0][0]).save(file, "PNG", compress_level=1)
        remember(_LAST_FRAMES, use.digest, file.getvalue(), _MOST_FRAMES)
    data, name = _LAST_FRAMES[use.digest], f"{Path(use.name).stem} (last frame).png"
    if cache_dir is not None:
        return keep_image(data, name, FIELD, cache_dir, check=check)
    digest = hashlib.sha256(data).hexdigest()
    return ImageUse(name=name, path=use.path, digest=digest, width=use.width, height=use.height)
