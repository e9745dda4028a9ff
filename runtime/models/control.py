"""What steers a video: a control video, a mask and reference images, added to a model's spec. Imports no torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.request import CONTROL_FIELDS, CONTROL_OPTIONS, CONTROL_SCALE, OFF, GenerationRequest
from runtime.models.images import all_models, find_image
from runtime.models.spec import ModelSpec
from runtime.models.videos import find_picture, find_video, frames_taken

_CONTROL, _MASK, _REFERENCES = CONTROL_FIELDS
_SCALE, _PREPROCESS, _START = CONTROL_OPTIONS


def with_control(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the control video, the mask and the reference images of a request, checked and copied.

    Args:
        cache_dir, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if one cannot be read, the model is not steered by them, there is a mask, a preprocessing
            or a start without a control video, a video ends before its start, or the number of scales is not that of
            the model's control blocks.
        MachineError: if there is no ffmpeg, or the process that decodes images does not start.
        OutputError: if the disk is too full for a copy.
    """
    used_fields = [field for field in CONTROL_FIELDS if getattr(request, field)]
    used_fields += [] if request.control_scale == CONTROL_SCALE else [_SCALE]
    used_fields += [] if request.preprocess == OFF else [_PREPROCESS]
    start = request.control_second
    used_fields += [_START] if start else []
    if not used_fields:
        return spec
    if spec.control_input is None:
        able = [model.name for model in all_models(weights_dir) if model.control_input is not None]
        code = "control.model_without" if able else "control.no_model"
        raise InvalidRequestError(used_fields[0], code, field=used_fields[0], model=spec.title, models=able)
    count, blocks = len(request.control_scale), spec.control_input.blocks
    if count not in {1, blocks}:
        raise InvalidRequestError(_SCALE, "control.scales", count=count, model=spec.title, blocks=blocks)
    if request.control is None and request.mask is not None:
        raise InvalidRequestError(_MASK, "control.mask_alone")
    if request.control is None and request.preprocess != OFF:
        raise InvalidRequestError(_PREPROCESS, "control.preprocess_alone")
    if request.control is None and start:
        raise InvalidRequestError(_START, "control.start_alone")
    fps, most = frames_taken(request, spec)
    control = mask = None
    if request.control is not None:
        control = find_video(request.control, cache_dir, fps, most, field=_CONTROL, keep=keep, check=check, start=start)
    if request.mask is not None:
        mask = find_picture(request.mask, cache_dir, fps, most, field=_MASK, keep=keep, check=check, start=start)
    references = tuple(find_image(file, _REFERENCES, cache_dir, keep=keep, check=check) for file in request.references)
    return replace(spec, control=control, mask=mask, references=references)
