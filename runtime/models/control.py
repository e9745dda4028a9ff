"""What steers a video: a control video, a face, a mask, reference images; added to a model's spec. Imports no torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.images import parse_boxes
from runtime.core.request import (
    BY_MODEL,
    CONTROL_FIELDS,
    CONTROL_SCALE,
    CONTROL_VIDEOS,
    OFF,
    OVERLAP,
    GenerationRequest,
)
from runtime.models.images import all_models, find_image
from runtime.models.preprocessors import find_preprocessor, missing_model
from runtime.models.spec import ModelSpec
from runtime.models.videos import find_picture, find_video, frames_taken

_MASK, _REFERENCES = "mask", "references"
_SCALE, _PREPROCESS, _START, _OUTPAINT = "control_scale", "preprocess", "control_start", "outpaint"
# Refusals of what is done with a control video, without one.
_ALONE = {
    _PREPROCESS: "control.preprocess_alone",
    _OUTPAINT: "control.outpaint_alone",
    _START: "control.start_alone",
}


def with_control(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    needs_files: bool = True,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the videos and reference images of a request that steer its video, checked and copied.

    Args:
        needs_files: whether videos must be given for a model that makes none without them.
        cache_dir, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: see `check_control`; or if one cannot be read, or a video ends before its start.
        ModelError: if the model that makes control frames cannot be used.
        MachineError: if there is no ffmpeg, or the process that decodes images does not start.
        OutputError: if the disk is too full for a copy.
    """
    check_control(spec, request, weights_dir, needs_files=needs_files)
    if spec.control_input is None:
        return spec
    fps, most = frames_taken(request, spec)
    boxes = None if request.mask is None else parse_boxes(request.mask)
    videos: dict[str, Any] = {
        field: (find_picture if field == _MASK else find_video)(
            file, cache_dir, fps, most, field=field, keep=keep, check=check, start=request.control_second
        )
        for field in CONTROL_VIDEOS
        if (file := getattr(request, field)) is not None and (field != _MASK or boxes is None)
    }
    videos |= {} if boxes is None else {_MASK: boxes}
    taken = replace(spec.control_input, overlap=int(request.overlap))
    references = tuple(find_image(file, _REFERENCES, cache_dir, keep=keep, check=check) for file in request.references)
    if request.preprocess in BY_MODEL:
        preprocessor = find_preprocessor(request.preprocess, weights_dir, cache_dir, check)
        spec = replace(spec, preprocessor=preprocessor)
    return replace(spec, control_input=taken, references=references, outpaint=request.outpaint, **videos)


def check_control(spec: ModelSpec, request: GenerationRequest, weights_dir: Path, *, needs_files: bool = True) -> None:
    """Check what steers a request's video, without reading a file; see `with_control`.

    Raises:
        InvalidRequestError: if the model is not steered by it or needs something else, there is a mask without the
            video that it changes, or that video without a mask where the model needs one, there is a preprocessing, a
            start or borders without a control video, the number of scales is not that of the model's control blocks, or
            the model that makes the control frames is not installed.
    """
    used_fields = [field for field in CONTROL_FIELDS if getattr(request, field)]
    used_fields += [] if request.control_scale == CONTROL_SCALE else [_SCALE]
    used_fields += [] if request.preprocess == OFF else [_PREPROCESS]
    used_fields += [_OUTPAINT] if any(request.outpaint) else []
    used_fields += [] if request.overlap == OVERLAP else ["overlap"]
    used_fields += [_START] if request.control_second else []
    taken = spec.control_input
    if taken is None:
        if used_fields:
            able = [model.name for model in all_models(weights_dir) if _takes(model, used_fields[0])]
            code = "control.model_without" if able else "control.no_model"
            raise InvalidRequestError(used_fields[0], code, field=used_fields[0], model=spec.title, models=able)
        return
    for field in used_fields:
        if field not in taken.fields:
            able = [model.name for model in all_models(weights_dir) if _takes(model, field)]
            code = "control.other_model" if able else "control.not_taken"
            raise InvalidRequestError(field, code, field=field, model=spec.title, models=able)
    count = len(request.control_scale)
    if count not in {1, taken.blocks}:
        raise InvalidRequestError(_SCALE, "control.scales", count=count, model=spec.title, blocks=taken.blocks)
    for field in taken.required if needs_files else ():
        if getattr(request, field) is None:
            raise InvalidRequestError(field, "control.required", field=field, model=spec.title)
    masked = getattr(request, taken.masked)
    if masked is None and request.mask is not None:
        code = "control.mask_alone" if taken.masked == "control" else "control.mask_without_background"
        raise InvalidRequestError(_MASK, code)
    if request.background is not None and request.mask is None:
        raise InvalidRequestError(_MASK, "control.background_alone")
    for field in (field for field in _ALONE if request.control is None and field in used_fields):
        raise InvalidRequestError(field, _ALONE[field])
    if request.preprocess != OFF and request.mask is None and any(request.outpaint):
        raise InvalidRequestError(_PREPROCESS, "control.preprocess_kept")
    missing = missing_model(request.preprocess, weights_dir) if request.preprocess in BY_MODEL else None
    if missing is not None:
        raise missing


def _takes(spec: ModelSpec, field: str) -> bool:
    return spec.control_input is not None and field in spec.control_input.fields
