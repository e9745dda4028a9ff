"""The model of a request: its spec with LoRAs, the networks for finished frames, and the images or video."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.request import AUTO, OFF, GenerationRequest
from runtime.models.catalogue import check_makes_videos, find, look_up
from runtime.models.control import check_control, with_control
from runtime.models.extended import check_extended, with_extended
from runtime.models.images import check_images, with_images
from runtime.models.loras import with_loras
from runtime.models.registry import find_interpolator, find_upscaler
from runtime.models.spec import ModelSpec
from runtime.models.videos import check_video, with_video

# The field that is wrong, by what is wrong with an upscaler.
_FIELDS = {"upscaler.none": "upscale", "upscaler.scale": "upscale", "upscaler.unknown": "upscaler"}


def model_for(
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    needs_weights: bool = True,
    needs_image: bool = True,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a request's model with its stages, LoRAs, interpolator and upscaler, and its images or video.

    Args:
        needs_weights: whether the model's weights must be downloaded.
        needs_image, keep, check: see `models.images.with_images`.

    Raises:
        ModelError: if the model does not exist, only decodes, or a file of it, a LoRA or the upscaler cannot be used.
        InvalidRequestError: if a LoRA is for an expert that the model does not have, the upscaler is not installed
            or does not enlarge as much, or an image or the video cannot be used.
        MachineError: if the process that decodes images does not start, or there is no ffmpeg for a video.
        OutputError: if the disk is too full for the copy of an image or a video.
    """
    spec = (find if needs_weights else look_up)(request.model, weights_dir)
    check_makes_videos(spec, request.model)
    spec = with_loras(spec.in_stages(int(request.stages)), request.loras, weights_dir)
    spec = with_finishers(spec, request, weights_dir)
    return with_inputs(spec, request, weights_dir, cache_dir, needs_image=needs_image, keep=keep, check=check)


def with_inputs(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    needs_image: bool = True,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the images and videos of a request.

    Args:
        cache_dir, needs_image, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if one cannot be used.
        MachineError, OutputError: see `model_for`.
    """
    check_inputs(spec, request, weights_dir, needs_image=needs_image)
    spec = with_control(spec, request, weights_dir, cache_dir, needs_files=needs_image, keep=keep, check=check)
    spec = with_video(spec, request, weights_dir, cache_dir, keep=keep, check=check)
    spec = with_images(spec, request, weights_dir, cache_dir, needs_image=needs_image, keep=keep, check=check)
    return with_extended(spec, request, weights_dir, cache_dir, keep=keep, check=check)


def check_inputs(spec: ModelSpec, request: GenerationRequest, weights_dir: Path, *, needs_image: bool = True) -> None:
    """Check that a model takes the images and videos of a request, and needs no others, without reading a file.

    Raises:
        InvalidRequestError: if it does not take one, with the models that do, or needs another one.
    """
    check_control(spec, request, weights_dir, needs_files=needs_image)
    check_video(spec, request, weights_dir)
    check_images(spec, request, weights_dir, needs_image=needs_image)
    check_extended(spec, request, weights_dir)


def with_finishers(spec: ModelSpec, request: GenerationRequest, weights_dir: Path) -> ModelSpec:
    """Return a model with the network that interpolates and the upscaler, as far as the request's video needs them.

    The model's defaults decide about the upscaler if the request does not.

    Raises:
        ModelError: if its file cannot be used.
        InvalidRequestError: if the request has one that is not installed, or does not enlarge as much.
    """
    if spec.interpolates and request.interpolate != OFF:
        spec = replace(spec, interpolator=find_interpolator())
    scale = spec.defaults.upscale if request.upscale == AUTO else request.upscale
    if scale == OFF:
        return spec
    name = None if request.upscaler == AUTO else request.upscaler
    try:
        return replace(spec, upscaler=find_upscaler(name, int(scale), weights_dir))
    except (InvalidRequestError, ModelError) as error:
        if error.fact.code == "upscaler.none" and (request.upscale, name) == (AUTO, None):
            return spec  # the plan warns
        field = _FIELDS.get(error.fact.code)
        if field is None:
            raise
        raise InvalidRequestError(field, error.fact.code, **error.fact.data) from error
