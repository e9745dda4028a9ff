"""The model of a request: its spec with the LoRAs and images that the request adds."""

from collections.abc import Callable
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import check_makes_videos, find, look_up
from runtime.models.images import with_images
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec


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
    """Return a request's model with its LoRAs and images.

    Args:
        needs_weights: whether the model's weights must be downloaded.
        needs_image, keep, check: see `models.images.with_images`.

    Raises:
        ModelError: if the model does not exist, only decodes, or it or a LoRA cannot be used.
        InvalidRequestError: if a LoRA is for an expert that the model does not have, or an image cannot be used.
        MachineError: if the process that decodes images does not start.
        OutputError: if the disk is too full for the copy of an image.
    """
    spec = (find if needs_weights else look_up)(request.model, weights_dir)
    check_makes_videos(spec, request.model)
    spec = with_loras(spec, request.loras, weights_dir)
    return with_images(spec, request, weights_dir, cache_dir, needs_image=needs_image, keep=keep, check=check)
